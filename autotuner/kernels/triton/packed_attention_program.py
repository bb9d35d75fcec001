"""Attention over packed tokens as Triton programs: each row sees the keys between two bounds of its own.

Bounds never decrease from row to row, so the keys of a tile of rows lie together, and so do the rows that see a tile of
keys: a program goes over these alone. Which weights are dropped is drawn again wherever it is needed, from a seed, the
head and the place: a mask of all rows and keys is nowhere in memory. No program adds to what another one writes.

Source:
    Dao: FlashAttention-2: faster attention with better parallelism and work partitioning (2023).
"""

import triton
import triton.language as tl

from autotuner.kernels.triton.attention_forward import scores_in_base_2
from autotuner.kernels.triton.bits import drawn_words, kept_along_columns, kept_along_rows, spread_words


@triton.jit
def words_of_tile(
    seed, head, row, first, words_per_row, KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Return for each element of a tile the word whose bit says whether its weight is kept.

    Args:
        seed: of all heads; each has a key of its own.
        first: key of the tile, a multiple of 32.
        words_per_row: of the mask that is nowhere.
    """
    of_head = seed + head.to(tl.int64) * 0x1E3779B97F4A7C15
    place = row[:, None] * words_per_row + (first // 32 + tl.arange(0, COLUMNS // 32))[None, :]
    return spread_words(drawn_words(of_head, place, KEPT), ROWS, COLUMNS, SWAPPED)


@triton.jit
def loaded_seed(seed, BITS: tl.constexpr):
    """Return a seed, which is one number, or lies bit by bit."""
    if BITS == 0:
        found = tl.load(seed)
    else:
        bit = tl.arange(0, BITS)
        found = tl.sum(tl.where(tl.load(seed + bit) != 0, tl.full((BITS,), 1, tl.int64) << bit.to(tl.int64), 0))
    return found


@triton.jit
def loaded(at, ok, feature, FEATURES: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Return rows of an operand, (rows, features), 0 where there is none."""
    if EVEN and FEATURES == WIDTH:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=ok[:, None] & (feature < FEATURES)[None, :], other=0.0)
    return found


