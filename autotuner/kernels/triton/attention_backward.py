"""Attention's backward as two Triton programs (FlashAttention-2): of queries first, then of keys and values.

The first also leaves for the second, per row, the log-sum-exp in base 2 and the sum of gradient times output. A third
program makes the gradient of a bias of the scores, a fourth that of sinks. None adds to memory that another one writes,
so results do not depend on the order in which programs run.
"""

import triton
import triton.language as tl

from autotuner.kernels.triton.attention_forward import (
    added_along_columns,
    added_along_rows,
    in_window,
    scores_in_base_2,
    seen_by,
)
from autotuner.kernels.triton.bits import kept_along_columns, kept_along_rows, words_at_once


@triton.jit
def query_gradient(
    query, key, value, out, gradient, into_query, log_sum_exp, statistics, words, added, hides,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row, gradient_batch, gradient_head, gradient_row,
    into_query_batch, into_query_head, into_query_row, added_batch, added_head, added_row, added_key,
    added_batches, hides_batch, hides_head, hides_row, hides_key, hides_batches,
    heads, rows, columns, factor, cap, before, after, kept,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, CAPS: tl.constexpr, ADDS: tl.constexpr, OVER_ROWS: tl.constexpr,
    HIDES: tl.constexpr, HIDES_ROWS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Gradient of the query, for a tile of its rows.

    Args:
        gradient: of the output; it and the other operands as in forward.
        statistics: two float32 for each row: log-sum-exp in base 2, and `kept` times the sum of gradient times output.
        kept: the share of the weights that is kept.
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
    added += batch % added_batches * added_batch + head.to(tl.int64) * added_head
    hides += batch % hides_batches * hides_batch + head.to(tl.int64) * hides_head
    out += batch * out_batch + head * out_head
    gradient += batch * gradient_batch + head * gradient_head
    into_query += batch * into_query_batch + head * into_query_head
    words_per_row = columns // 32
    row_starts = (head_of_all * rows + row) * words_per_row
    queries = tl.load(query + row[:, None] * query_row + feature[None, :], mask=ok[:, None], other=0.0)
    gradients = tl.load(gradient + row[:, None] * gradient_row + feature[None, :], mask=ok[:, None], other=0.0)
    outs = tl.load(out + row[:, None] * out_row + feature[None, :], mask=ok[:, None], other=0.0)
    mean = tl.sum(outs.to(tl.float32) * gradients.to(tl.float32), 1) * kept
    exponents = tl.load(log_sum_exp + head_of_all * rows + row, mask=ok, other=0.0).to(tl.float32) * LOG2_E
    place = statistics + 2 * (head_of_all * rows + row)
    tl.store(place, exponents, mask=ok)
    tl.store(place + 1, mean, mask=ok)
    sums = tl.zeros((ROWS, FEATURES), tl.float32)
    begin, last = 0, columns
    if CAUSAL:
        last = tl.minimum(columns, tile + ROWS)
    if WINDOW:
        begin, last = seen_by(tile, before, after, ROWS, COLUMNS, columns)
    for first in range(begin, last, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        key_at = key + column[:, None] * key_row + feature[None, :]
        value_at = value + column[:, None] * value_row + feature[None, :]
        if EVEN:
            keys, values = tl.load(key_at), tl.load(value_at)
        else:
            keys = tl.load(key_at, mask=(column < columns)[:, None], other=0.0)
            values = tl.load(value_at, mask=(column < columns)[:, None], other=0.0)
        scores, share = scores_in_base_2(tl.dot(queries, tl.trans(keys)), factor, cap, CAPS)
        above = tl.dot(gradients, tl.trans(values))
        if ADDS:
            scores += added_along_rows(added, row, column, added_row, added_key, rows, columns, EVEN, OVER_ROWS)
        if HIDES:
            scores += added_along_rows(hides, row, column, hides_row, hides_key, rows, columns, EVEN, HIDES_ROWS)
        weights = tl.exp2(scores - exponents[:, None])
        if not EVEN:
            weights = tl.where((column < columns)[None, :], weights, 0.0)
        if CAUSAL:
            weights = tl.where(column[None, :] <= row[:, None], weights, 0.0)
        if WINDOW:
            weights = tl.where(in_window(column[None, :], row[:, None], before, after), weights, 0.0)
        if DROPS:
            spread = words_at_once(words, row_starts, ok, first // 32, words_per_row, COLUMNS, EVEN, False)
            above = tl.where(kept_along_rows(spread, COLUMNS), above, 0.0)
        below = weights * (above - mean[:, None])
        if CAPS:
            below = below * (1.0 - share * share)
        sums = tl.dot(below.to(keys.dtype), keys, sums)
    sums = sums * (factor / kept)
    tl.store(
        into_query + row[:, None] * into_query_row + feature[None, :],
        sums.to(into_query.dtype.element_ty), mask=ok[:, None],
    )  # fmt: skip


@triton.jit
def key_value_gradient(
    query, key, value, gradient, into_key, into_value, statistics, words, added, hides,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_head, gradient_row, into_key_batch, into_key_head, into_key_row,
    into_value_batch, into_value_head, into_value_row, added_batch, added_head, added_row, added_key,
    added_batches, hides_batch, hides_head, hides_row, hides_key, hides_batches,
    heads, rows, columns, factor, cap, before, after, kept,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, CAPS: tl.constexpr, ADDS: tl.constexpr, OVER_ROWS: tl.constexpr,
    HIDES: tl.constexpr, HIDES_ROWS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Gradients of key and value, for a tile of their rows; scores are computed with their axes swapped.

    Args:
        heads: of queries.
        GROUP: of these share a key; the gradients are sums over them.
    """
    shared_heads = heads // GROUP
    batch, shared = (tl.program_id(1) // shared_heads).to(tl.int64), tl.program_id(1) % shared_heads
    tile = tl.program_id(0) * COLUMNS
    column = tile + tl.arange(0, COLUMNS)
    inside = column < columns
    feature = tl.arange(0, FEATURES)
    query += batch * query_batch
    key += batch * key_batch + shared * key_head
    value += batch * value_batch + shared * value_head
    gradient += batch * gradient_batch
    into_key += batch * into_key_batch + shared * into_key_head
    into_value += batch * into_value_batch + shared * into_value_head
    added += batch % added_batches * added_batch
    hides += batch % hides_batches * hides_batch
    words_per_row = columns // 32
    keys = tl.load(key + column[:, None] * key_row + feature[None, :], mask=inside[:, None], other=0.0)
    values = tl.load(value + column[:, None] * value_row + feature[None, :], mask=inside[:, None], other=0.0)
    if ADDS and not OVER_ROWS:
        addend = added_along_columns(added, column, column, 0, added_key, rows, columns, EVEN, False)
    key_sums = tl.zeros((COLUMNS, FEATURES), tl.float32)
    value_sums = tl.zeros((COLUMNS, FEATURES), tl.float32)
    begin, end = 0, rows
    if CAUSAL:
        begin = tile // ROWS * ROWS
    if WINDOW:
        begin, end = seen_by(tile, after, before, COLUMNS, ROWS, rows)
    steps = tl.cdiv(end - begin, ROWS)
    for step in range(steps * GROUP):
        member = step // steps if GROUP > 1 else 0
        first = begin + (step - member * steps) * ROWS
        head = shared * GROUP + member
        head_of_all = tl.program_id(1) * GROUP + member
        row = first + tl.arange(0, ROWS)
        ok = row < rows
        query_at = query + head * query_head + row[:, None] * query_row + feature[None, :]
        gradient_at = gradient + head * gradient_head + row[:, None] * gradient_row + feature[None, :]
        place = statistics + 2 * (head_of_all * rows + row)[:, None] + tl.arange(0, 2)[None, :]
        if EVEN:
            queries, gradients, both = tl.load(query_at), tl.load(gradient_at), tl.load(place)
        else:
            queries = tl.load(query_at, mask=ok[:, None], other=0.0)
            gradients = tl.load(gradient_at, mask=ok[:, None], other=0.0)
            both = tl.load(place, mask=ok[:, None], other=0.0)
        exponents, mean = tl.split(both)
        scores, share = scores_in_base_2(tl.dot(keys, tl.trans(queries)), factor, cap, CAPS)
        if OVER_ROWS:
            own = added + head.to(tl.int64) * added_head
            addend = added_along_columns(own, row, column, added_row, added_key, rows, columns, EVEN, True)
        if ADDS:
            scores += addend
        if HIDES:
            own_mask = hides + head.to(tl.int64) * hides_head
            scores += added_along_columns(own_mask, row, column, hides_row, hides_key, rows, columns, EVEN, HIDES_ROWS)
        weights = tl.exp2(scores - exponents[None, :])
        if not EVEN:
            weights = tl.where(ok[None, :], weights, 0.0)
        if CAUSAL:
            weights = tl.where(column[:, None] <= row[None, :], weights, 0.0)
        if WINDOW:
            weights = tl.where(in_window(column[:, None], row[None, :], before, after), weights, 0.0)
        if DROPS:
            row_starts = (head_of_all * rows + row) * words_per_row
            spread = words_at_once(words, row_starts, ok, tile // 32, words_per_row, COLUMNS, EVEN, True)
            dropped = tl.where(kept_along_columns(spread, COLUMNS), weights, 0.0)
        else:
            dropped = weights
        value_sums = tl.dot(dropped.to(gradients.dtype), gradients, value_sums)
        above = tl.dot(values, tl.trans(gradients))
        below = dropped * above - weights * mean[None, :]
        if CAPS:
            below = below * (1.0 - share * share)
        key_sums = tl.dot(below.to(queries.dtype), queries, key_sums)
    key_sums = key_sums * (factor / kept)
    value_sums = value_sums / kept
    tl.store(
        into_key + column[:, None] * into_key_row + feature[None, :],
        key_sums.to(into_key.dtype.element_ty), mask=inside[:, None],
    )  # fmt: skip
    tl.store(
        into_value + column[:, None] * into_value_row + feature[None, :],
        value_sums.to(into_value.dtype.element_ty), mask=inside[:, None],
    )  # fmt: skip


@triton.jit
def bias_gradient(
    query, key, value, gradient, into, statistics, words, added, hides,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    gradient_batch, gradient_head, gradient_row, into_part, into_batch, into_head, into_row, into_column,
    added_batch, added_head, added_row, added_key,
    added_batches, hides_batch, hides_head, hides_row, hides_key, hides_batches,
    heads, rows, columns, factor, cap, before, after, kept,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, HIDES: tl.constexpr, HIDES_ROWS: tl.constexpr,
    BATCHES: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Gradient of a bias of the scores, for a tile of rows and keys: of the scores, summed over what shares the bias.

    Args:
        into: parts of the gradient, which are added up behind, each by batch entry, head, row and key.
        BATCHES: entries of the batch that share a bias: 1, or all of them.
        HEADS: heads that share a bias: 1, or all of them.
        PARTS: of the sum, each made by a program of its own.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    own_heads = heads // HEADS
    of_batch, of_head = (tl.program_id(1) // own_heads).to(tl.int64), (tl.program_id(1) % own_heads).to(tl.int64)
    tiles = tl.cdiv(columns, COLUMNS)
    tile, first = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles * COLUMNS
    row, column = tile + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    ok, inside = row < rows, column < columns
    feature = tl.arange(0, FEATURES)
    words_per_row = columns // 32
    in_base_2 = factor * LOG2_E
    added += of_batch * added_batch + of_head * added_head
    addend = added_along_rows(added, row, column, added_row, added_key, rows, columns, EVEN, True)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(2) * tl.cdiv(BATCHES * HEADS, PARTS)
    for step in range(begin, tl.minimum(begin + tl.cdiv(BATCHES * HEADS, PARTS), BATCHES * HEADS)):
        batch, head = of_batch + step // HEADS, of_head + step % HEADS
        query_at = query + batch * query_batch + head * query_head + row[:, None] * query_row + feature[None, :]
        gradient_at = (
            gradient + batch * gradient_batch + head * gradient_head + row[:, None] * gradient_row + feature[None, :]
        )
        key_at = key + batch * key_batch + head // GROUP * key_head + column[:, None] * key_row + feature[None, :]
        value_at = (
            value + batch * value_batch + head // GROUP * value_head + column[:, None] * value_row + feature[None, :]
        )
        head_of_all = (batch * heads + head).to(tl.int32)
        place = statistics + 2 * (head_of_all * rows + row)
        if EVEN:
            queries, gradients, keys, values = (
                tl.load(query_at),
                tl.load(gradient_at),
                tl.load(key_at),
                tl.load(value_at),
            )
            exponents, mean = tl.load(place), tl.load(place + 1)
        else:
            queries = tl.load(query_at, mask=ok[:, None], other=0.0)
            gradients = tl.load(gradient_at, mask=ok[:, None], other=0.0)
            keys = tl.load(key_at, mask=inside[:, None], other=0.0)
            values = tl.load(value_at, mask=inside[:, None], other=0.0)
            exponents, mean = tl.load(place, mask=ok, other=0.0), tl.load(place + 1, mask=ok, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * in_base_2 + addend
        above = tl.dot(gradients, tl.trans(values))
        if HIDES:
            own_mask = hides + batch % hides_batches * hides_batch + head.to(tl.int64) * hides_head
            scores += added_along_rows(own_mask, row, column, hides_row, hides_key, rows, columns, EVEN, HIDES_ROWS)
        weights = tl.exp2(scores - exponents[:, None])
        if CAUSAL:
            weights = tl.where(column[None, :] <= row[:, None], weights, 0.0)
        if DROPS:
            row_starts = (head_of_all * rows + row) * words_per_row
            spread = words_at_once(words, row_starts, ok, first // 32, words_per_row, COLUMNS, EVEN, False)
            above = tl.where(kept_along_rows(spread, COLUMNS), above, 0.0)
        sums += weights * (above - mean[:, None])
    into += tl.program_id(2).to(tl.int64) * into_part + of_batch * into_batch + of_head * into_head
    at = into + row[:, None] * into_row + column[None, :] * into_column
    tl.store(at, (sums / kept).to(into.dtype.element_ty), mask=ok[:, None] & inside[None, :])


@triton.jit
def sink_gradient(statistics, sinks, into, batches, heads, rows, kept, COLUMNS: tl.constexpr):
    """Gradient of the sink of a head: less what its weight takes from all others, summed over the rows of a batch.

    Args:
        statistics: as `query_gradient` left them.
        COLUMNS: rows that are read at once.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0)
    sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    sums = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, batches * rows, COLUMNS):
        number = first + tl.arange(0, COLUMNS)
        place = statistics + 2 * ((number // rows * heads + head) * rows + number % rows)
        ok = number < batches * rows
        exponents, mean = tl.load(place, mask=ok, other=0.0), tl.load(place + 1, mask=ok, other=0.0)
        sums += tl.exp2(sink - exponents) * mean
    tl.store(into + head, (-tl.sum(sums, 0) / kept).to(into.dtype.element_ty))
