"""Triton's program of cross entropy: one row of logits at a time, and its gradient in the memory of the logits."""

import triton
import triton.language as tl


@triton.jit
def _score(logits, FACTOR: tl.constexpr, CAP: tl.constexpr):
    wide = logits.to(tl.float32) * FACTOR
    if CAP == 0.0:
        scores = wide
    else:
        small = tl.exp(-2.0 * tl.abs(wide))
        scores = tl.where(wide < 0.0, -CAP, CAP) * ((1.0 - small) / (1.0 + small))
    return scores


@triton.jit
def _joined(highest, total, scores):
    """Return the largest of all scores so far, and the sum of their exponentials over its own, lane by lane."""
    higher = tl.maximum(highest, scores)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # where no word so far is possible
    return higher, total * tl.exp(highest - base) + tl.exp(scores - base)


@triton.jit
def _gradient(
    logits, columns, label, whole, weight, of_whole, words,
    SMOOTHING: tl.constexpr, FACTOR: tl.constexpr, CAP: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    scores = _score(logits, FACTOR, CAP)
    wanted = tl.where(columns == label, 1.0 - SMOOTHING, 0.0) + SMOOTHING / words
    share = tl.exp(scores - whole)
    gradient = (share - wanted) * (FACTOR * weight)
    if SQUARED:
        gradient += share * (FACTOR * of_whole)
    if CAP != 0.0:
        part = scores / CAP
        gradient *= (1.0 - part * part) * CAP
    return gradient.to(logits.dtype)


@triton.jit
def row_of_cross_entropy(
    logits, labels, weights, losses, squares, squared, step, words,
    IGNORED: tl.constexpr, SMOOTHING: tl.constexpr, FACTOR: tl.constexpr, CAP: tl.constexpr,
    GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, SQUARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of a row, and where GRADIENT says so its gradient over the logits.

    Blocks that are whole have no mask, so that neighbours are read and written together.

    Args:
        logits: rows of so many words, each `step` elements behind the one before.
        labels: int64, one a row; a row with IGNORED has the loss 0, and a gradient of zeros.
        weights: where WEIGHTED, one float32 number, by which gradients are multiplied.
        losses: float32, one a row.
        squares, squared: where SQUARED, float32, one a row: by what the square of a row's log-sum-exp is multiplied,
            and the result. Its gradient is added to that of the loss, in rows with IGNORED too.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    at = logits + row * step
    column = tl.arange(0, BLOCK)
    rest = words // BLOCK * BLOCK
    last = rest + column
    inside = last < words
    counts = label != IGNORED
    is_read = True if SQUARED else counts
    if not is_read:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], logits.dtype.element_ty)
            for start in range(0, rest, BLOCK):
                tl.store(at + start + column, zeros)
            tl.store(at + last, zeros, mask=inside)
    else:
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        summed = tl.zeros([BLOCK], tl.float32)
        for start in range(0, rest, BLOCK):
            scores = _score(tl.load(at + start + column), FACTOR, CAP)
            if SMOOTHING != 0.0:
                summed += scores
            highest, total = _joined(highest, total, scores)
        scores = _score(tl.load(at + last, mask=inside, other=0.0), FACTOR, CAP)
        if SMOOTHING != 0.0:
            summed += tl.where(inside, scores, 0.0)
        highest, total = _joined(highest, total, tl.where(inside, scores, float("-inf")))
        top = tl.max(highest)
        base = tl.where(top == float("-inf"), 0.0, top)
        whole = top + tl.log(tl.sum(total * tl.exp(highest - base)))
        is_word = (label >= 0) & (label < words)
        of_label = _score(tl.load(at + label, mask=is_word, other=0.0), FACTOR, CAP)
        loss = whole - (1.0 - SMOOTHING) * tl.where(is_word, of_label, float("nan"))
        if SMOOTHING != 0.0:
            loss -= SMOOTHING * (tl.sum(summed) / words)
        if SQUARED:
            loss = tl.where(counts, loss, 0.0)
            factor = tl.load(squares + row)
            tl.store(squared + row, factor * whole * whole)
        tl.store(losses + row, loss)
        if GRADIENT:
            weight = tl.load(weights) if WEIGHTED else 1.0
            of_whole = 0.0
            if SQUARED:
                weight = tl.where(counts, weight, 0.0)
                of_whole = 2.0 * factor * whole
            for start in range(0, rest, BLOCK):
                columns = start + column
                read = tl.load(at + columns)
                made = _gradient(read, columns, label, whole, weight, of_whole, words, SMOOTHING, FACTOR, CAP, SQUARED)
                tl.store(at + columns, made)
            read = tl.load(at + last, mask=inside, other=0.0)
            made = _gradient(read, last, label, whole, weight, of_whole, words, SMOOTHING, FACTOR, CAP, SQUARED)
            tl.store(at + last, made, mask=inside)
