"""Where every tensor of a configuration lies, and which steps which gradient needs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autotuner.errors import ConfigurationError
from autotuner.ir.form import STORAGE_BYTES, Form, Stored
from autotuner.ir.graph import Graph
from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.records import Call
from autotuner.plan.configuration import tensor_of
from autotuner.plan.placement.port import Geometry, Port, geometry

Place = tuple[str, str]
"""The name of a tensor, or of its second instance "again <tensor>", and the text of a form in the tensor's own axes."""

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
        first, last: ticks from which and up to which it is needed; see `Plan.tick`.
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
    def forward(self) -> int:
        """How many steps are forward ones; they come first."""
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
    def handed_out_and_read(self) -> bool:
        """Whether backward reads what forward hands out, so that it must be handed out as a copy."""
        shared = {p for b in self.buffers if b.role == "output" and b.phase == "forward" for p in b.offsets}
        return any(place in shared for step in self.steps if step.phase == "backward" for place in step.inputs)

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


def stored(graph: Graph, place: Place) -> Stored:
    """Return what memory holds of a place."""
    tensor = graph.tensors[tensor_of(place[0])]
    return Form.parse(place[1]).stored(tensor.dtype, tensor.axes, graph.shape(tensor.name))


def element_bytes(dtype: str) -> int:
    return STORAGE_BYTES[dtype] if dtype in STORAGE_BYTES else ELEMENT_BYTES[dtype]


def tick_of(number: int, forward: int) -> int:
    """Return when a step runs, after so many forward ones."""
    return number + 1 if number < forward else number + 2
