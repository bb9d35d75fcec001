"""Attention's forward as a Triton program for each tile of queries (FlashAttention-2), with dropout by bits.

Scores are kept in base 2: exp2 is one instruction. The bits of a tile's rows are drawn before its first product.
"""

import triton
import triton.language as tl

from autotuner.kernels.triton.bits import drawn_words, dropped_halves, kept_along_rows, words_row_by_row

DRAWN_AT_ONCE = tl.constexpr(512)


@triton.jit
def hiding(addend):
    """Return a mask that is added to scores in base 2. The least bfloat16 would overflow; it hides a key all the same.

    ALiBi of 100,000 tokens is not cut off, and what is that low leaves a score seven bits behind its point.

    Where every key of a row has it, the weights are those without a mask. Where every key has -inf, they are NaN, as in
    the framework.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    LEAST: tl.constexpr = -100000.0
    wide = addend.to(tl.float32)
    return tl.where(wide == float("-inf"), wide, tl.maximum(wide * LOG2_E, LEAST))


@triton.jit
def scores_in_base_2(products, factor, cap, CAPS: tl.constexpr):
    """Return scores in base 2, and their share of the cap, tanh(factor * products / cap), where they have one."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if CAPS:
        share = 2.0 * tl.sigmoid(products * (2.0 * factor / cap)) - 1.0
        scores = share * (cap * LOG2_E)
    else:
        share = products
        scores = products * (factor * LOG2_E)
    return scores, share


@triton.jit
def added_along_rows(
    added, row, column, added_row, added_key, rows, columns, EVEN: tl.constexpr, OVER_ROWS: tl.constexpr
):
    """Return what is added to scores in base 2, of a tile: (rows, columns), or (1, columns) where all rows agree."""
    if OVER_ROWS:
        at = added + row[:, None] * added_row + column[None, :] * added_key
        if EVEN:
            addend = tl.load(at)
        else:
            addend = tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
    else:
        addend = tl.load(added + column * added_key, mask=column < columns, other=0.0)[None, :]
    return hiding(addend)


@triton.jit
def added_along_columns(
    added, row, column, added_row, added_key, rows, columns, EVEN: tl.constexpr, OVER_ROWS: tl.constexpr
):
    """Return the same of a tile (columns, rows), or (columns, 1)."""
    if OVER_ROWS:
        at = added + column[:, None] * added_key + row[None, :] * added_row
        if EVEN:
            addend = tl.load(at)
        else:
            addend = tl.load(at, mask=(column < columns)[:, None] & (row < rows)[None, :], other=0.0)
    else:
        addend = tl.load(added + column * added_key, mask=column < columns, other=0.0)[:, None]
    return hiding(addend)


@triton.jit
def seen_by(tile, before, after, EXTENT: tl.constexpr, STEP: tl.constexpr, end):
    """Return the first of the places that a tile sees, as a multiple of a step, and the one behind the last."""
    return tl.maximum(tile - before, 0) // STEP * STEP, tl.minimum(end, tile + EXTENT + after)


@triton.jit
def in_window(column, row, before, after):
    return (column >= row - before) & (column <= row + after)