@triton.jit
def relative_bias(bias, distance, reach, bias_place):
    """Return what is added to scores in base 2, of pairs of some distances from a row to its key."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    place = tl.minimum(tl.maximum(distance, -reach), reach) + reach
    return tl.load(bias + place * bias_place).to(tl.float32) * LOG2_E


@triton.jit
def forward(
    query, key, value, out, log_sum_exp, bounds, seed, bias,
    query_head, query_row, key_head, key_row, value_head, value_row, out_head, out_row,
    rows, factor, cap, kept_inverse, reach, bias_head, bias_place,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, CAPS: tl.constexpr, BIASED: tl.constexpr, DROPS: tl.constexpr, KEPT: tl.constexpr,
    STEP: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """softmax(factor * query key^T) over the keys of each row, dropped, times value; and the log-sum-exp in base 2.

    Args:
        query: with key, value and out: of a head and a row by their strides; features are contiguous.
        bounds: (rows, STEP), the first key of a row, the one behind its last, and perhaps more.
        seed: one number, or BITS elements of which those that are not 0 are its bits of 1.
        bias: where BIASED, for each head a number for each distance from -reach to reach, by its strides.
        kept_inverse: what weights that are kept are multiplied with.
        FEATURES: of a head, and WIDTH, the power of 2 that holds them.
        ROWS: of a tile; COLUMNS: keys of a tile, 64 or 128.
        EVEN: tiles divide rows and keys.
        GROUP: heads of queries that share a key.
        KEPT: so many 65536ths of the weights are kept.
        PRECISION: of products of float32.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    feature = tl.arange(0, WIDTH)
    query += head.to(tl.int64) * query_head
    key += (head // GROUP).to(tl.int64) * key_head
    value += (head // GROUP).to(tl.int64) * value_head
    out += head.to(tl.int64) * out_head
    bias += head.to(tl.int64) * bias_head
    begin = tl.load(bounds + STEP * row, mask=ok, other=rows).to(tl.int32)
    end = tl.load(bounds + STEP * row + 1, mask=ok, other=0).to(tl.int32)
    words_per_row = tl.cdiv(rows, 32)
    if DROPS:
        state = loaded_seed(seed, BITS)
    queries = loaded(query + row[:, None] * query_row + feature[None, :], ok, feature, FEATURES, WIDTH, EVEN)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(tl.min(begin) // COLUMNS * COLUMNS, tl.max(end), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < rows
        keys = loaded(key + column[:, None] * key_row + feature[None, :], inside, feature, FEATURES, WIDTH, EVEN)
        values = loaded(value + column[:, None] * value_row + feature[None, :], inside, feature, FEATURES, WIDTH, EVEN)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, _ = scores_in_base_2(products, factor, cap, CAPS)
        if BIASED:
            scores += relative_bias(bias, column[None, :] - row[:, None], reach, bias_place)
        seen = (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(grown == float("-inf"), 0.0, grown)  # no key of these rows came so far
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        largest = grown
        if DROPS:
            words = words_of_tile(state, head, row, first, words_per_row, KEPT, ROWS, COLUMNS, False)
            weights = tl.where(kept_along_rows(words, COLUMNS), weights, 0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    total = tl.where(total == 0.0, 1.0, total)
    sums = sums * (kept_inverse / total)[:, None]
    at = out + row[:, None] * out_row + feature[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=ok[:, None] & (feature < FEATURES)[None, :])
    tl.store(log_sum_exp + head.to(tl.int64) * rows + row, largest + tl.log2(total), mask=ok)


@triton.jit
def query_gradient(
    query, key, value, out, gradient, into_query, log_sum_exp, means, bounds, seed, bias,
    query_head, query_row, key_head, key_row, value_head, value_row, out_head, out_row, gradient_head, gradient_row,
    into_head, into_row, rows, factor, cap, kept, reach, bias_head, bias_place,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, CAPS: tl.constexpr, BIASED: tl.constexpr, DROPS: tl.constexpr, KEPT: tl.constexpr,
    STEP: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the query, for a tile of rows.

    Args:
        gradient: of the output.
        means: for each head and row, `kept` times the sum of gradient times output, written here.
        kept: the share of the weights that is kept.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    feature = tl.arange(0, WIDTH)
    query += head.to(tl.int64) * query_head
    key += (head // GROUP).to(tl.int64) * key_head
    value += (head // GROUP).to(tl.int64) * value_head
    out += head.to(tl.int64) * out_head
    gradient += head.to(tl.int64) * gradient_head
    into_query += head.to(tl.int64) * into_head
    bias += head.to(tl.int64) * bias_head
    begin = tl.load(bounds + STEP * row, mask=ok, other=rows).to(tl.int32)
    end = tl.load(bounds + STEP * row + 1, mask=ok, other=0).to(tl.int32)
    words_per_row = tl.cdiv(rows, 32)
    if DROPS:
        state = loaded_seed(seed, BITS)
    queries = loaded(query + row[:, None] * query_row + feature[None, :], ok, feature, FEATURES, WIDTH, EVEN)
    outs = loaded(out + row[:, None] * out_row + feature[None, :], ok, feature, FEATURES, WIDTH, EVEN)
    gradients = loaded(gradient + row[:, None] * gradient_row + feature[None, :], ok, feature, FEATURES, WIDTH, EVEN)
    mean = tl.sum(outs.to(tl.float32) * gradients.to(tl.float32), 1) * kept
    tl.store(means + head.to(tl.int64) * rows + row, mean, mask=ok)
    exponents = tl.load(log_sum_exp + head.to(tl.int64) * rows + row, mask=ok, other=0.0)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(tl.min(begin) // COLUMNS * COLUMNS, tl.max(end), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < rows
        keys = loaded(key + column[:, None] * key_row + feature[None, :], inside, feature, FEATURES, WIDTH, EVEN)
        values = loaded(value + column[:, None] * value_row + feature[None, :], inside, feature, FEATURES, WIDTH, EVEN)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, share = scores_in_base_2(products, factor, cap, CAPS)
        if BIASED:
            scores += relative_bias(bias, column[None, :] - row[:, None], reach, bias_place)
        above = tl.dot(gradients, tl.trans(values), input_precision=PRECISION)
        seen = (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
        weights = tl.where(seen, tl.exp2(scores - exponents[:, None]), 0.0)
        if DROPS:
            words = words_of_tile(state, head, row, first, words_per_row, KEPT, ROWS, COLUMNS, False)
            above = tl.where(kept_along_rows(words, COLUMNS), above, 0.0)
        below = weights * (above - mean[:, None])
        if CAPS:
            below = below * (1.0 - share * share)
        sums = tl.dot(below.to(keys.dtype), keys, sums, input_precision=PRECISION)
    at = into_query + row[:, None] * into_row + feature[None, :]
    sums = sums * (factor / kept)
    tl.store(at, sums.to(into_query.dtype.element_ty), mask=ok[:, None] & (feature < FEATURES)[None, :])


@triton.jit
def key_value_gradient(
    query, key, value, gradient, into_key, into_value, log_sum_exp, means, bounds, seers, seed, bias,
    query_head, query_row, key_head, key_row, value_head, value_row, gradient_head, gradient_row,
    into_key_head, into_key_row, into_value_head, into_value_row, rows, factor, cap, kept, reach, bias_head, bias_place,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, CAPS: tl.constexpr, BIASED: tl.constexpr, DROPS: tl.constexpr, KEPT: tl.constexpr,
    STEP: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of key and value, for a tile of keys; scores are computed with their axes swapped.

    Args:
        seers: (keys, STEP), the first row that sees a key, the one behind the last, and perhaps more.
        GROUP: so many heads of queries share a key; the gradients are sums over them.
    """
    shared = tl.program_id(1)
    tile = tl.program_id(0) * COLUMNS
    column = tile + tl.arange(0, COLUMNS)
    inside = column < rows
    feature = tl.arange(0, WIDTH)
    key += shared.to(tl.int64) * key_head
    value += shared.to(tl.int64) * value_head
    into_key += shared.to(tl.int64) * into_key_head
    into_value += shared.to(tl.int64) * into_value_head
    words_per_row = tl.cdiv(rows, 32)
    if DROPS:
        state = loaded_seed(seed, BITS)
    keys = loaded(key + column[:, None] * key_row + feature[None, :], inside, feature, FEATURES, WIDTH, EVEN)
    values = loaded(value + column[:, None] * value_row + feature[None, :], inside, feature, FEATURES, WIDTH, EVEN)
    key_sums = tl.zeros((COLUMNS, WIDTH), tl.float32)
    value_sums = tl.zeros((COLUMNS, WIDTH), tl.float32)
    seer = tl.load(seers + STEP * column, mask=inside, other=rows).to(tl.int32)
    last_seer = tl.load(seers + STEP * column + 1, mask=inside, other=0).to(tl.int32)
    begin = tl.min(seer) // ROWS * ROWS
    steps = tl.cdiv(tl.max(last_seer) - begin, ROWS)
    for step in range(steps * GROUP):
        member = step // steps if GROUP > 1 else 0
        head = shared * GROUP + member
        row = begin + (step - member * steps) * ROWS + tl.arange(0, ROWS)
        ok = row < rows
        query_at = query + head.to(tl.int64) * query_head + row[:, None] * query_row + feature[None, :]
        gradient_at = gradient + head.to(tl.int64) * gradient_head + row[:, None] * gradient_row + feature[None, :]
        queries = loaded(query_at, ok, feature, FEATURES, WIDTH, EVEN)
        gradients = loaded(gradient_at, ok, feature, FEATURES, WIDTH, EVEN)
        of_row = head.to(tl.int64) * rows + row
        exponents = tl.load(log_sum_exp + of_row, mask=ok, other=0.0)
        mean = tl.load(means + of_row, mask=ok, other=0.0)
        first_key = tl.load(bounds + STEP * row, mask=ok, other=rows).to(tl.int32)
        last_key = tl.load(bounds + STEP * row + 1, mask=ok, other=0).to(tl.int32)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        scores, share = scores_in_base_2(products, factor, cap, CAPS)
        if BIASED:
            own = bias + head.to(tl.int64) * bias_head
            scores += relative_bias(own, column[:, None] - row[None, :], reach, bias_place)
        seen = (column[:, None] >= first_key[None, :]) & (column[:, None] < last_key[None, :])
        weights = tl.where(seen, tl.exp2(scores - exponents[None, :]), 0.0)
        if DROPS:
            words = words_of_tile(state, head, row, tile, words_per_row, KEPT, ROWS, COLUMNS, True)
            dropped = tl.where(kept_along_columns(words, COLUMNS), weights, 0.0)
        else:
            dropped = weights
        value_sums = tl.dot(dropped.to(gradients.dtype), gradients, value_sums, input_precision=PRECISION)
        above = tl.dot(values, tl.trans(gradients), input_precision=PRECISION)
        below = dropped * above - weights * mean[None, :]
        if CAPS:
            below = below * (1.0 - share * share)
        key_sums = tl.dot(below.to(queries.dtype), queries, key_sums, input_precision=PRECISION)
    stored = inside[:, None] & (feature < FEATURES)[None, :]
    key_sums, value_sums = key_sums * (factor / kept), value_sums / kept
    key_at = into_key + column[:, None] * into_key_row + feature[None, :]
    value_at = into_value + column[:, None] * into_value_row + feature[None, :]
    tl.store(key_at, key_sums.to(into_key.dtype.element_ty), mask=stored)
    tl.store(value_at, value_sums.to(into_value.dtype.element_ty), mask=stored)
