"""Triton's program of cross entropy: one row of logits at a time, and its gradient in the memory of the logits."""

import triton
import triton.language as tl


@triton.jit
def _score(logits, FACTOR: tl.constexpr, CAP: tl.constexpr):
    """Return scores, and their derivative by the logits."""
    wide = logits.to(tl.float32) * FACTOR
    if CAP == 0.0:
        scores = wide
        slope = tl.full(wide.shape, FACTOR, tl.float32)
    else:
        small = tl.exp(-2.0 * tl.abs(wide))
        share = (1.0 - small) / (1.0 + small)
        scores = tl.where(wide < 0.0, -CAP, CAP) * share
        slope = (1.0 - share * share) * (FACTOR * CAP)
    return scores, slope


@triton.jit
def row_of_cross_entropy(
    logits, labels, weights, losses, step, words,
    IGNORED: tl.constexpr, SMOOTHING: tl.constexpr, FACTOR: tl.constexpr, CAP: tl.constexpr,
    GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of a row, and where GRADIENT says so its gradient over the logits.

    Args:
        logits: rows of so many words, each `step` elements behind the one before.
        labels: int64, one a row; a row with IGNORED has the loss 0, and a gradient of zeros.
        weights: where WEIGHTED, one float32 number, by which gradients are multiplied.
        losses: float32, one a row.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    at = logits + row * step
    column = tl.arange(0, BLOCK)
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, words, BLOCK):
                tl.store(at + start + column, 0.0, mask=start + column < words)
    else:
        highest = float("-inf")
        total = 0.0
        summed = 0.0
        of_label = float("nan")  # a label that is no word
        for start in range(0, words, BLOCK):
            inside = start + column < words
            scores, _ = _score(tl.load(at + start + column, mask=inside, other=0.0), FACTOR, CAP)
            if SMOOTHING != 0.0:
                summed += tl.sum(tl.where(inside, scores, 0.0))
            scores = tl.where(inside, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # where no word so far is possible
            total = total * tl.exp(highest - base) + tl.sum(tl.exp(scores - base))
            highest = higher
            found = (start + column) == label
            if tl.sum(found.to(tl.int32)) > 0:
                of_label = tl.sum(tl.where(found & inside, scores, 0.0))
        whole = highest + tl.log(total)
        loss = whole - (1.0 - SMOOTHING) * of_label
        if SMOOTHING != 0.0:
            loss -= SMOOTHING * (summed / words)
        tl.store(losses + row, loss)
        if GRADIENT:
            weight = tl.load(weights) if WEIGHTED else 1.0
            for start in range(0, words, BLOCK):
                inside = start + column < words
                scores, slope = _score(tl.load(at + start + column, mask=inside, other=0.0), FACTOR, CAP)
                wanted = tl.where((start + column) == label, 1.0 - SMOOTHING, 0.0) + SMOOTHING / words
                gradient = (tl.exp(scores - whole) - wanted) * slope * weight
                tl.store(at + start + column, gradient.to(logits.dtype.element_ty), mask=inside)
