"""Gradient of a relative bias of attention over packed tokens, as a Triton program for some distances.

A tile of scores has pairs of many distances. Rows of its gradient are shifted against each other, so that a column has
pairs of one distance; then columns are summed. Each number is written by one program alone, in one order.
"""

import triton
import triton.language as tl

from autotuner.kernels.triton.attention_forward import scores_in_base_2
from autotuner.kernels.triton.bits import kept_along_rows
from autotuner.kernels.triton.packed_attention_program import loaded, loaded_seed, relative_bias, words_of_tile


@triton.jit
def score_gradients(
    queries, gradients, exponents, mean, begin, end, row, head, first,
    key, value, bias, state, key_row, value_row, rows, factor, cap, reach, bias_place,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPS: tl.constexpr,
    DROPS: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradient of scores with their bias, (rows, columns), 0 where a key is not seen.

    It lacks the factor 1 / kept, which `mean` has in it.

    Args:
        first: key of the tile, a multiple of 32, which may be less than 0.
    """
    feature = tl.arange(0, WIDTH)
    column = first + tl.arange(0, COLUMNS)
    inside = (column >= 0) & (column < rows)
    keys = loaded(key + column[:, None] * key_row + feature[None, :], inside, feature, FEATURES, WIDTH, False)
    values = loaded(value + column[:, None] * value_row + feature[None, :], inside, feature, FEATURES, WIDTH, False)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores, _ = scores_in_base_2(products, factor, cap, CAPS)
    scores += relative_bias(bias, column[None, :] - row[:, None], reach, bias_place)
    above = tl.dot(gradients, tl.trans(values), input_precision=PRECISION)
    seen = (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
    weights = tl.where(seen, tl.exp2(scores - exponents[:, None]), 0.0)
    if DROPS:
        words = words_of_tile(state, head, row, first, tl.cdiv(rows, 32), KEPT, ROWS, COLUMNS, False)
        above = tl.where(kept_along_rows(words, COLUMNS), above, 0.0)
    return weights * (above - mean[:, None])


@triton.jit
def bias_gradient(
    query, key, value, out, gradient, into, log_sum_exp, bounds, seed, bias,
    query_head, query_row, key_head, key_row, value_head, value_row, out_head, out_row, gradient_head, gradient_row,
    rows, factor, cap, kept, reach, bias_head, bias_place,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    CAPS: tl.constexpr, DROPS: tl.constexpr, KEPT: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a relative bias at ROWS distances, over each so many-th tile of ROWS rows.

    The programs of the first distances, and those of the last ones, have the pairs that are further apart as well.

    Args:
        into: (parts, heads, distances), sums of each part of the rows.
        COLUMNS: 2 * ROWS: keys of a tile, which has ROWS whole distances.
    """
    block, part, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_first, is_last = block == 0, block == tl.num_programs(0) - 1
    distance = (block - tl.cdiv(reach, ROWS)) * ROWS
    place = tl.arange(0, ROWS)
    feature = tl.arange(0, WIDTH)
    shifted = place[:, None] + place[None, :]
    query += head.to(tl.int64) * query_head
    key += (head // GROUP).to(tl.int64) * key_head
    value += (head // GROUP).to(tl.int64) * value_head
    out += head.to(tl.int64) * out_head
    gradient += head.to(tl.int64) * gradient_head
    bias += head.to(tl.int64) * bias_head
    state = tl.full((), 0, tl.int64)
    if DROPS:
        state = loaded_seed(seed, BITS)
    sums = tl.zeros((ROWS,), tl.float32)
    before = tl.zeros((ROWS,), tl.float32)
    behind = tl.zeros((ROWS,), tl.float32)
    for tile in range(part, tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + place
        ok = row < rows
        begin = tl.load(bounds + STEP * row, mask=ok, other=rows).to(tl.int32)
        end = tl.load(bounds + STEP * row + 1, mask=ok, other=0).to(tl.int32)
        low, high = tl.min(begin), tl.max(end)
        near = tile * ROWS + distance
        if (is_first | (near + COLUMNS > low)) & (is_last | (near < high)):
            queries = loaded(query + row[:, None] * query_row + feature[None, :], ok, feature, FEATURES, WIDTH, False)
            outs = loaded(out + row[:, None] * out_row + feature[None, :], ok, feature, FEATURES, WIDTH, False)
            gradient_at = gradient + row[:, None] * gradient_row + feature[None, :]
            gradients = loaded(gradient_at, ok, feature, FEATURES, WIDTH, False)
            mean = tl.sum(outs.to(tl.float32) * gradients.to(tl.float32), 1) * kept
            exponents = tl.load(log_sum_exp + head.to(tl.int64) * rows + row, mask=ok, other=0.0)
            found = score_gradients(
                queries, gradients, exponents, mean, begin, end, row, head, near,
                key, value, bias, state, key_row, value_row, rows, factor, cap, reach, bias_place,
                FEATURES, WIDTH, ROWS, COLUMNS, CAPS, DROPS, KEPT, PRECISION,
            )  # fmt: skip
            sums += tl.sum(tl.gather(found, shifted, 1), 0)
            if is_first:
                for first in range(low // 32 * 32, tl.minimum(high, near + ROWS), COLUMNS):
                    found = score_gradients(
                        queries, gradients, exponents, mean, begin, end, row, head, first,
                        key, value, bias, state, key_row, value_row, rows, factor, cap, reach, bias_place,
                        FEATURES, WIDTH, ROWS, COLUMNS, CAPS, DROPS, KEPT, PRECISION,
                    )  # fmt: skip
                    far = first + tl.arange(0, COLUMNS)[None, :] - row[:, None] < distance
                    before += tl.sum(tl.where(far, found, 0.0), 1)
            if is_last:
                for first in range(tl.maximum(low, near + ROWS) // 32 * 32, high, COLUMNS):
                    found = score_gradients(
                        queries, gradients, exponents, mean, begin, end, row, head, first,
                        key, value, bias, state, key_row, value_row, rows, factor, cap, reach, bias_place,
                        FEATURES, WIDTH, ROWS, COLUMNS, CAPS, DROPS, KEPT, PRECISION,
                    )  # fmt: skip
                    far = first + tl.arange(0, COLUMNS)[None, :] - row[:, None] >= distance + ROWS
                    behind += tl.sum(tl.where(far, found, 0.0), 1)
    own = distance + place
    before_all = tl.sum(before) + tl.sum(tl.where(own < -reach, sums, 0.0))
    behind_all = tl.sum(behind) + tl.sum(tl.where(own > reach, sums, 0.0))
    sums += tl.where(own == -reach, before_all, 0.0) + tl.where(own == reach, behind_all, 0.0)
    of_head = (part * tl.num_programs(2) + head).to(tl.int64) * (2 * reach + 1)
    tl.store(into + of_head + own + reach, sums / kept, mask=(own >= -reach) & (own <= reach))
