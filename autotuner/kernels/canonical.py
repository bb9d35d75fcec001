"""One record for all candidates that execute the same call.

Axes that lie one behind the other in every operand act as one, and the names and the declared order of axes change
nothing: what counts is each operand's memory order. So "blh" times "nph" and "lbh" times "nph" are one matrix product.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from itertools import zip_longest
from math import prod

from autotuner.ir.form import STACK_AXIS, Form
from autotuner.ir.records import LETTERS, Call, Candidate, Node, Subgraph, TensorType, names_axis
from autotuner.kernels.geometry import has_programs, operand_letters, operand_numbers
from autotuner.kernels.registry import KERNELS

Axis = int | str


def canonical(subgraph: Subgraph, candidate: Candidate) -> Call:
    """Return the call that a candidate executes, shared by all candidates that execute the same.

    Where a tensor meets itself, as in a product of all pairs of its rows, two axes of another tensor are the same axis
    of this one, and no letter tells them apart: such a call stays as it is written.
    """
    if not KERNELS[candidate.kernel].merges:
        return Call(subgraph, candidate)
    merged, forms = _merged(subgraph.signature, subgraph, candidate.forms)
    return Call(merged, Candidate(candidate.kernel, forms, candidate.params, candidate.version))


@lru_cache(maxsize=1 << 13)  # all kernels and parameters on operands in the same forms ask
def _merged(_signature: str, subgraph: Subgraph, texts: tuple[str, ...]) -> tuple[Subgraph, tuple[str, ...]]:
    """Return the canonical subgraph, and its boundary's forms.

    Args:
        _signature: the subgraph's, for the cache: subgraphs with attributes 1 and 1.0 are equal, their records are not.
        subgraph: what is computed.
        texts: forms of the boundary tensors.
    """
    axes = shared_axes(subgraph)
    if any(len(own) > len(set(own)) for own in axes.values()):
        return subgraph, texts
    forms = [Form.parse(text) for text in texts]
    memory = {
        number: _memory_order(axes[number], subgraph.tensors[number].axes, form)
        for number, form in zip(subgraph.boundary, forms, strict=True)
    }
    orders = _inside_order(subgraph, axes, memory) | memory
    chains = _chains(axes, _named_axes(subgraph), list(orders.values()))
    extents = {
        axis: extent
        for number, own in axes.items()
        for axis, extent in zip(own, subgraph.tensors[number].extents, strict=True)
    }
    sizes = {chain[0]: prod(extents[axis] for axis in chain) for chain in chains}
    merged = {
        number: [axis for axis in order if axis in sizes or axis == STACK_AXIS] for number, order in orders.items()
    }
    return _rebuilt(subgraph, axes, merged, sizes), tuple(
        _written(form, merged[number]) for number, form in zip(subgraph.boundary, forms, strict=True)
    )


@lru_cache(maxsize=1 << 12)  # each of a subgraph's thousand candidates asks
def shared_axes(subgraph: Subgraph) -> Mapping[int, Sequence[int]]:
    """Return each tensor's axes as numbers shared by the whole subgraph: equal number, same axis."""
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def find(item: tuple[int, int]) -> tuple[int, int]:
        while parent.setdefault(item, item) != item:
            item = parent[item]
        return item

    for node in subgraph.nodes:
        first: dict[str, tuple[int, int]] = {}
        for number, letters in zip(operand_numbers(node), operand_letters(node), strict=True):
            for place, letter in enumerate(letters):
                root = find((number, place))
                known = find(first.setdefault(letter, root))
                parent[root] = known
    names: dict[tuple[int, int], int] = {}
    return {
        number: [names.setdefault(find((number, place)), len(names)) for place in range(len(tensor.extents))]
        for number, tensor in enumerate(subgraph.tensors)
    }


def _memory_order(own: Sequence[int], axes: str, form: Form) -> list[Axis]:
    return [STACK_AXIS if letter == STACK_AXIS else own[axes.index(letter)] for letter in form.layout.axes]


