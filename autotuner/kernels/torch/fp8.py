"""Matrix products of operands in 8-bit floats, whose rows are scaled by their largest elements.

The format is e4m3: 4 bits of exponent, 3 of mantissa, up to 448. A row runs along the contracted axis, so that scales
are factors of the product's rows and columns. Operands are rounded in each run, in memory that is given back behind it.

Source:
    P. Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. torch's `_scaled_mm`, scaled by rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call, Subgraph
from autotuner.kernels.geometry import letter_groups, operand_letters
from autotuner.kernels.registry import load
from autotuner.kernels.rules.stacked import STACK_LETTER, stacked_node, stacked_operands
from autotuner.kernels.torch import contraction, stacked
from autotuner.kernels.torch.formats import SMALLEST

Run = Callable[[], Any]

PROGRAMS = "autotuner.kernels.triton.fp8:round_rows"
"""Loaded where it runs: Triton is not on each machine that has a CPU alone."""
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product."""
    return _product(*contraction.product_matrices(call, inputs, outputs))


def matmul_bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product with a bias as its epilogue."""
    return _product(*contraction.with_term(call, inputs, outputs))


def stacked_matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One product over siblings, with their biases as its epilogue where they have some."""
    a, b, c = stacked.product_matrices(call, inputs, outputs)
    return _product(a, b, c, stacked.added_term(call, inputs, c))


def _product(a: Tensor, b: Tensor, c: Tensor, term: Tensor | None = None) -> Run:
    """Return c = a b, with a vector that is added along the contiguous axis of c, seen as a matrix like it."""
    if c.stride(1) != 1:
        a, b, c, term = b.t(), a.t(), c.t(), None if term is None else term.t()
    vector = None if term is None else term[0]
    multiply = torch.ops.aten._scaled_mm.out
    columns = b.t()

    def run() -> None:
        left, left_scales = rounded_rows(a)
        right, right_scales = rounded_rows(columns)
        multiply(left, right.t(), left_scales, right_scales.t(), vector, None, c.dtype, True, out=c)

    return run


def rounded_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a matrix in 8-bit floats, contiguous, and what 1 stands for in each, a column of float32.

    Args:
        matrix: m x k, with a contiguous axis.
    """
    if matrix.device.type == "cpu":
        return scaled(matrix, (1,))
    found: tuple[Tensor, Tensor] = load(PROGRAMS)(matrix)
    return found


def scaled(values: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a tensor in 8-bit floats, and what 1 stands for along dimensions that share a scale, in float32.

    What shares a scale with an infinity or NaN is no number either.
    """
    wide = values.float()
    largest = wide.abs().amax(tuple(dims), keepdim=True)
    scales = torch.where(largest < SMALLEST, 1.0, largest / LARGEST)
    return (wide / scales).to(FP8).contiguous(), scales


def rounded(subgraph: Subgraph, operands: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return operands in float64 as products of 8-bit floats read them: what a result is verified against.

    Args:
        operands: of the subgraph, in float64.
    """
    found = dict(zip(subgraph.inputs, operands, strict=True))
    node = stacked_node(subgraph)
    contracted = letter_groups(node)[3]
    for letters, numbers in zip(operand_letters(node)[:2], stacked_operands(subgraph, "contraction")[:2], strict=True):
        parts = [found[number] for number in numbers]
        whole = torch.stack([part for part in parts if part is not None])
        whole = whole if STACK_LETTER in letters else whole[0]
        values, scales = scaled(whole, [letters.index(letter) for letter in contracted])
        read = values.double() * scales.double()
        found.update(zip(numbers, read if STACK_LETTER in letters else [read], strict=True))
    return [found[number] for number in subgraph.inputs]
