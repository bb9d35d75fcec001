"""Siblings computed as one: query, key and value (all three, or neighbours in pairs) along a stacking axis.

In a candidate's forms a slice is written with `*`: "bl*np@1/3" lies pitched among its siblings; "*nph@1/3" is an
ordinary dense tensor that is asked to lie right behind its sibling.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

from autotuner.ir.form import STACK_AXIS, Form
from autotuner.ir.records import Candidate, Node, Subgraph
from autotuner.kernels.geometry import (
    HALVES,
    arrangements,
    as_matrices,
    forms_by_number,
    letter_groups,
    operand_letters,
    orders,
    unit_strides,
)
from autotuner.kernels.patterns import Siblings
from autotuner.kernels.registry import KERNELS, Kernel

_IMPLEMENTATION = "autotuner.kernels.torch.stacked"

STACK_LETTER = "z"


def members(subgraph: Subgraph, kind: str) -> tuple[Node, ...]:
    return tuple(node for node in subgraph.nodes if node.kind == kind)


def stacked_operands(subgraph: Subgraph, kind: str) -> list[tuple[int, ...]]:
    """Return, for each operand of the stacked operator, its tensor's number in every member: one number if shared.

    The output is what the cover leaves: the members' own outputs, those of the biases or casts behind them, or one sum.
    """
    nodes = members(subgraph, kind)
    inputs = [tuple(dict.fromkeys(numbers)) for numbers in zip(*(node.inputs for node in nodes), strict=True)]
    return [*inputs, subgraph.outputs]


def stacked_node(subgraph: Subgraph, kind: str = "contraction") -> Node:
    """Return one node that computes all members: the stacking letter is added to every operand that is stacked."""
    node = members(subgraph, kind)[0]
    letters = [
        STACK_LETTER + own if len(numbers) > 1 else own
        for own, numbers in zip(operand_letters(node), stacked_operands(subgraph, kind), strict=True)
    ]
    return Node(kind, f"{','.join(letters[:-1])}->{letters[-1]}", tuple(range(len(letters) - 1)), (len(letters) - 1,))


def stacked_extents(subgraph: Subgraph, kind: str = "contraction") -> dict[str, int]:
    """Return elements along each letter of the stacked node."""
    node = members(subgraph, kind)[0]
    extents = {STACK_LETTER: len(members(subgraph, kind))}
    for number, letters in zip(node.inputs + node.outputs, operand_letters(node), strict=True):
        extents |= dict(zip(letters, subgraph.tensors[number].extents, strict=True))
    return extents


def stacked_strides(subgraph: Subgraph, kind: str, forms: dict[int, Form]) -> list[dict[str, int]]:
    """Return, for each operand of the stacked node, the distance in elements along each letter."""
    found = []
    node = members(subgraph, kind)[0]
    for numbers, letters in zip(stacked_operands(subgraph, kind), operand_letters(node), strict=True):
        tensor, form = subgraph.tensors[numbers[0]], forms[numbers[0]]
        strides, _, _ = form.placed(tensor.axes, tensor.extents)
        step = dict(zip(letters, strides, strict=True))
        if len(numbers) > 1:
            sizes = dict(zip(tensor.axes, tensor.extents, strict=True)) | {STACK_AXIS: len(numbers)}
            step[STACK_LETTER] = form.layout.strides(sizes)[STACK_AXIS]
        found.append(step)
    return found


def not_one_stacked_product(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why the members are not one matrix product, or None if they are."""
    for cast in members(subgraph, "cast"):
        source, target = (subgraph.tensors[number].dtype for number in (*cast.inputs, *cast.outputs))
        if source not in HALVES or target != "float32":
            return f"it writes float32 from operands of {' or '.join(HALVES)}; this is a cast from {source} to {target}"
    forms = forms_by_number(subgraph, candidate)
    for numbers in stacked_operands(subgraph, "contraction"):
        places = [stack.index for n in numbers if (stack := forms[n].stack) is not None]
        if len(numbers) > 1 and places != [*range(len(numbers))]:
            return f"the stacked operand's slices lie as {[str(forms[n]) for n in numbers]}, not in order in one buffer"
        if len({forms[n].layout for n in numbers}) > 1:
            return "the slices of a stacked operand lie in different layouts"
    strides = stacked_strides(subgraph, "contraction", forms)
    matrices = as_matrices(stacked_node(subgraph), strides, stacked_extents(subgraph))
    if isinstance(matrices, str):
        return matrices
    return None if unit_strides(matrices) else "an operand has no contiguous matrix axis"


