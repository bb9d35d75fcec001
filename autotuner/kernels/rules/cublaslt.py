"""Single matrix products by cuBLASLt: any algorithm of its list, and as the epilogue a bias, GELU, or their gradients.

cuBLASLt's GELU is the one by tanh. What it reads is saved for its gradient, which an epilogue of another product takes.
A candidate's parameter `algorithm` is a place in the list that the library's heuristic returns, best guess first.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autotuner.ir.form import STACK_AXIS
from autotuner.ir.records import Candidate, Node, Subgraph
from autotuner.kernels.geometry import (
    HALVES,
    as_matrices,
    forms_by_number,
    letter_extents,
    letter_groups,
    merge,
    operand_letters,
    operand_numbers,
    operand_strides,
)
from autotuner.kernels.patterns import Pair, Siblings
from autotuner.kernels.registry import KERNELS, Kernel, Refuses
from autotuner.kernels.rules.contraction import (
    OR_CAST,
    contraction_of,
    not_one_product,
    product_layouts,
    seen_as_matrices,
)
from autotuner.kernels.rules.stacked import STACK_OR_CAST, members, not_one_stacked_product, stacked_product_layouts

_IMPLEMENTATION = "autotuner.kernels.cublaslt.matmul"

GELUS = ("gelu_erf", "gelu_tanh", "gelu_erf_grad", "gelu_tanh_grad")
GELU_DTYPES = {"gelu_tanh": ("bfloat16", "float16", "float32"), "gelu_tanh_grad": HALVES}
"""Of its gradient in float32 about one element in a thousand is off by more than rounding: 25 of 24,576 (cuBLAS of CUDA
13, H200)."""
SAVED_MULTIPLE = 8
"""A divisor of the extent of the contiguous axis of GELU's saved input: CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD."""


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
    matrices = seen_as_matrices(subgraph, candidate)
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
    """Tell whether a bias gradient sums what the contraction that reads the same gradient, once, contracts."""
    product, bias = contraction_of(subgraph), members(subgraph, "bias_grad")[0]
    if product.inputs[0] == product.inputs[1]:
        return False
    source, kept = operand_letters(bias)
    place = product.inputs.index(bias.inputs[0])
    letters, made = operand_letters(product)[place], operand_letters(product)[2]
    return [letter in kept for letter in source] == [letter in made for letter in letters]


def gelu_of(subgraph: Subgraph) -> Node:
    """Return GELU, or its gradient."""
    return next(node for node in subgraph.nodes if node.kind in GELUS)


def saved_input(subgraph: Subgraph) -> int | None:
    """Return the tensor that GELU reads, which its gradient reads again, or None where it stays inside."""
    number = gelu_of(subgraph).inputs[-1]
    return number if number in subgraph.boundary else None


def bias_beside_gelu(subgraph: Subgraph) -> tuple[int, str] | None:
    """Return the bias before GELU, or its gradient behind GELU's, and its axes in letters of the contraction's
    product; None where there is neither."""
    node = next((node for node in subgraph.nodes if node.kind in ("bias", "bias_grad")), None)
    if node is None:
        return None
    wide, narrow = operand_letters(node)[:2]
    letters = operand_letters(contraction_of(subgraph))[2]
    return operand_numbers(node)[1], "".join(letters[wide.index(x)] for x in narrow)


def product_under_gelu(subgraph: Subgraph, candidate: Candidate) -> tuple[Subgraph, Candidate]:
    """Return the contraction alone, its product in the form of what GELU, or its gradient, makes of it."""
    node, forms = contraction_of(subgraph), dict(zip(subgraph.boundary, candidate.forms, strict=True))
    alone = Subgraph((node,), subgraph.tensors, node.inputs, node.outputs)
    made = forms[gelu_of(subgraph).outputs[0]]
    return alone, replace(candidate, forms=(*(forms[number] for number in node.inputs), made))


