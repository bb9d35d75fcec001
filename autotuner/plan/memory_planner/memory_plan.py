"""Memory plan: the place of every tensor of a configuration, the steps that a gradient needs, and the caller's view.

A port is a tensor as the caller sees it, over tensors of the graph. The framework's `in_proj_weight` (3h, h) is a port
over query_weight, key_weight and value_weight with dimensions "np" and "h": axes n and p act as one, and the three lie
one behind the other along the first dimension.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Literal

from autotuner.errors import ConfigurationError
from autotuner.ir.form import Form, Stored
from autotuner.ir.formats import STORAGE_BYTES
from autotuner.ir.graph import Graph
from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.records import Call
from autotuner.plan.memory_planner.schedule import Schedule, tick_of
from autotuner.plan.step import tensor_of

Place = tuple[str, str]
"""The name of a tensor, or of its second instance "again <tensor>", and the text of a form in the tensor's own axes."""

Role = Literal["parameter", "input", "arena", "output"]


@dataclass(frozen=True)
class Port:
    """A tensor at the boundary.

    Args:
        name: the caller's name for it ("self_attn.in_proj_weight").
        members: the graph's tensors, in order along the first dimension.
        dims: the axes that make up each of its dimensions.
    """

    name: str
    members: tuple[str, ...]
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Geometry:
    """Memory of a port's tensor: buffer number, offset in it, shape and strides, in elements."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def geometry(
    port: Port, buffer: int, offsets: Sequence[int], steps: Sequence[Mapping[str, int]], extents: Mapping[str, int]
) -> Geometry:
    """Return how a port lies, from its members' offsets and strides by axis.

    Raises:
        ConfigurationError: axes of one dimension do not act as one, or the members do not lie at equal distances.
    """
    shape, strides = [], []
    for axes in port.dims:
        wide = [axis for axis in axes if extents[axis] > 1]
        for slow, fast in pairwise(wide):
            if steps[0][slow] != steps[0][fast] * extents[fast]:
                raise ConfigurationError(f"{port.name}: axes {axes!r} do not act as one dimension with {steps[0]}")
        shape.append(prod(extents[axis] for axis in axes))
        strides.append(steps[0][wide[-1] if wide else axes[-1]])
    pitch = shape[0] * strides[0]
    if len(offsets) > 1 and shape[0] == 1:
        pitch = strides[0] = offsets[1] - offsets[0]
    if [*offsets] != [offsets[0] + pitch * i for i in range(len(offsets))] or any(s != steps[0] for s in steps):
        raise ConfigurationError(f"{port.name}: {port.members} lie at {[*offsets]}, not {pitch} elements apart")
    shape[0] *= len(offsets)
    return Geometry(buffer, offsets[0], tuple(shape), tuple(strides))


@dataclass(frozen=True)
class Ports:
    """A graph's boundary as its caller sees it.

    Args:
        inputs: what is handed in before forward, each copied into memory of the plan.
        given: gradients that are handed in before backward, likewise.
        outputs: what forward hands out.
        sources: inputs and parameters whose gradients backward hands out, in this order.
        shown: tensors inside, of which forward hands out copies as well, and of which gradients are handed in as well.
    """

    inputs: tuple[Port, ...]
    given: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sources: tuple[Port, ...]
    shown: tuple[Port, ...] = ()


@dataclass(frozen=True)
class PlannedStep:
    """A kernel call with the places of its operands in boundary order, None for an absent one.

    Args:
        name: its operators and kernel, in words.
    """

    call: Call
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | None, ...]
    phase: str
    name: str = ""


@dataclass(frozen=True)
class PlannedBuffer:
    """Memory of one place or of several that lie in a fixed distance.

    Args:
        role: "parameter" and "input" come from outside, "output" is handed out, "arena" is all else. Inputs have memory
            of their own in plans that lie apart, and are in the arena in others.
        phase: in which an output is made.
        dtype: as torch names it.
        elements: its length.
        offsets: of each place's first element, in elements.
        first, last: ticks from which and up to which it is needed; see `MemoryPlan.tick`.
        start_bytes: where it begins in the arena.
    """

    role: Role
    phase: str
    dtype: str
    elements: int
    offsets: Mapping[Place, int]
    first: int
    last: int
    start_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.elements * element_bytes(self.dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory plan of a configuration: steps over places, buffers, and who is handed in and out.

    `inputs`, `given` (gradients of the outputs), `outputs` and `parameters` map tensor names to places. What may run at
    the same time by the `schedule` shares no memory. No buffer of the arena that begins at `kept_bytes` or behind is
    needed both before and after the boundary.
    """

    graph: Graph
    steps: tuple[PlannedStep, ...]
    buffers: tuple[PlannedBuffer, ...]
    arena_bytes: int
    inputs: Mapping[str, Place]
    given: Mapping[str, Place]
    outputs: Mapping[str, Place]
    parameters: Mapping[str, Place]
    schedule: Schedule
    kept_bytes: int

    @cached_property
    def forward(self) -> int:
        """Number of forward steps; they come first."""
        return sum(step.phase == "forward" for step in self.steps)

    @property
    def boundary(self) -> int:
        """The tick between forward and backward, at which gradients of the outputs are handed in."""
        return self.forward + 1

    def tick(self, number: int) -> int:
        """Return when a step runs: inputs are handed in at 0, each step has a tick, and `boundary` lies between."""
        return tick_of(number, self.forward)

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Numbers of the arena's buffers that forward leaves for backward."""
        return tuple(
            number for number, buffer in enumerate(self.buffers)
            if buffer.role == "arena" and buffer.first < self.boundary < buffer.last
        )  # fmt: skip

    @cached_property
    def buffer_of(self) -> dict[Place, int]:
        return {place: number for number, buffer in enumerate(self.buffers) for place in buffer.offsets}

    @cached_property
    def held_outputs(self) -> frozenset[int]:
        """Numbers of the buffers that forward hands out and backward reads, so that a copy must be handed out."""
        return frozenset(
            number for number, buffer in enumerate(self.buffers)
            if buffer.role == "output" and buffer.phase == "forward" and buffer.last > self.boundary
        )  # fmt: skip

    def stored(self, place: Place) -> Stored:
        return stored(self.graph, place)

    def shape(self, place: Place) -> tuple[int, ...]:
        return self.stored(place).extents

    def strides(self, place: Place) -> tuple[int, ...]:
        return self.stored(place).strides

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

    @cached_property
    def read_again(self) -> frozenset[str]:
        """Names of the inputs that backward reads."""
        read = {place for step in self.steps if step.phase == "backward" for place in step.inputs}
        return frozenset(name for name, place in self.inputs.items() if place in read)

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


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a training step beside its parameters and inputs.

    Args:
        held_bytes: what forward leaves for backward, staged copies of inputs among it.
        arena_bytes: one allocation for all that nobody sees from outside, for as long as the layer's module lives.
        outputs_bytes: what is handed out, output and gradients. It stays allocated for the next step.
        workspace_bytes: the most that one kernel allocates while it runs.
    """

    held_bytes: int
    arena_bytes: int
    outputs_bytes: int
    workspace_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at any time of a second step, when nothing of the first is held any more."""
        return self.arena_bytes + self.outputs_bytes + self.workspace_bytes


