"""Regions: parts of a program that are tuned as one, and those among them that are equal.

A program is cut where nothing but one tensor goes on. Pieces that repeat in the same order, as those of the layers of
a transformer do, make one region each time. Where more of the flop is in the model's layers than in such regions, as
where the first layer reads otherwise than the others, the program is cut as the layers are: each is one region. A piece
that holds several layers, as where text and image flow through them side by side, is cut into these too; so are pieces
that repeat after several layers, as where every sixth sees all tokens and the others have a window.

A region is worth tuning if it has three operators or more, and either holds an attention, or is one of several layers,
or of several alike that have a share of the program's products: 5 % of their flop, all of them together.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from autotuner.ir.kinds import KINDS, SOFTMAXES
from autotuner.ir.records import Scalar
from autotuner.runtime.capture.axes import Axis, whole
from autotuner.runtime.capture.layers import by_layers, siblings_of
from autotuner.runtime.capture.pieces import pieces_of
from autotuner.runtime.capture.program import (
    LayerCall,
    Operation,
    Taken,
    TensorValue,
    fixed_of,
    product_flop,
    source_of,
    taken_by,
)

PERIOD_MAX = 16
"""Pieces that a repeating region has at most."""
OPERATORS_MIN = 3
"""Operators that a region has at least: fewer than those of an attention leave nothing to fuse or to lay out."""
SHARE_MIN = 0.05
"""Share of the flop of all products that regions without an attention have at least, all equal ones together."""
LAYERS_SHARE = 0.9
"""A piece that repeats nowhere is cut into the layers that it holds if these have such a share of its flop."""
Groups = list[tuple[int, list[list[Operation]]]]
"""Groups of pieces of a program, each with the number of groups that are like it."""
FAR_SHARE, FAR_MAX = 8, 4
"""Tensors that all layers may read: those whose first and last readers are an eighth of the program apart, and how many
of them are tried."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Operators that are cut out as one region, in order, and those of their results that somebody else reads.

    Args:
        results: what flows on.
        shown: what others get beside that, as the keys and values of a cache. A region is tuned as if it had none.
    """

    operations: tuple[Operation, ...]
    results: tuple[TensorValue, ...]
    shown: tuple[Taken, ...] = ()


class Uses:
    """The readers of each tensor: operators, and others."""

    def __init__(
        self,
        operations: Iterable[Operation],
        demanded: Iterable[TensorValue],
        handed_out: Iterable[Taken] = (),
    ) -> None:
        self.demanded = set(demanded)
        self.handed_out: dict[TensorValue, list[Taken]] = {}
        for taken in dict.fromkeys(handed_out):
            self.handed_out.setdefault(taken[0], []).append(taken)
        self.readers: dict[TensorValue, list[Operation]] = {}
        for operation in operations:
            for operand in operation.inputs:
                self.readers.setdefault(operand.view.tensor, []).append(operation)

    def results(self, operations: Sequence[Operation]) -> tuple[TensorValue, ...]:
        """Return what some operators make that others read."""
        inside = set(operations)
        return tuple(
            tensor
            for operation in operations
            for tensor in operation.outputs
            if tensor in self.demanded or any(reader not in inside for reader in self.readers.get(tensor, ()))
        )

    def cut(self, operations: Sequence[Operation]) -> Cut:
        """Return operators as a region."""
        inside = set(operations)
        results, shown = [], list[Taken]()
        for tensor in self.results(operations):
            handed_out = self.handed_out.get(tensor, [])
            if handed_out and all(self._is_in_memory(taken, inside) for taken in handed_out):
                shown += handed_out
            else:
                results.append(tensor)
        return Cut(tuple(operations), tuple(results), tuple(shown))

    def _is_in_memory(self, taken: Taken, inside: set[Operation]) -> bool:
        """Say whether nothing but products reads a tensor at these places, so that no kernel keeps it to itself."""
        tensor, _ = taken
        readers = self.readers.get(tensor, [])
        of_taken = {
            reader.kind for reader in readers for operand in reader.inputs
            if operand.view.tensor is tensor and taken_by(operand.view) == taken
        }  # fmt: skip
        is_made = tensor.made_by is not None and KINDS[tensor.made_by.kind].shown
        return is_made and of_taken == {"contraction"} and inside.issuperset(readers)


def cuts_of(
    operations: Sequence[Operation],
    demanded: Iterable[TensorValue],
    handed_out: Iterable[Taken] = (),
    *,
    is_unit: bool = False,
) -> list[Cut]:
    """Return the regions worth tuning: those that hold an attention, or repeat and have a share of the flop.

    Args:
        operations: in order, with their stages; only those that somebody needs.
        demanded: tensors that are read by what is no operator of ours.
        handed_out: what is read of them.
        is_unit: whether the program repeats as a whole elsewhere, so that it is one region unless parts of it repeat.
    """
    uses = Uses(operations, demanded, handed_out)
    found: list[Cut] = []
    least = SHARE_MIN * _flop([operations])
    siblings = siblings_of(operations)
    extents = Counter(operation.layers[:1] for operation in operations)
    for part in _connected(operations, uses):
        groups = _groups(part, uses)
        if all(number == 1 for number, _ in groups):
            groups = [(2, [part])] if is_unit else _as_one_layer(groups)
        groups = [each for n, group in groups for each in _cut_into_layers(n, group, uses, siblings, extents)]
        each_way = (_worth(groups, least), _worth(_layer_groups(part, uses, siblings), least))
        found += map(uses.cut, max(each_way, key=_flop))
    return sorted(found, key=lambda cut: cut.operations[0].place)


def _flop(cuts: Iterable[Iterable[Operation]]) -> int:
    """Return the flop of the products of several cuts."""
    return sum(map(product_flop, chain(*cuts)))


def _cut_into_layers(
    number: int,
    group: list[list[Operation]],
    uses: Uses,
    siblings: Mapping[tuple[str, str], int],
    extents: Mapping[tuple[LayerCall, ...], int],
) -> Groups:
    """Return a group, or a group for each layer where it holds several; if it repeats, where it holds them in whole.

    Args:
        number: of groups that are like it, itself among them.
        extents: operators of each layer.
    """
    operations = [*chain(*group)]
    held = Counter(operation.layers[:1] for operation in operations)
    if len(held) < 2 or (number > 1 and not _is_of_whole_layers(held, extents)):
        return [(number, group)]
    layers = _layer_groups(operations, uses, siblings)
    repeated = [each for count, pieces in layers if count > 1 for each in pieces]
    enough = len(repeated) > 1 and _flop(repeated) >= LAYERS_SHARE * _flop(group)
    return layers if enough else [(number, group)]


def _is_of_whole_layers(
    held: Mapping[tuple[LayerCall, ...], int], extents: Mapping[tuple[LayerCall, ...], int]
) -> bool:
    """Say whether operators are those of several layers that are alike, none of which has operators elsewhere.

    Args:
        held: how many there are of each layer, and of none.
        extents: how many each has.
    """
    layers = [layer for layer in held if layer]
    alike = {layer.kin for (layer,) in layers}
    return len(layers) > 1 and len(alike) == 1 and all(held[layer] == extents[layer] for layer in layers)


def _layer_groups(operations: Sequence[Operation], uses: Uses, siblings: Mapping[tuple[str, str], int]) -> Groups:
    """Cut operators into a group for each layer; what is in no layer is cut as programs without layers are."""
    found: Groups = []
    for layer, group in by_layers(operations):
        found += [(siblings[layer.kin], [group])] if layer is not None else _groups(group, uses)
    return found


def _worth(groups: Groups, least: float) -> list[list[Operation]]:
    """Return the operators of the groups that are worth tuning; `least` is the flop that equal ones have at least."""
    found: list[list[Operation]] = []
    for number, group in groups:
        cut = [operation for piece in group for operation in piece]
        flop = _flop(group)
        has_share = number > 1 and 0 < least <= number * flop
        if len(cut) >= OPERATORS_MIN and ((flop > 0 and _has_attention(cut)) or has_share):
            found.append(cut)
    return found


def _has_attention(operations: Iterable[Operation]) -> bool:
    return any(operation.kind in SOFTMAXES for operation in operations)


def _as_one_layer(groups: Groups) -> Groups:
    """Return pieces of which none repeats as one group, where they are those of a layer that is compiled by itself.

    These are an attention that is in no numbered module, and the pieces around it that read, or make, as many elements
    as the attention's does: so a head behind the layer is none of it.
    """
    pieces = [operation for _, group in groups for operation in chain(*group)]
    attentions = [operation for operation in pieces if operation.kind in SOFTMAXES]
    if not attentions or any(operation.layers for operation in attentions) or _has_shared_weights(pieces):
        return groups
    cuts = [[*chain(*group)] for _, group in groups]
    (width, *_) = (_elements(cut[0].inputs[0].view.tensor) for cut in cuts if _has_attention(cut))
    first = next(place for place, cut in enumerate(cuts) if _elements(cut[0].inputs[0].view.tensor) == width)
    last = max((place for place, cut in enumerate(cuts) if _elements(cut[-1].outputs[0]) == width), default=first)
    held = cuts[first : last + 1]
    if not all(any(operation in cut for cut in held) for operation in attentions):
        return groups
    return [*groups[:first], (1, held), *groups[last + 1 :]]


def _has_shared_weights(operations: Iterable[Operation]) -> bool:
    """Say whether two products read one weight, as where a layer is called twice."""
    weights = [
        taken_by(operation.inputs[1].view) for operation in operations
        if operation.kind == "contraction" and source_of(operation.inputs[1].view.tensor).parameter
    ]  # fmt: skip
    return len(set(weights)) < len(weights)


def _elements(tensor: TensorValue) -> int:
    return prod(axis.extent for dim in tensor.dims for axis in whole(dim))


def _groups(operations: Sequence[Operation], uses: Uses) -> Groups:
    """Cut operators into groups, so that most are in groups that repeat; see `_repeated`.

    A tensor that is read over a long way may be what every layer looks at beside what flows through it.
    """
    found = [
        _repeated(pieces_of(operations, known), uses) for known in [set(), *({each} for each in _far_read(operations))]
    ]
    return max(found, key=lambda groups: sum(len(piece) for number, group in groups if number > 1 for piece in group))


def _far_read(operations: Sequence[Operation]) -> list[TensorValue]:
    """Return tensors that operators read over a good part of a program, those over the longest way first."""
    places: dict[TensorValue, list[int]] = {}
    for place, operation in enumerate(operations):
        for operand in operation.inputs:
            tensor = source_of(operand.view.tensor)
            if not tensor.parameter and operation.kind == "contraction":
                places.setdefault(tensor, []).append(place)
    ways = {tensor: read[-1] - read[0] for tensor, read in places.items()}
    far = [tensor for tensor, way in ways.items() if way * FAR_SHARE >= len(operations)]
    return sorted(far, key=lambda tensor: -ways[tensor])[:FAR_MAX]


def _connected(operations: Sequence[Operation], uses: Uses) -> list[list[Operation]]:
    """Return operators of one stage that hang together, in order."""
    part: dict[Operation, list[Operation]] = {operation: [operation] for operation in operations}
    for operation in operations:
        for tensor in operation.outputs:
            for reader in uses.readers.get(tensor, ()):
                if reader.stage == operation.stage and part[reader] is not part[operation]:
                    larger, smaller = sorted((part[reader], part[operation]), key=len, reverse=True)
                    larger += smaller
                    for each in smaller:
                        part[each] = larger
    order = {operation: place for place, operation in enumerate(operations)}
    distinct = {id(members): members for members in part.values()}
    return [sorted(members, key=order.__getitem__) for members in distinct.values()]


def _repeated(pieces: Sequence[list[Operation]], uses: Uses) -> Groups:
    """Return groups of pieces that follow each other, each with the number of groups that are like it."""
    signatures = [signature(piece, uses) for piece in pieces]
    found: Groups = []
    place = 0
    while place < len(pieces):
        count, period = max(
            ((_times(signatures, place, period), -period) for period in range(1, PERIOD_MAX + 1)),
            key=lambda pair: (pair[0] > 1) * pair[0] * -pair[1],
        )
        period = -period if count > 1 else 1
        groups = [list(pieces[place + i * period : place + (i + 1) * period]) for i in range(count if count > 1 else 1)]
        if count > 1:
            before = _alike_before(found, [o for piece in groups[0] for o in piece], uses)
            if before:
                groups.insert(0, [piece for _, group in found[-before:] for piece in group])
                del found[-before:]
        found += [(len(groups), group) for group in groups]
        place += period * max(count, 1) if count > 1 else 1
    return found


def _times(signatures: Sequence[Any], place: int, period: int) -> int:
    """Return how often a number of signatures repeats from a place on."""
    first = signatures[place : place + period]
    count = 0
    while len(first) == period and signatures[place + count * period : place + (count + 1) * period] == first:
        count += 1
    return count


def _alike_before(found: Groups, cut: Sequence[Operation], uses: Uses) -> int:
    """Return how many of the last single groups make one more of a region: what is cut more finely at the beginning."""
    wanted = signature(cut, uses)
    operations: list[Operation] = []
    for number in range(1, min(len(found), PERIOD_MAX) + 1):
        count, group = found[-number]
        if count > 1:
            return 0
        operations = [operation for piece in group for operation in piece] + operations
        if len(operations) > len(cut):
            return 0
        if signature(operations, uses) == wanted:
            return number
    return 0


def signature(operations: Sequence[Operation], uses: Uses) -> Any:
    """Return what equal regions have in common: all but which tensors they read."""
    tensors: dict[TensorValue, int] = {}
    axes: dict[Axis, int] = {}

    def numbered(some: Iterable[Axis]) -> tuple[tuple[int, int], ...]:
        return tuple((axes.setdefault(axis, len(axes)), axis.extent) for axis in some)

    def dims_of(tensor: TensorValue) -> Any:
        return tuple(numbered(whole(dim)) for dim in tensor.dims if dim)  # extents of 1 are nothing to a kernel

    made = {tensor for operation in operations for tensor in operation.outputs}
    found = []
    for operation in operations:
        operands = []
        for operand in operation.inputs:
            tensor = operand.view.tensor
            fixed = tuple((axes.setdefault(axis, len(axes)), at) for axis, at in fixed_of(operand.view.fixed).items())
            renamed = tuple((numbered(whole([a])), numbered(whole([b]))) for a, b in operand.renamed)
            role = "made" if tensor in made else "parameter" if tensor.parameter else "given"
            operands.append((tensors.setdefault(tensor, len(tensors)), role, tensor.dtype, dims_of(tensor), fixed,
                             renamed))  # fmt: skip
        results = tuple((tensors.setdefault(tensor, len(tensors)), dims_of(tensor)) for tensor in operation.outputs)
        found.append((operation.kind, _attributes(operation.attributes, numbered), tuple(operands), results))
    return tuple(found), tuple(tensors[tensor] for tensor in uses.cut(operations).results)


def _attributes(attributes: Mapping[str, Scalar | Axis], numbered: Any) -> Any:
    return tuple(
        (name, numbered(whole([value])) if isinstance(value, Axis) else value) for name, value in attributes.items()
    )
