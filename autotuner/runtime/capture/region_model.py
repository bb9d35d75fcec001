"""A region as a model: the operators with letters for axes, and where its operands come from."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autotuner.errors import AutotunerError, GraphError
from autotuner.ir.autodiff import without_gradient
from autotuner.ir.kinds import KINDS
from autotuner.ir.models import Model, ModelFile
from autotuner.ir.models.model import CAPTURED
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.programmed import WITH_SHAPES
from autotuner.ir.records import digest
from autotuner.plan.memory_planner import Port
from autotuner.runtime.capture.axes import Axis, UnknownError, are_neighbours, whole
from autotuner.runtime.capture.letters import LETTERS_FIRST, LETTERS_MAX, Letters, LettersError
from autotuner.runtime.capture.program import (
    BoundView,
    Operation,
    Taken,
    TensorValue,
    View,
    renaming,
    source_of,
    taken_of,
)
from autotuner.runtime.capture.reader import learned
from autotuner.runtime.capture.regions import Cut
from autotuner.runtime.capture.side_by_side import Run, runs_of


@dataclass(frozen=True, eq=False)
class Source:
    """Origin of an operand of a region: a tensor, at fixed places, as dimensions over what is left."""

    tensor: TensorValue
    fixed: Mapping[Axis, int]
    dims: tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True, eq=False)
class Result:
    """A tensor that a region makes, at fixed places, with the dimensions in which it is handed out."""

    tensor: TensorValue
    fixed: frozenset[tuple[Axis, int]]
    dims: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class Region:
    """A region that can be tuned: its model, and its boundary.

    Args:
        operators: those of the region, by the first tensor that each makes in the model.
        inputs, parameters, outputs: as the caller sees them; `sources` are of inputs and then of parameters, and
            `results` of outputs. Outputs are those of the model, and behind them what the region shows beside.
    """

    cut: Cut
    model: Model
    operators: Mapping[str, Operation]
    inputs: tuple[Port, ...]
    parameters: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sources: tuple[Source, ...]
    results: tuple[Result, ...]

    @property
    def key(self) -> str:
        """The same for equal regions."""
        return digest([self.model.to_json(), [[port.name, *port.dims] for port in (*self.inputs, *self.parameters)]])


def region_of(cut: Cut) -> Region:
    """Return what was cut out as a region.

    Raises:
        UnknownError: it has more axes than there are letters, or cannot be said in them.
    """
    for is_short in (False, True):
        with suppress(LettersError):
            return _Writing(cut, is_short).region()
    return _Writing(cut, is_short=True, count=LETTERS_MAX).region()


class _Writing:
    def __init__(self, cut: Cut, is_short: bool = False, count: int = LETTERS_FIRST) -> None:
        self.cut = cut
        self.inside = {tensor for operation in cut.operations for tensor in operation.outputs}
        self.letters = Letters(_merged(cut.operations, is_short), count)
        self.names: dict[Taken, str] = {}
        self.sources: dict[str, Source] = {}
        self.dtypes: dict[str, str] = {}
        self.casts: dict[tuple[str, str], str] = {}
        self.counts: dict[str, int] = {}
        self.wanted: dict[Operation, list[frozenset[tuple[Axis, int]]]] = {}

    def region(self) -> Region:
        for tensor in self.cut.results:
            self._want(tensor, frozenset())
        self.letters.runs = self._runs()
        entries = [
            self._entry(operation, fixed) for operation, fixed in self._made() if not self._is_made(operation, fixed)
        ]
        inputs = [name for name, source in self.sources.items() if not source.tensor.parameter]
        parameters = [name for name, source in self.sources.items() if source.tensor.parameter]
        results = tuple(self.names[tensor, frozenset()] for tensor in self.cut.results)
        shown = tuple(self.names[taken] for taken in self.cut.shown)
        model = self._model(entries, inputs, parameters, results)
        constant = _constants(model)
        if constant:
            inputs, parameters = inputs + constant, [name for name in parameters if name not in constant]
            model = self._model(entries, inputs, parameters, results)
        ports = {name: Port(name, (name,), self._dims(source.dims)) for name, source in self.sources.items()}
        made = tuple(Result(*taken, self.letters.dims(axes_left(taken))) for taken in self._handed_out())
        outputs = tuple(
            Port(name, (name,), self._dims(result.dims)) for name, result in zip((*results, *shown), made, strict=True)
        )
        return Region(
            self.cut,
            model,
            {self.names[operation.outputs[0], fixed]: operation for operation, fixed in reversed(tuple(self._made()))},
            tuple(ports[name] for name in inputs),
            tuple(ports[name] for name in parameters),
            outputs,
            tuple(self.sources[name] for name in (*inputs, *parameters)),
            made,
        )

    def _model(
        self, entries: list[dict[str, Any]], inputs: list[str], parameters: list[str], results: tuple[str, ...]
    ) -> Model:
        ((dtype, _),) = Counter(self.dtypes.values()).most_common(1)
        declared = {name: self._axes(source) for name, source in self.sources.items()}
        other = {name: {"dtype": own} if own != dtype else {} for name, own in self.dtypes.items()}
        extents = self.letters.extents()
        definition = {
            "version": 1,
            "name": "captured",
            "dtype": dtype,
            "axes": {letter: f"{elements} elements" for letter, elements in extents.items()},
            "inputs": {name: {"axes": declared[name], **other[name], **self._told(name)} for name in inputs},
            "parameters": {
                name: {"axes": declared[name], **other[name]} if other[name] else declared[name] for name in parameters
            },
            "operators": entries,
            "outputs": list(results),
        }
        definition["name"] = f"{CAPTURED}{digest([definition['operators'], definition['inputs']])[:8]}"
        try:
            file = ModelFile("a captured region", parse_definition(definition, "a captured region"))
            return file.instantiate(None, extents=extents, options={}, dtype=dtype)
        except AutotunerError as error:
            raise UnknownError(str(error)) from error

    def _want(self, tensor: TensorValue, fixed: frozenset[tuple[Axis, int]]) -> None:
        """Have a tensor made at fixed places, with all that it is made from."""
        waiting = [(tensor, fixed)]
        while waiting:  # each turn notes another operator and place, or goes no further
            tensor, fixed = waiting.pop()
            operation = tensor.made_by
            if tensor not in self.inside or operation is None or fixed in self.wanted.setdefault(operation, []):
                continue
            if fixed and not KINDS[operation.kind].placewise:
                raise UnknownError(f"a part is taken of what a {operation.kind} makes")
            self.wanted[operation].append(fixed)
            waiting += [(each.view.tensor, taken_of(each, dict(fixed))) for each in reversed(operation.inputs)]

    def _made(self) -> Iterator[tuple[Operation, frozenset[tuple[Axis, int]]]]:
        """Yield the region's operators in order, each for the places at which its results are wanted."""
        return ((each, fixed) for each in self.cut.operations for fixed in self.wanted.get(each, ()))

    def _handed_out(self) -> tuple[Taken, ...]:
        return (*((tensor, frozenset[tuple[Axis, int]]()) for tensor in self.cut.results), *self.cut.shown)

    def _runs(self) -> dict[Axis, Run]:
        """Return axes that need one letter between them, such as the parts of a head of which a program reads one.

        What torch makes has dimensions, and each has letters of its own; what regions make is handed over as it is.
        """
        lists = [axes_left(taken) for taken in self._handed_out()]
        alike: list[tuple[list[Axis], list[Axis]]] = []
        for operation, fixed in self._made():
            places = dict(fixed)
            lists += [whole([each]) for each in operation.attributes.values() if isinstance(each, Axis)]
            lists += [[axis for axis in _axes(tensor) if axis not in places] for tensor in operation.outputs]
            for operand in operation.inputs:
                tensor, taken = operand.view.tensor, taken_of(operand, places)
                lists += [] if tensor in self.inside or tensor.made_by else dims_left(tensor, dict(taken))
                alike.append((_bound(operand, places), axes_left((tensor, taken))))
        stand_for = self.letters.stand_for
        pairs = {pair for each in (*lists, *(each for both in alike for each in both)) for pair in pairwise(each)}
        joint = (stand_for(pair) for pair in pairs if are_neighbours(*pair))
        neighbours = {(one, other) for one, other in joint}
        return runs_of(map(stand_for, lists), [(stand_for(one), stand_for(other)) for one, other in alike], neighbours)

    def _is_made(self, operation: Operation, fixed: frozenset[tuple[Axis, int]]) -> bool:
        """Say whether a cast is equal to an earlier one, whose result then has both names; results stay their own."""
        (tensor,) = operation.outputs[:1]
        if operation.kind != "cast" or tensor in self.cut.results:
            return False
        (operand,) = operation.inputs
        read = self.names.get((operand.view.tensor, taken_of(operand, dict(fixed))))
        made = self.casts.get((read or "", tensor.dtype))
        if made is not None:
            self.names[tensor, fixed] = made
        return made is not None

    def _entry(self, operation: Operation, fixed: frozenset[tuple[Axis, int]]) -> dict[str, Any]:
        places = dict(fixed)
        stem = KINDS[operation.kind].stem or operation.kind
        count = self.counts[stem] = self.counts.get(stem, 0) + 1
        name = f"{stem}_{count}"
        given = [
            (operand, self._operand(operation, operand, places, f"{name}_{self._role(operation, number)}"))
            for number, operand in enumerate(operation.inputs)
        ]
        read = [self.letters(_bound(operand, places)) for operand, _ in given]
        makes = [name, *(f"{name}_{each}" for each in KINDS[operation.kind].statistics)]
        made = []
        for number, tensor in enumerate(operation.outputs):
            axes = [axis for axis in _axes(tensor) if axis not in places]
            made.append(self.letters(axes))
            if len(set(made[-1])) < len(made[-1]):
                raise UnknownError(f"{name} would have one axis twice")
            self.names[tensor, fixed] = makes[number]
        if operation.kind == "cast":
            self.casts[given[0][1], operation.outputs[0].dtype] = name
        attributes = {
            key: self.letters(whole([value])) if isinstance(value, Axis) else value
            for key, value in operation.attributes.items()
        }
        return {
            "name": name,
            "kind": operation.kind,
            "spec": f"{','.join(read)}->{','.join(made)}",
            "inputs": [tensor for _, tensor in given],
            "outputs": makes[: len(operation.outputs)],
            "attributes": attributes,
        }

    def _role(self, operation: Operation, number: int) -> str:
        """Return what an operator calls an operand; a cast, what the first reader of its result calls that."""
        if operation.kind == "cast":
            (made,) = operation.outputs
            readers = (
                (o, n) for o in self.cut.operations for n, read in enumerate(o.inputs) if read.view.tensor is made
            )
            operation, number = next(readers, (operation, number))
        return KINDS[operation.kind].roles.get(number, "input")

    def _operand(self, operation: Operation, operand: BoundView, places: Mapping[Axis, int], name: str) -> str:
        """Return the name of the tensor that an operator reads; one from outside gets a name here."""
        tensor = operand.view.tensor
        taken = tensor, taken_of(operand, places)
        if taken not in self.names:
            if tensor in self.inside:
                raise UnknownError("it reads what is made later")
            if not self.sources:
                name = "x"
            while name in self.sources:
                name += "_too"
            fixed = dict(taken[1])
            self.names[taken] = name
            self.dtypes[name] = tensor.dtype if tensor.dtype != "bool" else operation.outputs[0].dtype
            made = self.letters.dims(axes_left(taken)) if tensor.made_by else map(tuple, dims_left(tensor, fixed))
            self.sources[name] = Source(tensor, fixed, tuple(made))
        return self.names[taken]

    def _told(self, name: str) -> dict[str, bool]:
        """Say of a relative bias that is data, as ALiBi is, that it needs no gradient, which takes its own kernel."""
        tensor = self.sources[name].tensor
        is_bias = any(
            operation.kind == "packed_attention" and self._role(operation, number) == "bias"
            for operation in self.cut.operations
            for number, operand in enumerate(operation.inputs)
            if operand.view.tensor is tensor
        )
        return {"requires_grad": False} if is_bias and not learned(View(tensor, tensor.dims)) else {}

    def _axes(self, source: Source) -> str:
        return self.letters(axis for dim in source.dims for axis in dim) if source.dims else ""

    def _dims(self, dims: Iterable[Sequence[Axis]]) -> tuple[str, ...]:
        return tuple(self.letters(dim) for dim in dims if dim)


