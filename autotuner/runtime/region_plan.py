"""The plan of a region: its memory, how the caller sees its tensors, and what its operator says about results."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from autotuner.errors import ConfigurationError
from autotuner.ir.graph import Graph
from autotuner.ir.matching import same_tensors
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Geometry, MemoryPlan, Port, Ports, make_plan
from autotuner.runtime.adapter import dtype_name
from autotuner.runtime.gradient_paths import unreached
from autotuner.runtime.gradient_stacks import stacks_of
from autotuner.runtime.region_operator import RegionResults, Strided
from autotuner.runtime.shown_tensors import shown_geometry, steps_that_make
from autotuner.runtime.state_memory import StateMemory


class MisfitError(RuntimeError):
    """A region was called with other inputs or parameters than it was tuned for."""


@dataclass(frozen=True)
class RegionPorts:
    """A region's boundary as its caller sees it. Each port has one member, but for parameters.

    Args:
        inputs: the model's inputs, in the caller's order.
        parameters: the model's parameters, in the caller's order; one of the caller's may be several of the model's.
        outputs: in the order of the model's outputs. Those behind them are tensors inside of the model that the caller
            wants to see; the configuration need not know of that.
    """

    inputs: tuple[Port, ...]
    parameters: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def of(self, graph: Graph, other: Graph) -> "RegionPorts":
        """Return the same ports over the tensors of another graph that computes the same.

        Raises:
            ConfigurationError: it does not.
        """
        same = same_tensors(graph, other)
        if same is None:
            raise ConfigurationError(f"{other.name} computes something else than {graph.name}")

        def port(of: Port) -> Port:
            first = of.members[0]
            letters = str.maketrans(graph.tensors[first].axes, other.tensors[same[first]].axes)
            members = tuple(same[member] for member in of.members)
            return Port(of.name, members, tuple(dim.translate(letters) for dim in of.dims))

        return RegionPorts(*(tuple(map(port, each)) for each in (self.inputs, self.parameters, self.outputs)))


class RegionPlan:
    """The memory plan of a region, and what its operator says about results; made once for all of its places.

    Attributes:
        expected: element type and shape of each input and of each parameter.
        results: what the compiler is told.
    """

    _made: ClassVar["WeakValueDictionary[tuple[int, RegionPorts, bool], RegionPlan]"] = WeakValueDictionary()

    def __init__(self, configuration: Configuration, ports: RegionPorts, *, apart: bool = False) -> None:
        """Plan memory; `apart`: so that regions which run one after the other can share a scratch.

        Raises:
            ConfigurationError: the ports are not those of the configuration's model, no strides show its tensors as
                they want them, or a kernel keeps what is shown to itself.
        """
        self.configuration, self.ports = configuration, ports
        together = [port.members for port in ports.parameters if len(port.members) > 1]
        self.memory: MemoryPlan = make_plan(configuration, together, apart=apart)
        self.device_type = str(configuration.environment["device_type"])
        self._check_ports()
        reached = tuple(port for port in ports.inputs if f"grad_{port.members[0]}" in self.memory.outputs)
        count = len(configuration.model.graph().outputs)
        outputs, shown = ports.outputs[:count], ports.outputs[count:]
        self.boundary = Ports(ports.inputs, outputs, outputs, (*reached, *ports.parameters), shown)
        for port in shown:
            self._check_shown(port)
        self.us = {
            phase: sum(step.predicted_us for step in configuration.steps if step.phase == phase)
            for phase in ("forward", "backward")
        }
        self.expected = [
            (port.name, getattr(torch, self._dtype(port)), self.memory.geometry(port).shape)
            for port in (*ports.inputs, *ports.parameters)
        ]
        self.results = RegionResults(
            outputs=(
                *(self._strided(port, self.memory.geometry(port)) for port in outputs),
                *(self._strided(port, shown_geometry(self.memory, port)) for port in shown),
            ),
            gradients=tuple(
                self._strided(port, self.memory.geometry(port, "grad_")) if port in reached else None
                for port in ports.inputs
            ),
            stacks=tuple(stacks_of([self.memory.geometry(port, "grad_") for port in ports.parameters])),
            unreached=self._unreached(),
            read_again=tuple(
                place for place, port in enumerate(ports.inputs) if port.members[0] in self.memory.read_again
            ),
            state_bytes=StateMemory.of(self.memory, self.device_type).size_bytes,
        )

    @classmethod
    def of(cls, configuration: Configuration, ports: RegionPorts, *, apart: bool = False) -> "RegionPlan":
        """Return the plan that another place with the same configuration has, or a new one."""
        key = (id(configuration), ports, apart)  # a plan holds its configuration, so no other one gets its id meanwhile
        found = cls._made.get(key)
        if found is None:
            found = cls._made[key] = cls(configuration, ports, apart=apart)
        return found

    @property
    def kept_bytes(self) -> int:
        """Bytes that forward leaves for backward, beside inputs, where regions share a scratch."""
        return StateMemory.of(self.memory, self.device_type).held_bytes + self.memory.kept_bytes

    def input_bytes(self, place: int) -> int:
        """Return the bytes of an input."""
        return self.memory.buffers[self.memory.geometry(self.ports.inputs[place]).buffer].size_bytes

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients that backward hands out."""
        buffers = self.memory.buffers
        return sum(each.size_bytes for each in buffers if each.role == "output" and each.phase == "backward")

    @property
    def outside_bytes(self) -> int:
        """Bytes of inputs, outputs and gradients, as far as they have memory of their own in a workspace."""
        return sum(each.size_bytes for each in self.memory.buffers if each.role in ("input", "output"))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of what one phase makes and reads itself, which regions can share."""
        return self.memory.arena_bytes - self.memory.kept_bytes

    def check(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], label: str, device: torch.device) -> None:
        """Check that inputs and parameters are what the region was tuned for, all on one device.

        Args:
            inputs: in the order of the ports.
            parameters: in the order of the ports; none of them where they are known to be right.
            label: of the region.
            device: where all of them have to be.

        Raises:
            MisfitError: one of them is not.
        """
        for (name, dtype, shape), tensor in zip(self.expected, (*inputs, *parameters), strict=False):
            if (
                tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.device != device
                or tensor.device.type != self.device_type
            ):
                given = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)} on {tensor.device}"
                at = self.device_type if device.type != self.device_type else device
                raise MisfitError(
                    f"{label}: {name} is {given}, and it was tuned for {dtype_name(dtype)} {shape} on {at}"
                )

    def _check_ports(self) -> None:
        graph = self.configuration.model.graph()
        roles = {"inputs": "input", "parameters": "parameter"}
        sides = {side: [n for n, t in graph.tensors.items() if t.role == role] for side, role in roles.items()}
        for side, names in (sides | {"outputs": list(graph.outputs)}).items():
            given = getattr(self.ports, side)[: len(names) if side == "outputs" else None]
            members = [member for port in given for member in port.members]
            if Counter(members) != Counter(names) or len(members) != len(set(members)):
                raise ConfigurationError(
                    f"a region's {side} are {', '.join(names) or 'none'}, each once, and ports were given for "
                    f"{', '.join(members) or 'none'}"
                )
            if side == "outputs" and members != names:
                raise ConfigurationError(f"a region's outputs are {names} in this order, and not {members}")
            for port in given:
                if len(port.members) != 1 and side != "parameters":
                    raise ConfigurationError(f"{port.name}: a region's port has one member, and not {port.members}")

    def _check_shown(self, port: Port) -> None:
        """Check that a caller can see a tensor, and that its gradient can be added to before anything reads the sum."""
        _, (number, (gradient, *_)) = steps_that_make(self.memory, port)
        members = self.configuration.steps[number].operators
        if any(gradient in operator.inputs for operator in self.memory.graph.operators if operator.name in members):
            raise ConfigurationError(f"{port.name} cannot be shown: the kernel that makes {gradient} reads it as well")

    def _unreached(self) -> tuple[tuple[int, ...], ...]:
        """Return `RegionResults.unreached`."""
        outputs = [port.members[0] for port in self.ports.outputs]
        sources = [port.members for port in (*self.ports.inputs, *self.ports.parameters)]
        found = unreached(self.configuration.model.graph(), outputs, sources)
        return found if any(found) else ()

    def _dtype(self, port: Port) -> str:
        return self.memory.graph.tensors[port.members[0]].dtype

    def _strided(self, port: Port, lies: Geometry) -> Strided:
        return Strided(self._dtype(port), lies.shape, lies.strides)
