"""Contractions: matrix products, alone or with what a library adds to them for free."""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product

from autotuner.ir.form import Form
from autotuner.ir.records import Candidate, Node, Subgraph
from autotuner.kernels.geometry import (
    HALVES,
    Matrices,
    as_matrices,
    contraction_layouts,
    forms_by_number,
    letter_extents,
    letter_groups,
    merge,
    operand_letters,
    operand_numbers,
    operand_strides,
    packed,
    translate,
    unit_stride,
    unit_strides,
)
from autotuner.kernels.patterns import Operators
from autotuner.kernels.registry import KERNELS, Kernel

_IMPLEMENTATION = "autotuner.kernels.torch.contraction"


def contraction_of(subgraph: Subgraph) -> Node:
    """Return the (first) contraction of a subgraph."""
    return next(node for node in subgraph.nodes if node.kind == "contraction")


def final_node(subgraph: Subgraph) -> Node:
    """Return the node that makes the boundary output."""
    return next(node for node in subgraph.nodes if subgraph.outputs[0] in node.outputs)


def _with_product(subgraph: Subgraph, candidate: Candidate) -> dict[int, Form]:
    """Return forms by tensor number; the contraction's own product lies like the boundary output it becomes.

    The follower (bias, add, scale) may bind other letters, but its operands have the product's axes in the same order.
    """
    forms = forms_by_number(subgraph, candidate)
    return {contraction_of(subgraph).outputs[0]: forms[subgraph.outputs[0]]} | forms


