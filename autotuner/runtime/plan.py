"""Where every tensor of a configuration lies, and which steps which gradient needs. Nothing here runs.

A place is a tensor in one form: a conversion makes a second place of the same tensor. Places that must lie one behind
the other, or as slices of one stack, share a buffer. Buffers that nobody sees from outside share one arena, and there
the bytes of those that are never needed at the same time.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Literal

from autotuner.configuration import Configuration, Step
from autotuner.errors import ConfigurationError
from autotuner.fusion import stack_families
from autotuner.graph import ELEMENT_BYTES, Graph
from autotuner.kernels.canonical import canonical
from autotuner.layout import STACK_AXIS, Form
from autotuner.records import Call
from autotuner.runtime.port import Geometry, Port, geometry
from autotuner.space import given_forms

ALIGNMENT_BYTES = 64

Place = tuple[str, str]
"""A tensor's name and the text of a form, in the tensor's own axes."""

Role = Literal["parameter", "arena", "output"]


@dataclass(frozen=True)
class PlannedStep:
    """A kernel call with the places of its operands in boundary order, None for an absent one."""

    call: Call
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | None, ...]
    phase: str


@dataclass(frozen=True)
class Buffer:
    """Memory of one place or of several that lie in a fixed distance.

    Args:
        role: "parameter" comes from outside, "output" is handed out, "arena" is neither.
        phase: in which an output is made.
        dtype: as torch names it.
        elements: its length.
        offsets: of each place's first element, in elements.
        start_bytes: where it begins in the arena.
    """

    role: Role
    phase: str
    dtype: str
    elements: int
    offsets: Mapping[Place, int]
    start_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.elements * element_bytes(self.dtype)


@dataclass(frozen=True)
class Plan:
    """What a configuration needs to run: steps over places, buffers, and who is handed in and out.

    `inputs`, `given` (gradients of the outputs), `outputs` and `parameters` map tensor names to places.
    """

    graph: Graph
    steps: tuple[PlannedStep, ...]
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    inputs: Mapping[str, Place]
    given: Mapping[str, Place]
    outputs: Mapping[str, Place]
    parameters: Mapping[str, Place]

    @cached_property
    def buffer_of(self) -> dict[Place, int]:
        return {place: number for number, buffer in enumerate(self.buffers) for place in buffer.offsets}

    @cached_property
    def handed_out_and_read(self) -> bool:
        """Whether backward reads what forward hands out, so that it must be handed out as a copy."""
        shared = {p for b in self.buffers if b.role == "output" and b.phase == "forward" for p in b.offsets}
        return any(place in shared for step in self.steps if step.phase == "backward" for place in step.inputs)

    def shape(self, place: Place) -> tuple[int, ...]:
        return self.graph.shape(place[0])

    def strides(self, place: Place) -> tuple[int, ...]:
        return Form.parse(place[1]).placed(self.graph.tensors[place[0]].axes, self.shape(place))[0]

    def geometry(self, port: Port, of: str = "") -> Geometry:
        """Return how a port's tensor lies in its buffer.

        Args:
            port: members by name and how outsiders see them.
            of: put before the members' names: "grad_" for a port's gradient.

        Raises:
            ConfigurationError: no strides show the members as the port wants them.
        """
        known = {**self.inputs, **self.given, **self.outputs, **self.parameters}
        places = [known[of + member] for member in port.members]
        number = self.buffer_of[places[0]]
        if any(self.buffer_of[place] != number for place in places):
            raise ConfigurationError(f"{port.name}: {[p[0] for p in places]} lie in several buffers, not in one")
        offsets = [self.buffers[number].offsets[place] for place in places]
        axes = self.graph.tensors[places[0][0]].axes
        steps = [dict(zip(axes, self.strides(place), strict=True)) for place in places]
        return geometry(port, number, offsets, steps, dict(zip(axes, self.shape(places[0]), strict=True)))

    def needed(self, wanted: Collection[str]) -> frozenset[int]:
        """Return the numbers of the backward steps that the wanted outputs need."""
        places = {self.outputs[name] for name in wanted}
        kept = set()
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            if step.phase == "backward" and places & set(step.outputs):
                kept.add(number)
                places |= {place for place in step.inputs if place is not None}
        return frozenset(kept)


def element_bytes(dtype: str) -> int:
    return 1 if dtype == "bool" else ELEMENT_BYTES[dtype]


def make_plan(configuration: Configuration, together: Iterable[tuple[str, ...]] = ()) -> Plan:
    """Decide where every tensor lies.

    Args:
        configuration: steps in an order in which they can run, forward ones first.
        together: parameters that the framework keeps in one tensor; they and their gradients lie in one buffer.

    Raises:
        ConfigurationError: a step reads what nothing makes, or places are asked to lie in ways that exclude each other.
    """
    return _Planning(configuration, tuple(together)).plan()


class _Planning:
    def __init__(self, configuration: Configuration, together: Sequence[tuple[str, ...]]) -> None:
        self.configuration = configuration
        self.together = together
        self.graph = configuration.graph()
        self.given_forms = given_forms(self.graph, stack_families(self.graph))
        self.forward = sum(step.phase == "forward" for step in configuration.steps)
        self.followers: dict[Place, Place] = {}

    def plan(self) -> Plan:
        phases = [step.phase for step in self.configuration.steps]
        if phases != sorted(phases, reverse=True):
            raise ConfigurationError("a forward step comes after a backward one; forward steps come first")
        made = self._made()
        parameters = self._parameters(made)
        outputs = self._outputs(made, parameters)
        steps = tuple(self._step(step) for step in self.configuration.steps)
        for group in self.together:
            self._keep_together([parameters[name] for name in group])
            self._keep_together([outputs[f"grad_{name}"] for name in group if f"grad_{name}" in outputs])
        lives = self._lives(steps, made)
        buffers, arena_bytes = self._buffers(lives, set(outputs.values()), set(parameters.values()))
        outside = [name for name, tensor in self.graph.tensors.items() if tensor.role == "input"]
        return Plan(
            self.graph,
            steps,
            buffers,
            arena_bytes,
            {name: self._as_declared(name) for name in outside},
            {name: self._as_declared(name) for name in self.graph.given_gradients},
            outputs,
            parameters,
        )

    def _as_declared(self, name: str) -> Place:
        return name, self.graph.tensors[name].axes

    def _made(self) -> dict[Place, int]:
        """Return when each place is made: 0 from outside, then one tick per step and one for the given gradients."""
        made: dict[Place, int] = {}
        for number, step in enumerate(self.configuration.steps):
            for place in step.outputs:
                if place in made:
                    raise ConfigurationError(f"tensor {place[0]!r} is made twice in form {place[1]}")
                if place[1] != "absent":
                    made[place] = self._tick(number)
        for name, tensor in self.graph.tensors.items():
            if tensor.role == "input":
                made[self._as_declared(name)] = 0
        for name in self.graph.given_gradients:
            made[self._as_declared(name)] = self.forward + 1
        return made

    def _tick(self, number: int) -> int:
        return number + 1 if number < self.forward else number + 2

    @property
    def _end(self) -> int:
        return self._tick(len(self.configuration.steps))

    def _parameters(self, made: Mapping[Place, int]) -> dict[str, Place]:
        """Return the form in which each parameter is stored: the one that is read and that no step makes."""
        found: dict[str, Place] = {}
        for step in self.configuration.steps:
            for place in step.inputs:
                if self.graph.tensors[place[0]].role == "parameter" and place not in made:
                    if found.setdefault(place[0], place) != place:
                        raise ConfigurationError(
                            f"parameter {place[0]!r} is read in forms {found[place[0]][1]} and {place[1]}, "
                            "and no step makes either; it can be stored in one only"
                        )
                    if place[1] not in self.given_forms[place[0]]:
                        raise ConfigurationError(
                            f"parameter {place[0]!r} cannot be stored as {place[1]}; "
                            f"it can as {', '.join(self.given_forms[place[0]])}"
                        )
        missing = [n for n, t in self.graph.tensors.items() if t.role == "parameter" and n not in found]
        if missing:
            raise ConfigurationError(f"no step reads parameter {missing[0]!r} as it is stored")
        return found

    def _outputs(self, made: Mapping[Place, int], parameters: Mapping[str, Place]) -> dict[str, Place]:
        """Return the place of each output: gradients lie as their parameters do."""
        found = {}
        for name in self.graph.outputs:
            parameter = name.removeprefix("grad_")
            index = 0
            if parameter != name and parameter in parameters:
                index = self.given_forms[parameter].index(parameters[parameter][1])
            found[name] = (name, self.given_forms[name][index])
            if found[name] not in made:
                raise ConfigurationError(f"no step makes output {name!r} in form {found[name][1]}")
        return found

    def _step(self, step: Step) -> PlannedStep:
        operands = (*step.inputs, *step.outputs)
        slices: dict[str, str] = {}
        for group in step.adjacent:
            places = [place for name in group for place in operands if place[0] == name]
            if len(places) != len(group):
                raise ConfigurationError(f"{step.kernel}: it does not have all of {group} as operands")
            self._link(places)
            slices |= {name: f"@{index}/{len(group)}" for index, name in enumerate(group)}
        call = step.call(self.graph)
        forms = tuple(
            f"{STACK_AXIS}{text}{slices[name]}" if name in slices and STACK_AXIS not in text else text
            for (name, _), text in zip(operands, call.candidate.forms, strict=True)
        )
        call = canonical(call.subgraph, replace(call.candidate, forms=forms))
        inputs, outputs = (
            tuple(place if place[1] != "absent" else None for place in side) for side in (step.inputs, step.outputs)
        )
        return PlannedStep(call, inputs, outputs, step.phase)

    def _keep_together(self, places: Sequence[Place]) -> None:
        stacks = {Form.parse(text).stack and text.partition("#")[2] for _, text in places}
        if stacks == {None}:
            self._link(places)
        elif len(stacks) > 1 or None in stacks:
            raise ConfigurationError(f"{[str(p) for p in places]} must be stored alike: they are one tensor outside")

    def _link(self, places: Sequence[Place]) -> None:
        """Ask for dense places to lie one behind the other."""
        for first, second in pairwise(places):
            taken = [a for a, b in self.followers.items() if b == second and a != first]
            if taken or self.followers.get(first, second) != second or first in self._behind(second):
                raise ConfigurationError(
                    f"{second[0]!r} cannot lie right behind {first[0]!r}: another step asks for another order"
                )
            self.followers[first] = second

    def _behind(self, place: Place) -> list[Place]:
        """Return a place and those that lie behind it, in order."""
        found = [place]
        while found[-1] in self.followers:
            found.append(self.followers[found[-1]])
        return found

    def _lives(self, steps: Sequence[PlannedStep], made: Mapping[Place, int]) -> dict[Place, tuple[int, int]]:
        """Return each place's first and last tick. What backward reads of forward stays to the end: backward may run
        again."""
        lives = {place: (tick, tick) for place, tick in made.items()}
        for number, step in enumerate(steps):
            for place in step.inputs:
                if place is None:
                    continue
                if place not in lives:
                    if self.graph.tensors[place[0]].role != "parameter":
                        raise ConfigurationError(f"a step reads {place[0]!r} as {place[1]}, which no step makes")
                    lives[place] = (0, self._end)
                first, last = lives[place]
                now = self._tick(number)
                if now <= first:
                    raise ConfigurationError(f"a step reads {place[0]!r} as {place[1]} before it is made")
                kept = first <= self.forward < now
                lives[place] = (first, self._end if kept else max(last, now))
        return lives

    def _groups(self, places: Collection[Place]) -> Iterator[tuple[dict[Place, int], int]]:
        """Yield places that share a buffer, with offsets, and the buffer's length, in elements."""
        stacks: dict[tuple[str, str, str], dict[Place, int]] = {}
        lengths: dict[tuple[str, str, str], int] = {}
        behind = set(self.followers.values())
        for place in places:
            tensor = self.graph.tensors[place[0]]
            form = Form.parse(place[1])
            _, offset, length = form.placed(tensor.axes, self.graph.shape(place[0]))
            if form.stack:
                key = (form.stack.group, form.layout.axes, form.storage)
                stacks.setdefault(key, {})[place] = offset
                if lengths.setdefault(key, length) != length:
                    raise ConfigurationError(f"slices of stack {form.stack.group} differ in their extents")
            elif place not in behind:
                chain: dict[Place, int] = {}
                end = 0
                for link in self._behind(place):
                    chain[link] = end
                    end += prod(self.graph.shape(link[0]))
                yield chain, end
        for key, offsets in stacks.items():
            yield offsets, lengths[key]

    def _buffers(
        self, lives: Mapping[Place, tuple[int, int]], outputs: Collection[Place], parameters: Collection[Place]
    ) -> tuple[tuple[Buffer, ...], int]:
        buffers: list[Buffer] = []
        arena: list[tuple[Buffer, int, int]] = []
        for offsets, elements in self._groups(lives):
            names = [place[0] for place in offsets]
            dtypes = {"bool" if ":byte" in form else self.graph.tensors[name].dtype for name, form in offsets}
            if len(dtypes) > 1:
                raise ConfigurationError(f"{names} share a buffer and differ in their dtypes: {sorted(dtypes)}")
            phases = {"forward" if lives[p][0] <= self.forward else "backward" for p in offsets if p in outputs}
            stored = [place in parameters for place in offsets]
            if len(phases) > 1 or (any(stored) and not all(stored)):
                raise ConfigurationError(f"{names} share a buffer, but come from different sides of the graph")
            role: Role = "parameter" if all(stored) else "output" if phases else "arena"
            buffer = Buffer(role, min(phases, default=""), dtypes.pop(), elements, offsets)
            if role == "arena":
                arena.append((buffer, min(lives[p][0] for p in offsets), max(lives[p][1] for p in offsets)))
            else:
                buffers.append(buffer)
        placed, arena_bytes = _pack(arena)
        return (*buffers, *placed), arena_bytes


def _pack(wanted: Sequence[tuple[Buffer, int, int]]) -> tuple[list[Buffer], int]:
    """Give each buffer a start in one arena: the largest first, each into the tightest gap that is free while it lives.

    Returns the placed buffers and the arena's bytes.
    """
    placed: list[tuple[int, int, int, int]] = []
    done: list[Buffer] = []
    for buffer, first, last in sorted(wanted, key=lambda item: (-item[0].size_bytes, item[1])):
        size = -(-buffer.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        taken = sorted((start, end) for start, end, born, dead in placed if born <= last and first <= dead)
        gaps: list[tuple[int, int]] = []
        free = 0
        for start, end in taken:
            if start - free >= size:
                gaps.append((start - free, free))
            free = max(free, end)
        start = min(gaps)[1] if gaps else free
        placed.append((start, start + size, first, last))
        done.append(Buffer(buffer.role, buffer.phase, buffer.dtype, buffer.elements, buffer.offsets, start_bytes=start))
    return done, max((end for _, end, _, _ in placed), default=0)
