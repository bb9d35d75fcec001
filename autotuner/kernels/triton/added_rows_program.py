"""Sums of rows by where they belong, as a Triton program for each sum, or part of one, and some of its columns."""

import triton
import triton.language as tl


@triton.jit
def add_rows(
    values, order, starts, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Sum rows of `values` in float32, in order, so that the result does not depend on which program runs first.

    Args:
        values: (count, columns), contiguous.
        order: places of rows, those of one sum behind each other.
        starts: (rows + 1), where each sum begins among these.
        out: (parts, rows, columns).
        rows: sums.
        ROWS: that are read at once.
        PARTS: of a sum.
    """
    row, part = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    extent = tl.cdiv(end - begin, PARTS)
    begin += part * extent
    end = tl.minimum(end, begin + extent)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        place = first + tl.arange(0, ROWS)
        ok = place < end
        at = tl.load(order + place, mask=ok, other=0).to(tl.int64)
        read = values + at[:, None] * columns + column[None, :]
        sums += tl.load(read, mask=ok[:, None] & inside[None, :], other=0.0).to(tl.float32)
    into = out + (part * rows + row).to(tl.int64) * columns + column
    tl.store(into, tl.sum(sums, 0).to(out.dtype.element_ty), mask=inside)