def not_one_product(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why this candidate is not one strided, batched matrix product, or None if it is."""
    node = contraction_of(subgraph)
    forms = _with_product(subgraph, candidate)
    if any(form.is_absent for form in forms.values()):
        return "a matrix product reads and writes every operand"
    matrices = seen_as_matrices(subgraph, candidate)
    if isinstance(matrices, str):
        return matrices
    for name, matrix, rows, columns in (
        ("first operand", matrices.a, matrices.m, matrices.k),
        ("second operand", matrices.b, matrices.k, matrices.n),
        ("product", matrices.c, matrices.m, matrices.n),
    ):
        if not unit_stride(matrix, rows, columns):
            return f"the {name} has no contiguous matrix axis: strides {matrix[1:]}"
    follower = final_node(subgraph)
    if follower.kind == "bias":
        product, vector = operand_strides(subgraph, follower, forms)[:2]
        letters = operand_letters(follower)[1]
        if merge(letters, (product, vector), letter_extents(subgraph, follower)) is None:
            return f"the bias lies as {forms[follower.inputs[1]]}, in another order than the product's axes {letters!r}"
    if follower.kind == "cast":
        source, target = (subgraph.tensors[number].dtype for number in (node.inputs[0], follower.outputs[0]))
        if source not in HALVES or target != "float32":
            return f"it writes float32 from operands of {' or '.join(HALVES)}; this is a cast from {source} to {target}"
    for extra in set(forms) & set(subgraph.inputs) - set(node.inputs):
        if follower.kind == "add" and forms[extra].nameless() != forms[subgraph.outputs[0]].nameless():
            return f"what is added lies as {forms[extra]}, the product as {forms[subgraph.outputs[0]]}"
    return None


def not_one_product_on_cpu(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why this candidate is not one product that torch computes on a CPU as its operands lie, or None if it is."""
    reason = not_one_product(subgraph, candidate)
    if reason:
        return reason
    matrices = seen_as_matrices(subgraph, candidate)
    assert not isinstance(matrices, str)
    return batch_not_taken(subgraph, matrices) if matrices.batch > 1 else None


def seen_as_matrices(subgraph: Subgraph, candidate: Candidate, looped: str = "") -> Matrices | str:
    """See a contraction as matrices, or say in a sentence why one call cannot compute it.

    Args:
        looped: letters along which calls are repeated.
    """
    return _seen_as_matrices(subgraph, candidate.forms, looped)


@lru_cache(maxsize=256)  # rules look several times at what one kernel after the other computes
def _seen_as_matrices(subgraph: Subgraph, texts: tuple[str, ...], looped: str) -> Matrices | str:
    node, forms = contraction_of(subgraph), _with_product(subgraph, Candidate("", texts))
    extents = letter_extents(subgraph, node) | dict.fromkeys(looped, 1)
    return as_matrices(node, operand_strides(subgraph, node, forms), extents)


def batch_not_taken(subgraph: Subgraph, matrices: Matrices) -> str | None:
    """Say why torch does not compute a batched product on a CPU from the operands as they lie, or None if it does.

    Torch hands 16-bit products to oneDNN where the CPU computes in that type, and copies a batched operand first unless
    it is dense; float32 and float64 go to BLAS, which takes any strides. A product with scattered columns goes to
    neither: 1.5 s to 5.5 s instead of 0.5 ms for 96 products of 128 x 64 x 128 (torch 2.13, Xeon 6-167, two cores).
    """
    dtype = subgraph.tensors[contraction_of(subgraph).inputs[0]].dtype
    if dtype not in HALVES:
        return None
    for name, matrix, rows, columns in (
        ("first", matrices.a, matrices.m, matrices.k),
        ("second", matrices.b, matrices.k, matrices.n),
    ):
        if not packed(matrix, rows, columns):
            return f"torch copies the {name} operand: batched {dtype} matrices must be dense, one behind the other"
    if matrices.n > 1 and matrices.c[2] != 1:
        return f"torch computes a batched {dtype} product element by element unless its columns are contiguous"
    return None


def product_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate layouts of all boundary tensors for one matrix product and what follows it."""
    node = contraction_of(subgraph)
    numbers, letters = operand_numbers(node), operand_letters(node)
    for row in contraction_layouts(node):
        forms = {
            number: translate(layout, bound, subgraph.tensors[number].axes)
            for number, bound, layout in zip(numbers, letters, row, strict=True)
        }
        forms[subgraph.outputs[0]] = forms[node.outputs[0]]
        for number in subgraph.inputs:
            tensor = subgraph.tensors[number]
            forms.setdefault(number, forms[node.outputs[0]] if len(tensor.axes) == len(row[2]) else tensor.axes)
        yield tuple(forms[number] for number in subgraph.boundary)


def loop_letter(node: Node, inner: bool = False) -> str:
    """Return the letter of the first or, with `inner`, the second batch axis of a contraction that has two, or ""."""
    batch = letter_groups(node)[0]
    return batch[inner] if len(batch) == 2 else ""


def no_loop_over_products(subgraph: Subgraph, candidate: Candidate, inner: bool = False) -> str | None:
    """Say why a loop over a batch axis does not make this candidate matrix products, or None if it does."""
    node = contraction_of(subgraph)
    looped = loop_letter(node, inner)
    if not looped:
        return f"{node.spec!r} has not exactly two batch axes"
    matrices = seen_as_matrices(subgraph, candidate, looped)
    if isinstance(matrices, str):
        return matrices
    return None if unit_strides(matrices) else "an operand has no contiguous matrix axis"


def no_loop_on_cpu(subgraph: Subgraph, candidate: Candidate, inner: bool = False) -> str | None:
    """As `not_one_product_on_cpu`, of a loop over products."""
    reason = no_loop_over_products(subgraph, candidate, inner)
    if reason:
        return reason
    matrices = seen_as_matrices(subgraph, candidate, loop_letter(contraction_of(subgraph), inner))
    assert not isinstance(matrices, str)
    return batch_not_taken(subgraph, matrices)


def loop_layouts(subgraph: Subgraph, inner: bool = False) -> Iterator[tuple[str, ...]]:
    """Enumerate layouts that keep the first batch axis outermost: heads before rows, or rows before heads.

    There are none where the other batch axis is the shorter one: 4,096 windows of four heads are four products of
    4,096 matrices, not 4,096 of four (13.8 ms for windows of 7 x 7 and heads of 32; torch 2.11, bfloat16, H200).
    """
    node = contraction_of(subgraph)
    first, second = loop_letter(node), loop_letter(node, inner=True)
    if not first:
        return
    extents = letter_extents(subgraph, node)
    if inner != (extents[second] < extents[first]):
        return
    _, m, n, k = letter_groups(node)
    if not (m and n and k):  # as where one query pools an image
        return
    numbers, bound = operand_numbers(node), operand_letters(node)
    natural = [
        [first + second + rows + columns, first + rows + second + columns]
        for rows, columns in (_declared(m, k, bound[0]), _declared(n, k, bound[1]), _declared(m, n, bound[2]))
    ]
    for row in product(*natural):
        if all(layout[1] == second for layout in row):
            continue
        forms = {
            number: translate(layout, own, subgraph.tensors[number].axes)
            for number, own, layout in zip(numbers, bound, row, strict=True)
        }
        forms[subgraph.outputs[0]] = forms[node.outputs[0]]
        yield tuple(forms[number] for number in subgraph.boundary)


def _declared(first: str, second: str, order: str) -> tuple[str, str]:
    """Return two groups of letters in the order in which an operand declares them."""
    return (first, second) if order.index(first[0]) < order.index(second[0]) else (second, first)


OR_CAST = (Operators(("contraction",)), Operators(("contraction", "cast")))
"""A product, or one that is written in a wider type than its operands have."""
_single = partial(Kernel, layouts=product_layouts, anchors=True, pitched=True)
_looped = partial(Kernel, layouts=loop_layouts, anchors=True, merges=False, pitched=True)
_inner = partial(_looped, layouts=partial(loop_layouts, inner=True))
_NO_INNER_ON_CPU, _NO_INNER = partial(no_loop_on_cpu, inner=True), partial(no_loop_over_products, inner=True)
_PRODUCT, _BIAS, _ADD, _SCALE = (("contraction", *then) for then in ((), ("bias",), ("add",), ("scale",)))
KERNELS.add(
    _single("torch_matmul", _PRODUCT, f"{_IMPLEMENTATION}:matmul", not_one_product_on_cpu),
    _single("torch_matmul_bias", _BIAS, f"{_IMPLEMENTATION}:matmul_plus", not_one_product_on_cpu),
    _single("torch_matmul_add", _ADD, f"{_IMPLEMENTATION}:matmul_plus", not_one_product_on_cpu, pitched=False),
    _single("torch_matmul_scale", _SCALE, f"{_IMPLEMENTATION}:matmul_scale", not_one_product_on_cpu),
    _looped("torch_matmul_loop", _PRODUCT, f"{_IMPLEMENTATION}:matmul_loop", no_loop_on_cpu),
    _looped("torch_matmul_loop_scale", _SCALE, f"{_IMPLEMENTATION}:matmul_loop_scale", no_loop_on_cpu),
    _inner("torch_matmul_loop_inner", _PRODUCT, f"{_IMPLEMENTATION}:matmul_loop_inner", _NO_INNER_ON_CPU),
    _inner("torch_matmul_loop_inner_scale", _SCALE, f"{_IMPLEMENTATION}:matmul_loop_inner_scale", _NO_INNER_ON_CPU),
    _single("cublas_matmul", _PRODUCT, f"{_IMPLEMENTATION}:matmul", not_one_product, patterns=OR_CAST),
    _single("cublas_matmul_bias", _BIAS, f"{_IMPLEMENTATION}:matmul_row_bias", not_one_product),
    _single("cublas_matmul_add", _ADD, f"{_IMPLEMENTATION}:matmul_plus", not_one_product, pitched=False),
    _single("cublas_matmul_scale", _SCALE, f"{_IMPLEMENTATION}:matmul_scale", not_one_product),
    _looped("cublas_matmul_loop", _PRODUCT, f"{_IMPLEMENTATION}:matmul_loop", no_loop_over_products),
    _looped("cublas_matmul_loop_scale", _SCALE, f"{_IMPLEMENTATION}:matmul_loop_scale", no_loop_over_products),
    _inner("cublas_matmul_loop_inner", _PRODUCT, f"{_IMPLEMENTATION}:matmul_loop_inner", _NO_INNER),
    _inner("cublas_matmul_loop_inner_scale", _SCALE, f"{_IMPLEMENTATION}:matmul_loop_inner_scale", _NO_INNER),
)