def _constants(model: Model) -> list[str]:
    """Return the parameters of a model that no gradient reaches; none where it has no gradients at all."""
    try:
        return without_gradient(model.graph())
    except GraphError:
        return []


def _merged(operations: Sequence[Operation], is_short: bool = False) -> dict[Axis, Axis]:
    """Return axes that can have one letter, each with the one that stands for it.

    These are axes that some operator binds to each other, such as the features that go into a layer and those that come
    out of it and are added, unless an operator or a tensor has both. So can be axes at one place of weights that one
    tensor is multiplied with, such as the features of a query's head and of a value's: the products are siblings.

    Where letters are short, so can be axes of programs alone, to which only extents matter, and others of one extent.
    """
    together: list[set[Axis]] = []
    pairs: list[tuple[Axis, Axis]] = []
    for operation in operations:
        bound = {axis for operand in operation.inputs for axis in _bound(operand, {})}
        together.append(bound.union(*(_axes(tensor) for tensor in operation.outputs)))
        together += [set(_axes(operand.view.tensor)) for operand in operation.inputs]
        pairs += [pair for operand in operation.inputs for pair in renaming(operand).items()]
    pairs += _of_siblings(operations)
    pairs += _of_programs(operations) if is_short else ()
    stands: dict[Axis, Axis] = {}
    for one, other in pairs:
        first, second = stands.get(one, one), stands.get(other, other)
        if first is second or any({first, second} <= each for each in together):
            continue
        stands |= {axis: second for axis, known in stands.items() if known is first} | {first: second}
        together = [{second if axis is first else axis for axis in each} for each in together]
    return stands


