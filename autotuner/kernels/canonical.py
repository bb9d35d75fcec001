"""One record for all candidates that execute the same call.

Axes that lie one behind the other in every operand act as one, and the names and the declared order of axes change
nothing: what counts is each operand's memory order. So "blh" times "nph" and "lbh" times "nph" are one matrix product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from autotuner.ir.form import STACK_AXIS, Form
from autotuner.ir.records import LETTERS, Call, Candidate, Node, Subgraph, TensorType, names_axis
from autotuner.kernels.geometry import forms_by_number, has_programs, operand_letters, operand_numbers
from autotuner.kernels.registry import KERNELS

Axis = int | str


def canonical(subgraph: Subgraph, candidate: Candidate) -> Call:
    """Return the call that a candidate executes, shared by all candidates that execute the same.

    Where a tensor meets itself, as in a product of all pairs of its rows, two axes of another tensor are the same axis
    of this one, and no letter tells them apart: such a call stays as it is written.
    """
    axes = shared_axes(subgraph)
    if not KERNELS[candidate.kernel].merges or any(len(own) > len(set(own)) for own in axes.values()):
        return Call(subgraph, candidate)
    forms = forms_by_number(subgraph, candidate)
    memory = {number: _memory_order(axes[number], subgraph.tensors[number].axes, forms[number]) for number in forms}
    inside = _inside_order(subgraph, axes, memory)
    orders: dict[int, list[Axis]] = inside | memory
    chains = _chains(subgraph, axes, list(orders.values()))
    extents = {
        axis: extent
        for number, own in axes.items()
        for axis, extent in zip(own, subgraph.tensors[number].extents, strict=True)
    }
    heads = {chain[0]: chain for chain in chains}
    merged = {
        number: [axis for axis in order if axis in heads or axis == STACK_AXIS] for number, order in orders.items()
    }
    return _rebuilt(subgraph, candidate, axes, merged, heads, extents)


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


def _chains(subgraph: Subgraph, axes: Mapping[int, Sequence[int]], orders: list[list[Axis]]) -> list[list[int]]:
    """Return maximal runs of axes that always lie one behind the other; axes that a node names stay alone."""
    named = {
        axis
        for node in subgraph.nodes
        for name, value in node.attributes
        if names_axis(name)
        for number, letters in zip(operand_numbers(node), operand_letters(node), strict=True)
        for letter, axis in zip(letters, axes[number], strict=True)
        if letter == value
    }
    follower: dict[int, int] = {}
    everything = {axis for own in axes.values() for axis in own}
    for axis in everything:
        behind = {
            order[order.index(axis) + 1] if order.index(axis) + 1 < len(order) else None
            for order in orders
            if axis in order
        }
        if len(behind) == 1:
            (next_axis,) = behind
            if isinstance(next_axis, int) and not {axis, next_axis} & named:
                together = all((axis in order) == (next_axis in order) for order in orders)
                if together:
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
    subgraph: Subgraph,
    candidate: Candidate,
    axes: Mapping[int, Sequence[int]],
    merged: dict[int, list[Axis]],
    heads: dict[int, list[int]],
    extents: dict[int, int],
) -> Call:
    """Write the record anew: every tensor declared in memory order, one letter per merged axis."""

    def size(axis: int) -> int:
        total = 1
        for part in heads[axis]:
            total *= extents[part]
        return total

    tensors = tuple(
        TensorType(tuple(size(axis) for axis in merged[number] if isinstance(axis, int)), tensor.dtype)
        for number, tensor in enumerate(subgraph.tensors)
    )
    nodes = []
    for node in subgraph.nodes:
        letters: dict[int, str] = {}
        texts = []
        for number in operand_numbers(node):
            own = [axis for axis in merged[number] if isinstance(axis, int)]
            texts.append("".join(letters.setdefault(axis, LETTERS[len(letters)]) for axis in own))
        count = len(node.inputs)
        attributes = tuple(
            (name, _letter_of(node, axes, letters, str(value)) if names_axis(name) else value)
            for name, value in node.attributes
        )
        spec = f"{','.join(texts[:count])}->{','.join(texts[count:])}"
        nodes.append(Node(node.kind, spec, node.inputs, node.outputs, attributes))
    forms = []
    for number, form in zip(subgraph.boundary, candidate.parsed_forms(), strict=True):
        fresh = iter(LETTERS)
        layout = "".join(STACK_AXIS if axis == STACK_AXIS else next(fresh) for axis in merged[number])
        suffix = str(form.nameless())[len(form.layout.axes) :]
        forms.append(layout + suffix)
    rebuilt = Subgraph(tuple(nodes), tensors, subgraph.inputs, subgraph.outputs)
    return Call(rebuilt, replace(candidate, forms=tuple(forms)))


def _letter_of(node: Node, axes: Mapping[int, Sequence[int]], letters: dict[int, str], value: str) -> str:
    for number, own in zip(operand_numbers(node), operand_letters(node), strict=True):
        if value in own:
            return letters[axes[number][own.index(value)]]
    raise ValueError(f"{node.kind} names axis {value!r}, which its spec {node.spec!r} lacks")
