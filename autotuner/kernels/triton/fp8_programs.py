"""Triton programs that round rows of matrices to 8-bit floats, each scaled by its largest element."""

import triton
import triton.language as tl


@triton.jit
def _scale(largest, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """Return what 1 stands for in a row of a largest element."""
    return tl.where(largest < SMALLEST, 1.0, largest / LARGEST)


@triton.jit
def along_rows(
    source, numbers, scales, step, columns, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    """Round a row whose elements lie one behind the other; a row longer than a block is read twice.

    The largest element is one of bits without their sign, which order as numbers do, and NaN behind all.
    """
    row = tl.program_id(0).to(tl.int64)
    source += row * step
    numbers += row * columns
    places = tl.arange(0, BLOCK)
    bits = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, columns, BLOCK):
        within = first + places < columns
        values = tl.load(source + first + places, mask=within, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = _scale(tl.max(bits, 0).to(tl.float32, bitcast=True), LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    for first in range(0, columns, BLOCK):
        within = first + places < columns
        values = tl.load(source + first + places, mask=within, other=0.0).to(tl.float32)
        tl.store(numbers + first + places, (values / scale).to(numbers.dtype.element_ty), mask=within)


@triton.jit
def largest_across(source, largest, step, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Raise the largest elements of rows, as bits, by a tile; columns lie one behind the other, `step` apart."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    within = (column < columns)[:, None] & (row < rows)[None, :]
    values = tl.load(source + column[:, None] * step + row[None, :], mask=within, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest + row, tl.max(bits, 0), mask=row < rows)


@triton.jit
def across_rows(
    source, largest, numbers, scales, step, rows, columns, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Round a tile of rows whose elements lie `step` apart, and write it so that they lie one behind the other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    found = tl.load(largest + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
    scale = _scale(found, LARGEST, SMALLEST)
    if tl.program_id(1) == 0:
        tl.store(scales + row, scale, mask=row < rows)
    within = (column < columns)[:, None] & (row < rows)[None, :]
    values = tl.load(source + column[:, None] * step + row[None, :], mask=within, other=0.0).to(tl.float32)
    made = tl.trans((values / scale[None, :]).to(numbers.dtype.element_ty))
    places = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(numbers + places, made, mask=(row < rows)[:, None] & (column < columns)[None, :])