def _of_programs(operations: Iterable[Operation]) -> Iterator[tuple[Axis, Axis]]:
    """Yield axes that no operators but programs have, each with all others of its extent."""
    seen: dict[Axis, bool] = {}  # whether only programs have it
    for operation in operations:
        bound = [axis for operand in operation.inputs for axis in _bound(operand, {})]
        for axis in (*bound, *(axis for tensor in operation.outputs for axis in _axes(tensor))):
            seen[axis] = seen.get(axis, True) and operation.kind in WITH_SHAPES
    for place, axis in enumerate(seen):
        yield from ((axis, other) for other in list(seen)[:place] if seen[axis] and other.extent == axis.extent)


def _of_siblings(operations: Iterable[Operation]) -> Iterator[tuple[Axis, Axis]]:
    """Yield axes at one place of weights that products of one tensor have."""
    first: dict[tuple[TensorValue, tuple[int, ...]], list[Axis]] = {}
    for operation in operations:
        if operation.kind == "contraction" and source_of(operation.inputs[1].view.tensor).parameter:
            x, weight = operation.inputs
            axes = _bound(weight, {})
            shape = tuple(axis.extent for axis in axes)
            yield from zip(axes, first.setdefault((source_of(x.view.tensor), shape), axes), strict=True)


def dims_left(tensor: TensorValue, fixed: Collection[Axis]) -> list[list[Axis]]:
    """Return the dimensions of a tensor at fixed places along some axes, without those of one element."""
    dims = ([axis for axis in whole(dim) if axis not in fixed] for dim in tensor.dims)
    return [dim for dim in dims if dim]


def axes_left(taken: Taken) -> list[Axis]:
    """Return the axes of a tensor but for those along which one place is taken."""
    tensor, fixed = taken
    places = dict(fixed)
    return [axis for axis in _axes(tensor) if axis not in places]


def _axes(tensor: TensorValue) -> list[Axis]:
    return whole(axis for dim in tensor.dims for axis in dim)


def _bound(operand: BoundView, places: Mapping[Axis, int]) -> list[Axis]:
    """Return the axes that an operator binds to its operand's, in the order of the operand's memory."""
    names = renaming(operand)
    fixed = dict(taken_of(operand, places))
    return [names.get(axis, axis) for axis in _axes(operand.view.tensor) if axis not in fixed]
