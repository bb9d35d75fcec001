"""Grouped products as Triton programs: rows that lie in groups times a matrix of each group, and the products of each
group's columns with its rows. Groups end where the device says, so no program waits for the host.

Operands are read by descriptors: on Hopper, by the tensor memory accelerator.
"""

import triton
import triton.language as tl

NEIGHBOURS = tl.constexpr(8)
"""Tiles of rows that run side by side, so that they share what they read of a matrix."""


@triton.jit
def _tile(place, tiles, columns):
    """Return the tile of rows and the tile of columns of a place in the grid."""
    side = NEIGHBOURS * columns
    first = place // side * NEIGHBOURS
    height = tl.minimum(tiles - first, NEIGHBOURS)
    return first + place % side % height, place % side // height


@triton.jit
def rows_by_matrices(
    one, other, out, ends, out_row, out_column, groups, tiles, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUPS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """one (S, K), other (E, K, N)  ->  out (S, N), where rows up to ends[e] are multiplied with matrix e.

    Args:
        one: a descriptor of (S, K).
        other: a descriptor of (E * K, N), or of (E * N, K) where matrices are TURNED.
        tiles: of rows at most: each group may end inside of one.
        inner: K, a multiple of INNER.
        GROUPS: a power of two, at least `groups`.
    """
    tile, column_tile = _tile(tl.program_id(0), tiles, tl.cdiv(columns, COLUMNS))
    each = tl.arange(0, GROUPS)
    end = tl.load(ends + each, mask=each < groups, other=0).to(tl.int32)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < groups), other=0).to(tl.int32)
    counts = tl.where(each < groups, tl.cdiv(end - begin, ROWS), 0)
    until = tl.cumsum(counts, 0)
    group = tl.sum((until <= tile).to(tl.int32))
    if group < groups:
        here = each == group
        first = tl.sum(tl.where(here, begin + (tile - until + counts) * ROWS, 0))
        last = tl.sum(tl.where(here, end, 0))
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for place in range(0, inner, INNER):
            left = one.load([first, place])
            if TURNED:
                right = other.load([group * columns + column_tile * COLUMNS, place]).T
            else:
                right = other.load([group * inner + place, column_tile * COLUMNS])
            sums = tl.dot(left, right, sums)
        row = first + tl.arange(0, ROWS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        at = out + row.to(tl.int64)[:, None] * out_row + column.to(tl.int64)[None, :] * out_column
        tl.store(at, sums.to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < columns)[None, :])


@triton.jit
def columns_by_rows(
    one, other, out, ends, one_at, other_at, one_inner, other_inner, out_group, out_row, out_column, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """one (K, S), other (S, N)  ->  out (E, K, N): matrix e is the product of the columns and rows up to ends[e].

    Args:
        one, other: descriptors of (S, K) and (S, N); the last elements of a group are read at `one_at` and `other_at`,
            whose rows are `one_inner` and `other_inner` elements apart.
        rows, columns: K and N.
    """
    group = tl.program_id(1)
    tile, column_tile = _tile(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS))
    end = tl.load(ends + group).to(tl.int32)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int32)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    whole = begin + (end - begin) // INNER * INNER
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for place in range(begin, whole, INNER):
        sums = tl.dot(one.load([place, tile * ROWS]).T, other.load([place, column_tile * COLUMNS]), sums)
    if whole < end:
        inside = whole + tl.arange(0, INNER)
        ok, inside = inside < end, inside.to(tl.int64)
        left_at = one_at + inside[None, :] * one_inner + row[:, None]
        right_at = other_at + inside[:, None] * other_inner + column[None, :]
        left = tl.load(left_at, mask=ok[None, :] & (row < rows)[:, None], other=0.0)
        right = tl.load(right_at, mask=ok[:, None] & (column < columns)[None, :], other=0.0)
        sums = tl.dot(left, right, sums)
    at = out + group.to(tl.int64) * out_group
    at += row.to(tl.int64)[:, None] * out_row + column.to(tl.int64)[None, :] * out_column
    tl.store(at, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])
