"""Matrix products through torch's out-variants; operands are views, nothing is copied."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from autotuner.ir.records import Call, Node
from autotuner.kernels.geometry import as_matrices, letter_extents, operand_letters, operand_numbers
from autotuner.kernels.rules.contraction import contraction_of, loop_letter

Run = Callable[[], None]


def matmul(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One matrix product, batched where the spec has batch axes."""
    a, b, c = product_matrices(call, inputs, outputs)
    return _product(a, b, c)


def matmul_loop(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """One batched product for each index of the first batch axis, where two batch axes do not act as one."""
    return _loop(_slices(call, inputs, outputs, inner=False))


def matmul_loop_inner(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """As `matmul_loop`, for each index of the second batch axis."""
    return _loop(_slices(call, inputs, outputs, inner=True))


def matmul_plus(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A matrix product added to a bias or to a tensor like the product itself, in one call."""
    a, b, c, term = with_term(call, inputs, outputs)
    if c.dim() == 2:
        return lambda: _discard(torch.addmm(term, a, b, out=c))
    return lambda: _discard(torch.baddbmm(term, a, b, out=c))


def matmul_row_bias(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A matrix product with a bias as its epilogue, where the bias runs along the product's contiguous axis.

    torch asks cuBLASLt for the epilogue if the bias is a vector and the product dense; else it first fills the product
    with the bias: 84 us instead of 52 for 4096 x 1024 x 4096 (torch 2.11, bfloat16, H200).
    """
    a, b, c, term = with_term(call, inputs, outputs)
    if c.dim() == 2 and term.stride(0) == 0 and c.stride(1) == 1:
        return lambda: _discard(torch.addmm(term[0], a, b, out=c))
    if c.dim() == 2 and term.stride(1) == 0 and c.stride(0) == 1:
        return lambda: _discard(torch.addmm(term[:, 0], b.t(), a.t(), out=c.t()))
    return matmul_plus(call, inputs, outputs)


def with_term(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the matrices and what is added to their product, seen as a matrix like it."""
    a, b, c = product_matrices(call, inputs, outputs)
    follower = next(node for node in call.subgraph.nodes if node.kind in ("bias", "add"))
    product = contraction_of(call.subgraph).outputs[0]
    number = next(n for n in follower.inputs if n != product)
    added = inputs[call.subgraph.inputs.index(number)]
    if follower.kind == "add":
        term = added.as_strided(c.shape, c.stride())
    else:
        letters, bound = operand_letters(follower)[:2]
        step = dict(zip(bound, added.stride(), strict=True))
        whole = added.as_strided(outputs[0].shape, [step.get(x, 0) for x in letters])
        term = like_product(call, whole, c, outputs[0])
    return a, b, c, term


def matmul_scale(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """A matrix product times a constant, in one call."""
    a, b, c = product_matrices(call, inputs, outputs)
    factor = _factor(call)
    if c.dim() == 2:
        return lambda: _discard(torch.addmm(c, a, b, beta=0, alpha=factor, out=c))
    return lambda: _discard(torch.baddbmm(c, a, b, beta=0, alpha=factor, out=c))


def matmul_loop_scale(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """As `matmul_loop`, each product times a constant."""
    return _loop_scale(_slices(call, inputs, outputs, inner=False), _factor(call))


def matmul_loop_inner_scale(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """As `matmul_loop_inner`, each product times a constant."""
    return _loop_scale(_slices(call, inputs, outputs, inner=True), _factor(call))


def _loop(slices: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Run:
    def run() -> None:
        for a, b, c in slices:
            torch.bmm(a, b, out=c)

    return run


def _loop_scale(slices: Sequence[tuple[Tensor, Tensor, Tensor]], factor: float) -> Run:
    def run() -> None:
        for a, b, c in slices:
            torch.baddbmm(c, a, b, beta=0, alpha=factor, out=c)

    return run


def _discard(value: object) -> None:
    """Drop what an out-variant returns."""


def _product(a: Tensor, b: Tensor, c: Tensor) -> Run:
    if c.dtype != a.dtype:
        wide = torch.ops.aten.mm.dtype_out if c.dim() == 2 else torch.ops.aten.bmm.dtype_out
        return lambda: _discard(wide(a, b, c.dtype, out=c))
    if c.dim() == 2:
        return lambda: _discard(torch.mm(a, b, out=c))
    return lambda: _discard(torch.bmm(a, b, out=c))


def _factor(call: Call) -> float:
    scale = next(node for node in call.subgraph.nodes if node.kind == "scale")
    return float(dict(scale.attributes)["factor"])


def _operands(call: Call, node: Node, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the contraction's operands; its product is the boundary output, whatever follows it."""
    by_number = dict(zip(call.subgraph.boundary, (*inputs, *outputs), strict=True))
    return [by_number.get(number, outputs[0]) for number in operand_numbers(node)]


def _views(call: Call, node: Node, tensors: Sequence[Tensor], looped: str = "") -> tuple[Tensor, Tensor, Tensor]:
    strides = [
        dict(zip(letters, tensor.stride(), strict=True))
        for letters, tensor in zip(operand_letters(node), tensors, strict=True)
    ]
    extents = letter_extents(call.subgraph, node) | dict.fromkeys(looped, 1)
    matrices = as_matrices(node, strides, extents)
    assert not isinstance(matrices, str), matrices
    shapes = ((matrices.m, matrices.k), (matrices.k, matrices.n), (matrices.m, matrices.n))
    flat = matrices.batch == 1 and not looped
    views = [
        tensor.as_strided(shape if flat else (matrices.batch, *shape), step[1:] if flat else step)
        for tensor, shape, step in zip(tensors, shapes, (matrices.a, matrices.b, matrices.c), strict=True)
    ]
    return views[0], views[1], views[2]


def product_matrices(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors and the product as matrices: m x k, k x n, m x n, batched where the spec has batch axes."""
    node = contraction_of(call.subgraph)
    return _views(call, node, _operands(call, node, inputs, outputs))


def _slices(
    call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, inner: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the matrices of each index of the looped axis: the first or, with `inner`, the second batch axis."""
    node = contraction_of(call.subgraph)
    looped = loop_letter(node, inner)
    tensors = _operands(call, node, inputs, outputs)
    bound = operand_letters(node)
    views = _views(call, node, tensors, looped)
    steps = [t.stride()[own.index(looped)] for t, own in zip(tensors, bound, strict=True)]
    found = []
    for index in range(letter_extents(call.subgraph, node)[looped]):
        a, b, c = (
            v.as_strided(v.shape, v.stride(), v.storage_offset() + index * step)
            for v, step in zip(views, steps, strict=True)
        )
        found.append((a, b, c))
    return found


def like_product(call: Call, whole: Tensor, c: Tensor, output: Tensor) -> Tensor:
    """View a broadcast bias, shaped like the output, as the product's matrix: merge the same axes."""
    node = contraction_of(call.subgraph)
    letters = operand_letters(node)[2]
    extents = letter_extents(call.subgraph, node)
    by_stride = sorted(range(len(letters)), key=lambda i: -output.stride()[i])
    rows = set(operand_letters(node)[0])
    columns = set(operand_letters(node)[1])

    def step(group: list[int]) -> int:
        wide = [i for i in group if extents[letters[i]] > 1]
        for slow, fast in pairwise(wide):
            if whole.stride()[slow] != whole.stride()[fast] * extents[letters[fast]]:
                raise ValueError("the bias does not act as one axis along the product's rows or columns")
        return whole.stride()[wide[-1]] if wide else 0

    m = [i for i in by_stride if letters[i] in rows - columns]
    n = [i for i in by_stride if letters[i] in columns - rows]
    g = [i for i in by_stride if letters[i] in rows & columns]
    steps = [step(m), step(n)] if c.dim() == 2 else [step(g), step(m), step(n)]
    return whole.as_strided(c.shape, steps)