def stacked_product_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate layouts of one product over the stack; stacked axes keep their declared order behind the stack's."""
    node = stacked_node(subgraph)
    own = members(subgraph, "contraction")[0]
    numbers = stacked_operands(subgraph, "contraction")
    groups = [_orders(letters) for letters in letter_groups(node)]
    seen = set()
    for g, m, n, k in product(*groups):
        for row in product(arrangements(g, m, k), arrangements(g, k, n), arrangements(g, m, n)):
            if row in seen:
                continue
            seen.add(row)
            forms: dict[int, str] = {}
            for layout, bound, group in zip(row, operand_letters(own), numbers, strict=True):
                axes = subgraph.tensors[group[0]].axes
                text = layout.translate(str.maketrans(STACK_LETTER + bound, STACK_AXIS + axes))
                for index, number in enumerate(group):
                    forms[number] = f"{text}@{index}/{len(group)}" if len(group) > 1 else text
            yield tuple(_bias_forms(subgraph, forms)[number] for number in subgraph.boundary)


def _bias_forms(subgraph: Subgraph, forms: dict[int, str]) -> dict[int, str]:
    """Add the forms of stacked biases, which lie one behind the other, and of an addend, which lies like the sum."""
    for number in subgraph.boundary:
        forms.setdefault(number, forms[subgraph.outputs[0]])
    nodes = members(subgraph, "bias")
    for index, node in enumerate(nodes):
        number = node.inputs[1]
        forms[number] = f"*{subgraph.tensors[number].axes}@{index}/{len(nodes)}"
    return forms


def _orders(letters: str) -> list[str]:
    return [letters] if STACK_LETTER in letters else orders(letters)


def stacked_vector_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate the pitched layout of stacked biases or bias gradients: rows, stack, then its members' axes.

    Casts of bias gradients lie one behind the other, as these do.
    """
    kind = subgraph.nodes[0].kind
    nodes = members(subgraph, kind)
    wide, narrow = (operand_letters(nodes[0])[i] for i in (0, 1))
    kept = [x for x in wide if x in narrow]
    rows = [x for x in wide if x not in narrow]
    pitched = "".join(rows) + STACK_AXIS + "".join(kept)
    forms: dict[int, str] = {}
    for index, node in enumerate(nodes):
        for number, letters in zip(node.inputs + node.outputs, operand_letters(node), strict=True):
            axes = subgraph.tensors[number].axes
            layout = pitched if len(letters) == len(wide) else STACK_AXIS + letters
            forms[number] = f"{layout.translate(str.maketrans(letters, axes))}@{index}/{len(nodes)}"
    for index, cast in enumerate(members(subgraph, "cast")):
        forms[cast.outputs[0]] = f"{STACK_AXIS}{subgraph.tensors[cast.outputs[0]].axes}@{index}/{len(nodes)}"
    yield tuple(forms[number] for number in subgraph.boundary)


STACK_OR_CAST = (Siblings(("contraction",)), Siblings(("contraction", "cast")))
"""Products, or products that are written in a wider type than their operands have."""
_WITH_BIAS = (Siblings(("contraction", "bias")),)
_products = partial(
    Kernel, covers=(), refuses=not_one_stacked_product, layouts=stacked_product_layouts, anchors=True, merges=False
)  # fmt: skip
_vectors = partial(Kernel, covers=(), layouts=stacked_vector_layouts, anchors=True, merges=False)
KERNELS.add(
    _products("torch_stacked_matmul", runs=f"{_IMPLEMENTATION}:matmul", patterns=STACK_OR_CAST[:1]),
    _products("torch_stacked_matmul_bias", runs=f"{_IMPLEMENTATION}:matmul", patterns=_WITH_BIAS),
    _products("cublas_stacked_matmul", runs=f"{_IMPLEMENTATION}:matmul", patterns=STACK_OR_CAST),
    _products("cublas_stacked_matmul_bias", runs=f"{_IMPLEMENTATION}:matmul_row_bias", patterns=_WITH_BIAS),
    _vectors("torch_stacked_bias", runs=f"{_IMPLEMENTATION}:bias", patterns=(Siblings(("bias",)),)),
    _vectors("torch_stacked_bias_grad", runs=f"{_IMPLEMENTATION}:bias_grad", patterns=(Siblings(("bias_grad",)),)),
)