def memory(plan: MemoryPlan, workspaces: Mapping[str, int] | None = None) -> StepMemory:
    """Predict what the runtime allocates for a plan.

    An output that backward reads is handed out as a copy, so it counts twice. What a kernel keeps from step to step
    (vectors of ones) counts as its workspace.

    Args:
        plan: where everything lies.
        workspaces: bytes that a call allocates at most while it runs, by its key; a call that is missing has 0.
    """
    outputs = [buffer for buffer in plan.buffers if buffer.role == "output"]
    held = [plan.buffers[number] for number in plan.held_outputs]
    return StepMemory(
        held_bytes=sum(buffer.size_bytes for buffer in (*(plan.buffers[i] for i in plan.saved), *held)),
        arena_bytes=plan.arena_bytes,
        outputs_bytes=sum(buffer.size_bytes for buffer in (*outputs, *held)),
        workspace_bytes=max(((workspaces or {}).get(step.call.key, 0) for step in plan.steps), default=0),
    )


def stored(graph: Graph, place: Place) -> Stored:
    """Return what memory holds of a place."""
    tensor = graph.tensors[tensor_of(place[0])]
    return Form.parse(place[1]).stored(tensor.dtype, tensor.axes, graph.shape(tensor.name))


def element_bytes(dtype: str) -> int:
    return STORAGE_BYTES[dtype] if dtype in STORAGE_BYTES else ELEMENT_BYTES[dtype]