def no_gelu_epilogue(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why this candidate is not one product with GELU or its gradient as the epilogue, or None if it is.

    Source:
        cuBLAS library documentation, cublasLtMatmulDescAttributes_t: a bias and its gradient have an element for each
        row of the column-major result, so they run along its contiguous axes. nvmath-python's epilogues, for k = 1.
    """
    alone, bare = product_under_gelu(subgraph, candidate)
    reason = not_single(alone, bare)
    if reason:
        return reason
    node, forms = contraction_of(subgraph), forms_by_number(subgraph, candidate)
    gelu, dtypes = gelu_of(subgraph), {subgraph.tensors[number].dtype for number in subgraph.boundary}
    taken = GELU_DTYPES[gelu.kind]
    if len(dtypes) > 1 or not dtypes <= set(taken):
        return f"cuBLASLt's {gelu.kind} is tried in one type of {', '.join(taken)}, not in {', '.join(sorted(dtypes))}"
    extents, strides = letter_extents(alone, node), operand_strides(alone, node, forms_by_number(alone, bare))
    matrices = as_matrices(node, strides, extents)
    assert not isinstance(matrices, str)
    if matrices.k == 1 and gelu.kind == "gelu_tanh_grad":
        return "cuBLASLt has GELU's gradient behind no product whose contracted extent is 1"
    down = matrices.c[1] == 1 or matrices.m == 1
    contiguous, extent = letter_groups(node)[1 if down else 2], matrices.m if down else matrices.n
    saved, made = saved_input(subgraph), gelu.outputs[0]
    if saved is not None and forms[saved].nameless() != forms[made].nameless():
        return f"GELU's input lies as {forms[saved]}, what is made of it as {forms[made]}"
    if saved is not None and extent % SAVED_MULTIPLE:
        return f"GELU's input is saved along {extent} elements, which is no multiple of {SAVED_MULTIPLE}"
    bias = bias_beside_gelu(subgraph)
    if bias is None:
        return None
    letters = bias[1]
    if {x for x in letters if extents[x] > 1} != {x for x in contiguous if extents[x] > 1}:
        return f"the bias runs along axes {letters!r} of the product, whose contiguous ones are {contiguous!r}"
    return bias_in_another_order(subgraph, candidate)


def bias_in_another_order(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why a bias beside GELU does not act as one axis of the product, or None if it does, or there is none."""
    bias = bias_beside_gelu(subgraph)
    if bias is None:
        return None
    number, letters = bias
    alone, bare = product_under_gelu(subgraph, candidate)
    node, forms = contraction_of(subgraph), forms_by_number(subgraph, candidate)
    extents, strides = letter_extents(alone, node), operand_strides(alone, node, forms_by_number(alone, bare))
    tensor = subgraph.tensors[number]
    steps = dict(zip(letters, forms[number].placed(tensor.axes, tensor.extents)[0], strict=True))
    if merge(letters, (strides[2], steps), extents) is None:
        return f"the bias lies as {forms[number]}, in another order than the product's axes {letters!r}"
    return None


def gelu_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate those of the product; what has its axes lies like it, a bias and its gradient as declared."""
    node = contraction_of(subgraph)
    rank = len(subgraph.tensors[node.outputs[0]].extents)
    for row in product_layouts(Subgraph((node,), subgraph.tensors, node.inputs, node.outputs)):
        forms = dict(zip(node.inputs, row, strict=False))
        for number in subgraph.boundary:
            axes = subgraph.tensors[number].axes
            forms.setdefault(number, row[-1] if len(axes) == rank else axes)
        yield tuple(forms[number] for number in subgraph.boundary)


_product = partial(Kernel, layouts=product_layouts, anchors=True, pitched=True)
_gelu = partial(Kernel, refuses=no_gelu_epilogue, layouts=gelu_layouts, anchors=True)
_stacked = partial(Kernel, layouts=stacked_product_layouts, anchors=True, merges=False)
KERNELS.add(
    _product("cublaslt_matmul", ("contraction",), f"{_IMPLEMENTATION}:matmul", not_single, patterns=OR_CAST),
    _product("cublaslt_matmul_bias", ("contraction", "bias"), f"{_IMPLEMENTATION}:matmul_bias", not_single),
    Kernel("cublaslt_matmul_bias_grad", (), f"{_IMPLEMENTATION}:matmul_bias_grad", _beside_bias_grads(not_single),
           layouts=bias_grad_layouts, anchors=True,
           patterns=(Pair(("bias_grad", "contraction"), sums_contracted_axes),)),
    _gelu("cublaslt_matmul_bias_gelu_tanh", ("contraction", "bias", "gelu_tanh"),
          f"{_IMPLEMENTATION}:matmul_bias_gelu_tanh"),
    _gelu("cublaslt_matmul_gelu_tanh_grad", ("contraction", "gelu_tanh_grad"),
          f"{_IMPLEMENTATION}:matmul_gelu_tanh_grad"),
    _gelu("cublaslt_matmul_gelu_tanh_grad_bias_grad", ("contraction", "gelu_tanh_grad", "bias_grad"),
          f"{_IMPLEMENTATION}:matmul_gelu_tanh_grad_bias_grad"),
    _stacked("cublaslt_stacked_matmul", (), f"{_IMPLEMENTATION}:stacked_matmul", not_one_stacked_product,
             patterns=STACK_OR_CAST),
    _stacked("cublaslt_stacked_matmul_bias", (), f"{_IMPLEMENTATION}:stacked_matmul_bias", not_one_stacked_product,
             patterns=(Siblings(("contraction", "bias")),)),
    _stacked("cublaslt_stacked_matmul_bias_grad", (), f"{_IMPLEMENTATION}:stacked_matmul_bias_grad",
             _beside_bias_grads(not_one_stacked_product), layouts=stacked_bias_grad_layouts,
             patterns=(Siblings(("contraction", "bias_grad")),)),
)  # fmt: skip