def _inside_order(
    subgraph: Subgraph, axes: Mapping[int, Sequence[int]], memory: dict[int, list[Axis]]
) -> dict[int, list[Axis]]:
    """Give tensors inside the kernel the order of an output with the same axes, so that they can be read as it.

    Where one operator is a program, every tensor lies in declared order, and those inside keep theirs.
    """
    found: dict[int, list[Axis]] = {}
    ranked = [memory[number] for number in (*subgraph.outputs, *subgraph.inputs)]
    for number, own in axes.items():
        if number in memory:
            continue
        like = (
            None
            if has_programs(subgraph)
            else next(
                ([x for x in order if x != STACK_AXIS] for order in ranked if set(own) == set(order) - {STACK_AXIS}),
                None,
            )
        )
        found[number] = like if like is not None else list(own)
    return found


@lru_cache(maxsize=1 << 12)
def _named_axes(subgraph: Subgraph) -> Set[int]:
    """Return the axes that attributes of nodes name."""
    axes = shared_axes(subgraph)
    return {
        axis
        for node in subgraph.nodes
        for name, value in node.attributes
        if names_axis(name)
        for number, letters in zip(operand_numbers(node), operand_letters(node), strict=True)
        for letter, axis in zip(letters, axes[number], strict=True)
        if letter == value
    }


def _chains(axes: Mapping[int, Sequence[int]], named: Set[int], orders: list[list[Axis]]) -> list[list[int]]:
    """Return maximal runs of axes that always lie one behind the other; axes that a node names stay alone."""
    behind: dict[Axis, set[Axis | None]] = defaultdict(set)
    places: dict[Axis, list[int]] = defaultdict(list)
    for place, order in enumerate(orders):
        for axis, next_axis in zip_longest(order, order[1:]):
            behind[axis].add(next_axis)
            places[axis].append(place)
    follower: dict[int, int] = {}
    everything = {axis for own in axes.values() for axis in own}
    for axis in everything - named:
        if len(behind[axis]) == 1:
            (next_axis,) = behind[axis]
            if isinstance(next_axis, int) and next_axis not in named and places[axis] == places[next_axis]:
                follower[axis] = next_axis
    starts = sorted(everything - set(follower.values()))
    chains = []
    for axis in starts:
        chain = [axis]
        while chain[-1] in follower:
            chain.append(follower[chain[-1]])
        chains.append(chain)
    return chains


def _rebuilt(
    subgraph: Subgraph, axes: Mapping[int, Sequence[int]], merged: dict[int, list[Axis]], sizes: dict[int, int]
) -> Subgraph:
    """Write the subgraph anew: every tensor declared in memory order, one letter per merged axis.

    Args:
        axes: of each tensor, as they are shared by the subgraph.
        merged: memory order of each tensor, of merged axes.
        sizes: elements along each merged axis.
    """
    unstacked = {number: [axis for axis in order if isinstance(axis, int)] for number, order in merged.items()}
    tensors = tuple(
        TensorType(tuple([sizes[axis] for axis in unstacked[number]]), tensor.dtype)
        for number, tensor in enumerate(subgraph.tensors)
    )
    nodes = []
    for node in subgraph.nodes:
        letters: dict[int, str] = {}
        texts = [
            "".join([letters.setdefault(axis, LETTERS[len(letters)]) for axis in unstacked[number]])
            for number in operand_numbers(node)
        ]
        count = len(node.inputs)
        attributes = tuple(
            (name, _letter_of(node, axes, letters, str(value)) if names_axis(name) else value)
            for name, value in node.attributes
        )
        spec = f"{','.join(texts[:count])}->{','.join(texts[count:])}"
        nodes.append(Node(node.kind, spec, node.inputs, node.outputs, attributes))
    return Subgraph(tuple(nodes), tensors, subgraph.inputs, subgraph.outputs)


def _written(form: Form, merged: list[Axis]) -> str:
    """Return the text of a form whose tensor is declared in memory order."""
    fresh = iter(LETTERS)
    layout = "".join([STACK_AXIS if axis == STACK_AXIS else next(fresh) for axis in merged])
    return layout + str(form.nameless())[len(form.layout.axes) :]


def _letter_of(node: Node, axes: Mapping[int, Sequence[int]], letters: dict[int, str], value: str) -> str:
    for number, own in zip(operand_numbers(node), operand_letters(node), strict=True):
        if value in own:
            return letters[axes[number][own.index(value)]]
    raise ValueError(f"{node.kind} names axis {value!r}, which its spec {node.spec!r} lacks")
