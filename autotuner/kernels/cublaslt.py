"""Single matrix products by cuBLASLt: any algorithm of its list, and a bias or a bias's gradient as the epilogue.

A candidate's parameter `algorithm` is a place in the list that the library's heuristic returns, best guess first.
"""

from collections.abc import Iterator
from dataclasses import replace

from autotuner.kernels.contraction import contraction_of, not_one_product, product_layouts
from autotuner.kernels.geometry import as_matrices, forms_by_number, letter_extents, operand_letters, operand_strides
from autotuner.kernels.registry import KERNELS, Kernel, Refuses
from autotuner.kernels.stacked import members, not_one_stacked_product, stacked_product_layouts
from autotuner.layout import STACK_AXIS
from autotuner.records import Candidate, Subgraph

_IMPLEMENTATION = "autotuner.kernels.on_torch.cublaslt"


def without_bias_grads(subgraph: Subgraph) -> Subgraph:
    """Return the contractions alone, of products whose epilogue sums an operand over the contracted axes."""
    nodes = members(subgraph, "contraction")
    inputs = tuple(dict.fromkeys(number for node in nodes for number in node.inputs))
    return Subgraph(nodes, subgraph.tensors, inputs, tuple(node.outputs[0] for node in nodes))


def product_of(subgraph: Subgraph, candidate: Candidate) -> tuple[Subgraph, Candidate]:
    """Return what a call with bias gradients computes beside them."""
    alone, forms = without_bias_grads(subgraph), dict(zip(subgraph.boundary, candidate.forms, strict=True))
    return alone, replace(candidate, forms=tuple(forms[number] for number in alone.boundary))


def not_single(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why this candidate is not one product without a batch, or None if it is."""
    reason = not_one_product(subgraph, candidate)
    if reason:
        return reason
    node = contraction_of(subgraph)
    forms = forms_by_number(subgraph, candidate)
    forms = {node.outputs[0]: forms[subgraph.outputs[0]]} | forms
    matrices = as_matrices(node, operand_strides(subgraph, node, forms), letter_extents(subgraph, node))
    assert not isinstance(matrices, str)
    return f"it is asked for single products; this is a batch of {matrices.batch}" if matrices.batch > 1 else None


def _beside_bias_grads(rule: Refuses) -> Refuses:
    def refuses(subgraph: Subgraph, candidate: Candidate) -> str | None:
        return rule(*product_of(subgraph, candidate))

    return refuses


def bias_grad_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate those of the product; the gradient of the bias lies as declared."""
    alone = without_bias_grads(subgraph)
    for row in product_layouts(alone):
        forms = dict(zip(alone.boundary, row, strict=True))
        yield tuple(forms.get(number, subgraph.tensors[number].axes) for number in subgraph.boundary)


def stacked_bias_grad_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate those of the product over the stack; gradients of biases lie one behind the other."""
    alone, sums = without_bias_grads(subgraph), members(subgraph, "bias_grad")
    for row in stacked_product_layouts(alone):
        forms = dict(zip(alone.boundary, row, strict=True))
        for index, node in enumerate(sums):
            axes = subgraph.tensors[node.outputs[0]].axes
            forms[node.outputs[0]] = f"{STACK_AXIS}{axes}@{index}/{len(sums)}"
        yield tuple(forms[number] for number in subgraph.boundary)


def summed_operand(subgraph: Subgraph) -> int:
    """Return which operand of the product, 0 or 1, its epilogue sums over the contracted axes."""
    return contraction_of(subgraph).inputs.index(members(subgraph, "bias_grad")[0].inputs[0])


def sums_contracted_axes(subgraph: Subgraph) -> bool:
    """Tell whether a bias gradient sums what the contraction that reads the same gradient contracts."""
    product, bias = contraction_of(subgraph), members(subgraph, "bias_grad")[0]
    source, kept = operand_letters(bias)
    place = product.inputs.index(bias.inputs[0])
    letters, made = operand_letters(product)[place], operand_letters(product)[2]
    return [letter in kept for letter in source] == [letter in made for letter in letters]


for _name, _kinds in (("cublaslt_matmul", ("contraction",)), ("cublaslt_matmul_bias", ("contraction", "bias"))):
    KERNELS.add(
        Kernel(
            _name, _kinds, f"{_IMPLEMENTATION}:{_name.removeprefix('cublaslt_')}", not_single, layouts=product_layouts,
            anchors=True, pitched=True,
        )
    )  # fmt: skip
KERNELS.add(
    Kernel(
        "cublaslt_matmul_bias_grad", (), f"{_IMPLEMENTATION}:matmul_bias_grad", _beside_bias_grads(not_single),
        layouts=bias_grad_layouts, anchors=True,
    )
)  # fmt: skip
for _name in ("cublaslt_stacked_matmul", "cublaslt_stacked_matmul_bias"):
    KERNELS.add(
        Kernel(
            _name, (), f"{_IMPLEMENTATION}:{_name.removeprefix('cublaslt_')}", not_one_stacked_product,
            layouts=stacked_product_layouts, anchors=True, merges=False,
        )
    )  # fmt: skip
KERNELS.add(
    Kernel(
        "cublaslt_stacked_matmul_bias_grad", (), f"{_IMPLEMENTATION}:stacked_matmul_bias_grad",
        _beside_bias_grads(not_one_stacked_product), layouts=stacked_bias_grad_layouts, anchors=True, merges=False,
    )
)  # fmt: skip
