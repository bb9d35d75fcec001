"""Products of operands in 8-bit floats, where a request allows their numerics: one product, or one over siblings."""

from functools import partial

from autotuner.ir.records import Candidate, Node, Subgraph
from autotuner.kernels.geometry import Matrices, as_matrices, forms_by_number, letter_groups, operand_letters
from autotuner.kernels.patterns import Siblings
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.kernels.rules.contraction import contraction_of, product_layouts, seen_as_matrices
from autotuner.kernels.rules.cublaslt import not_single
from autotuner.kernels.rules.stacked import (
    members,
    not_one_stacked_product,
    stacked_extents,
    stacked_node,
    stacked_product_layouts,
    stacked_strides,
)

_IMPLEMENTATION = "autotuner.kernels.torch.fp8"

MULTIPLE = 16
"""A divisor of the contracted extent, and of that of the product's contiguous axis."""
DTYPE = "bfloat16"
"""In which products that are scaled by rows are written, and their operands read."""


def no_fp8_product(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why this candidate is not one product in 8-bit floats, or None if it is."""
    reason = not_single(subgraph, candidate)
    if reason:
        return reason
    matrices = seen_as_matrices(subgraph, candidate)
    assert not isinstance(matrices, str)
    return _unfit(subgraph, contraction_of(subgraph), matrices)


def no_stacked_fp8_product(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why the members are not one product in 8-bit floats, or None if they are."""
    reason = not_one_stacked_product(subgraph, candidate)
    if reason:
        return reason
    strides = stacked_strides(subgraph, "contraction", forms_by_number(subgraph, candidate))
    node = stacked_node(subgraph)
    matrices = as_matrices(node, strides, stacked_extents(subgraph))
    assert not isinstance(matrices, str)
    return _unfit(subgraph, node, matrices)


def _unfit(subgraph: Subgraph, node: Node, matrices: Matrices) -> str | None:
    dtypes = {subgraph.tensors[number].dtype for number in subgraph.boundary}
    if dtypes != {DTYPE}:
        return f"products in 8-bit floats are made of {DTYPE}, not of {', '.join(sorted(dtypes))}"
    read = {number for kind in ("contraction", "bias") for node in members(subgraph, kind) for number in node.inputs}
    if set(subgraph.inputs) - read:
        return "what is added to the products' sum is no bias"
    _, step, along = matrices.c
    rows, columns = (matrices.m, matrices.n) if along == 1 else (matrices.n, matrices.m)
    if columns > 1 and (step if along == 1 else along) != columns and rows > 1:
        return "the product is a part of something wider"
    if matrices.k % MULTIPLE or columns % MULTIPLE:
        return f"{matrices.k} contracted elements and {columns} of a row of the product are no multiples of {MULTIPLE}"
    for bias in members(subgraph, "bias"):
        wide, narrow = operand_letters(bias)[:2]
        made = operand_letters(contraction_of(subgraph))[2]
        if not {made[wide.index(letter)] for letter in narrow} <= set(letter_groups(node)[2 if along == 1 else 1]):
            return "the bias does not run along the contiguous axis of the product"
    return None


_rounding = partial(Kernel, anchors=True, needs="fp8", rounds=f"{_IMPLEMENTATION}:rounded")
_one = partial(_rounding, refuses=no_fp8_product, layouts=product_layouts)
_stacked = partial(
    _rounding, covers=(), refuses=no_stacked_fp8_product, layouts=stacked_product_layouts, merges=False
)  # fmt: skip
KERNELS.add(
    _one("fp8_matmul", ("contraction",), f"{_IMPLEMENTATION}:matmul"),
    _one("fp8_matmul_bias", ("contraction", "bias"), f"{_IMPLEMENTATION}:matmul_bias"),
    _stacked("fp8_stacked_matmul", runs=f"{_IMPLEMENTATION}:stacked_matmul", patterns=(Siblings(("contraction",)),)),
    _stacked("fp8_stacked_matmul_bias", runs=f"{_IMPLEMENTATION}:stacked_matmul",
             patterns=(Siblings(("contraction", "bias")),)),
)  # fmt: skip
