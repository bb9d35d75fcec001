"""Stacked siblings: one call over the shared buffer that their slices lie in."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.geometry import as_matrices, operand_letters
from autotuner.kernels.rules.stacked import (
    STACK_LETTER,
    members,
    stacked_extents,
    stacked_node,
    stacked_operands,
)
from autotuner.kernels.torch.elementwise import spread

Run = Callable[[], Any]


def whole(slices: Sequence[Tensor]) -> Tensor:
    """View equally shaped slices of one buffer as one tensor with the stacking axis first.

    Raises:
        ValueError: they do not lie at equal distances in one buffer.
    """
    first = slices[0]
    if len(slices) == 1:
        return first
    width = first.element_size()
    offsets = [(tensor.data_ptr() - first.data_ptr()) // width for tensor in slices]
    step = offsets[1]
    if (
        step <= 0
        or offsets != [step * index for index in range(len(slices))]
        or any(t.stride() != first.stride() for t in slices)
    ):
        raise ValueError(f"stacked operands lie at offsets {offsets} with strides {[t.stride() for t in slices]}")
    return first.as_strided((len(slices), *first.shape), (step, *first.stride()))


def _gathered(call: Call, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    by_number = dict(zip(call.subgraph.boundary, (*inputs, *outputs), strict=True))
    return [whole([by_number[number] for number in group]) for group in stacked_operands(call.subgraph, kind)]


def matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One matrix product over all members; stacked biases are added in the same call, a sum runs along the stack."""
    a, b, c = product_matrices(call, inputs, outputs)
    term = added_term(call, inputs, c)
    if c.dtype != a.dtype:
        return lambda: torch.ops.aten.mm.dtype_out(a, b, c.dtype, out=c)
    if term is None:
        return lambda: torch.mm(a, b, out=c)
    return lambda: torch.addmm(term, a, b, out=c)


def matmul_row_bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """As `matmul`, with stacked biases as the product's epilogue where they run along its contiguous axis."""
    a, b, c = product_matrices(call, inputs, outputs)
    term = added_term(call, inputs, c)
    assert term is not None
    if term.stride(0) == 0 and c.stride(1) == 1:
        return lambda: torch.addmm(term[0], a, b, out=c)
    if term.stride(1) == 0 and c.stride(0) == 1:
        return lambda: torch.addmm(term[:, 0], b.t(), a.t(), out=c.t())
    return lambda: torch.addmm(term, a, b, out=c)


def product_matrices(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors and the product over the stack as matrices, m x k, k x n and m x n."""
    node, extents = stacked_node(call.subgraph), stacked_extents(call.subgraph)
    tensors = _gathered(call, "contraction", inputs, outputs)
    strides = [
        dict(zip(letters, tensor.stride(), strict=True))
        for letters, tensor in zip(operand_letters(node), tensors, strict=True)
    ]
    matrices = as_matrices(node, strides, extents)
    assert not isinstance(matrices, str), matrices
    return (
        tensors[0].as_strided((matrices.m, matrices.k), matrices.a[1:]),
        tensors[1].as_strided((matrices.k, matrices.n), matrices.b[1:]),
        tensors[2].as_strided((matrices.m, matrices.n), matrices.c[1:]),
    )


def added_term(call: Call, inputs: Sequence[Tensor], c: Tensor) -> Tensor | None:
    """Return what is added to the product, seen as a matrix like it: stacked biases, an addend, or nothing."""
    biases = members(call.subgraph, "bias")
    products = {number for node in members(call.subgraph, "contraction") for number in node.inputs}
    addends = [t for number, t in zip(call.subgraph.inputs, inputs, strict=True) if number not in products]
    if not addends:
        return None
    if not biases:
        return addends[0].as_strided(c.shape, c.stride())
    vector = whole([inputs[call.subgraph.inputs.index(bias.inputs[1])] for bias in biases]).reshape(-1)
    return vector.expand(c.shape) if c.shape[1] == vector.numel() else vector[:, None].expand(c.shape)


def bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    x, vectors, y = _gathered(call, "bias", inputs, outputs)
    letters, bound = operand_letters(members(call.subgraph, "bias")[0])[:2]
    term = spread(vectors, STACK_LETTER + bound, STACK_LETTER + letters, x.shape)
    return lambda: torch.add(x, term, out=y)


def bias_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """The sum over rows for the whole stack as a matrix times a vector of ones."""
    grad, out = _gathered(call, "bias_grad", inputs, outputs)
    source, kept = operand_letters(members(call.subgraph, "bias_grad")[0])
    rows = 1
    for letter, extent in zip(source, grad.shape[1:], strict=True):
        rows *= 1 if letter in kept else extent
    matrix = grad.as_strided((out.numel(), rows), (1, out.numel()))
    ones, flat = torch.ones(rows, dtype=grad.dtype, device=grad.device), out.view(-1)
    return lambda: torch.mv(matrix, ones, out=flat)