@triton.jit
def forward(
    query, key, value, out, log_sum_exp, words, added, hides, sinks, seed,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row, added_batch, added_head, added_row, added_key, added_batches,
    hides_batch, hides_head, hides_row, hides_key, hides_batches,
    heads, rows, columns, factor, cap, before, after, kept_inverse,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, CAPS: tl.constexpr, ADDS: tl.constexpr, OVER_ROWS: tl.constexpr,
    HIDES: tl.constexpr, HIDES_ROWS: tl.constexpr, SINKS: tl.constexpr, SAVES: tl.constexpr, DROPS: tl.constexpr,
    KEPT: tl.constexpr, PACKS: tl.constexpr,
):  # fmt: skip
    """softmax(factor * query key^T + added), dropped by bits, times value.

    Args:
        query: with key, value and out: of a batch entry, a head and a row by their strides; features are contiguous.
        words: of the mask, drawn and written here.
        added: to the scores, by batch entry, head, row and key; stride 0 where it has no such axis. Behind so many
            `added_batches` entries it begins anew.
        hides: a mask that is added beside that, likewise.
        sinks: a score more for each head, whose weight goes nowhere.
        heads: of queries.
        before: so many keys before its own does a query see at most, and `after` behind it, where it has a window.
        kept_inverse: what weights that are kept are multiplied with.
        ROWS: of a tile; COLUMNS: keys of a tile.
        EVEN: tiles divide rows and columns.
        GROUP: heads of queries that share a key.
        OVER_ROWS: what is added differs from row to row, or from head to head; HIDES_ROWS: so does the mask beside it.
        KEPT: so many 65536ths of the weights are kept.
        PACKS: two weights are dropped at once, by PTX.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    head_of_all = tl.program_id(1)
    batch, head = (head_of_all // heads).to(tl.int64), head_of_all % heads
    tile = tl.program_id(0) * ROWS
    row = tile + tl.arange(0, ROWS)
    ok = row < rows
    feature = tl.arange(0, FEATURES)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // GROUP * key_head
    value += batch * value_batch + head // GROUP * value_head
    out += batch * out_batch + head * out_head
    added += batch % added_batches * added_batch + head.to(tl.int64) * added_head
    hides += batch % hides_batches * hides_batch + head.to(tl.int64) * hides_head
    words_per_row = columns // 32
    row_starts = (head_of_all * rows + row) * words_per_row
    if DROPS:
        start = (head_of_all * rows + tile) * words_per_row
        end = (head_of_all * rows + tl.minimum(tile + ROWS, rows)) * words_per_row
        state = tl.load(seed)
        for place in range(start, end, DRAWN_AT_ONCE):
            at = place + tl.arange(0, DRAWN_AT_ONCE)
            tl.store(words + at, drawn_words(state, at, KEPT), mask=at < end)
        tl.debug_barrier()
    at = query + row[:, None] * query_row + feature[None, :]
    queries = tl.load(at) if EVEN else tl.load(at, mask=ok[:, None], other=0.0)
    if SINKS:
        largest = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.where(largest == float("-inf"), 0.0, 1.0)
    else:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, FEATURES), tl.float32)
    in_base_2 = factor * LOG2_E
    begin, last = 0, columns
    if CAUSAL:
        last = tl.minimum(columns, tile + ROWS)
    if WINDOW:
        begin, last = seen_by(tile, before, after, ROWS, COLUMNS, columns)
    for first in range(begin, last, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        key_at = key + column[None, :] * key_row + feature[:, None]
        value_at = value + column[:, None] * value_row + feature[None, :]
        if EVEN:
            keys, values = tl.load(key_at), tl.load(value_at)
        else:
            keys = tl.load(key_at, mask=(column < columns)[None, :], other=0.0)
            values = tl.load(value_at, mask=(column < columns)[:, None], other=0.0)
        scores = tl.dot(queries, keys)
        if ADDS or CAPS or WINDOW:
            scores, _ = scores_in_base_2(scores, factor, cap, CAPS)
        if ADDS:
            scores += added_along_rows(added, row, column, added_row, added_key, rows, columns, EVEN, OVER_ROWS)
        if HIDES:
            scores += added_along_rows(hides, row, column, hides_row, hides_key, rows, columns, EVEN, HIDES_ROWS)
        if not EVEN:
            scores = tl.where((column < columns)[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(in_window(column[None, :], row[:, None], before, after), scores, float("-inf"))
        if ADDS or CAPS or WINDOW:
            grown = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(grown == float("-inf"), 0.0, grown)  # all keys so far are hidden
            weights = tl.exp2(scores - base[:, None])
        else:
            grown = tl.maximum(largest, tl.max(scores, 1) * in_base_2)
            base = grown
            weights = tl.exp2(scores * in_base_2 - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        largest = grown
        sums = sums * shrink[:, None]
        if DROPS:
            spread = words_row_by_row(words, row_starts, ok, first // 32, words_per_row, COLUMNS, EVEN)
            if PACKS:
                dropped = dropped_halves(weights, spread, ROWS, COLUMNS, values.dtype == tl.bfloat16)
            else:
                dropped = tl.where(kept_along_rows(spread, COLUMNS), weights, 0.0).to(values.dtype)
        else:
            dropped = weights.to(values.dtype)
        sums = tl.dot(dropped, values, sums)
    sums = sums * (kept_inverse / total)[:, None]
    tl.store(out + row[:, None] * out_row + feature[None, :], sums.to(out.dtype.element_ty), mask=ok[:, None])
    if SAVES:
        tl.store(log_sum_exp + head_of_all * rows + row, (largest + tl.log2(total)) / LOG2_E, mask=ok)
