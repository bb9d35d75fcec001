"""Sets with an operand of bits, seen with one axis more: the elements of a byte.

Inductor makes vectors of a loop over eight elements that share a byte, and scalar code of one over all elements, whose
index it divides by eight: 14 times slower (torch 2.13, Xeon with AVX-512).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotuner.ir.form import Form, Layout
from autotuner.ir.formats import BITS
from autotuner.ir.records import LETTERS, Node, Subgraph, names_axis
from autotuner.kernels.canonical import shared_axes
from autotuner.kernels.geometry import has_programs, operand_letters, operand_numbers


@dataclass(frozen=True)
class BytesSeen:
    """A subgraph whose contiguous axis is split in two, and forms of its boundary tensors.

    Args:
        places: where each boundary tensor had the axis; None where it has none, or is stored in a flat format.
    """

    subgraph: Subgraph
    forms: tuple[Form, ...]
    places: tuple[int | None, ...]


def by_whole_bytes(subgraph: Subgraph, forms: Sequence[Form]) -> BytesSeen | None:
    """Return a subgraph whose last axis in memory is that of whole bytes and one of their elements; None if it cannot.

    It can where operands of bits end in one axis, whose extent is a multiple of eight, and no operator names the axis.
    """
    axes = shared_axes(subgraph)
    ends = {
        axes[number][subgraph.tensors[number].axes.index(form.layout.axes[-1])]
        for number, form in zip(subgraph.boundary, forms, strict=True)
        if form.format.has_bits and form.layout.axes
    }
    if len(ends) != 1 or has_programs(subgraph):
        return None
    (end,) = ends
    places = {number: own.index(end) for number, own in axes.items() if own.count(end) == 1}
    extents = {subgraph.tensors[number].extents[place] for number, place in places.items()}
    repeated = any(own.count(end) > 1 for own in axes.values())
    nodes = [_with_axis_split(node, places) for node in subgraph.nodes]
    if repeated or any(extent % BITS for extent in extents) or None in nodes:
        return None
    tensors = tuple(
        replace(tensor, extents=_split(tensor.extents, places[number])) if number in places else tensor
        for number, tensor in enumerate(subgraph.tensors)
    )
    whole = Subgraph(tuple(node for node in nodes if node), tensors, subgraph.inputs, subgraph.outputs)
    pairs = list(zip(subgraph.boundary, forms, strict=True))
    return BytesSeen(
        whole,
        tuple(_form_split(form, places[number]) if number in places else form for number, form in pairs),
        tuple(None if form.is_flat else places.get(number) for number, form in pairs),
    )


def _split(extents: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*extents[:place], extents[place] // BITS, BITS, *extents[place + 1 :])


def _with_axis_split(node: Node, places: dict[int, int]) -> Node | None:
    """Return a node whose spec has two letters for an axis, the second one behind the first; None if it names it."""
    operands = list(zip(operand_numbers(node), operand_letters(node), strict=True))
    letter = next((letters[places[number]] for number, letters in operands if number in places), None)
    if letter is None:
        return node
    if any(names_axis(name) and value == letter for name, value in node.attributes):
        return None
    fresh = next(other for other in reversed(LETTERS) if other not in node.spec)
    return replace(node, spec=node.spec.replace(letter, letter + fresh))


def _form_split(form: Form, place: int) -> Form:
    """Return a form whose axis at a place is two, one behind the other in memory, too."""
    order = [LETTERS.index(letter) for letter in form.layout.axes if letter in LETTERS]
    moved = [[axis, axis + 1] if axis == place else [axis + (axis > place)] for axis in order]
    return Form(Layout("".join(LETTERS[axis] for pair in moved for axis in pair)), form.storage)
