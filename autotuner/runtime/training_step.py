"""A configuration as plain calls, without a framework module."""

from collections.abc import Mapping

import torch
from torch import Tensor

from autotuner.errors import ConfigurationError, InputError
from autotuner.ir.graph import Graph
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import MemoryPlan, Port, Ports, make_plan
from autotuner.runtime.graphs import Switch
from autotuner.runtime.parameter_memory import ParameterMemory
from autotuner.runtime.workspace import CPU, Workspace


class TrainingStep:
    """Forward and backward over tensors named as in the model file."""

    def __init__(
        self,
        configuration: Configuration,
        parameters: Mapping[str, Tensor],
        *,
        graphs: bool = True,
        shares: bool = True,
    ) -> None:
        """Lay out the parameters and build every step.

        Args:
            configuration: what to run.
            parameters: values, axes as declared in the model file. They are copied; `self.parameters` are those that
                run, in the configuration's layouts, and may be changed in place.
            graphs: on CUDA, replay forward and backward as CUDA graphs from their third time on.
            shares: as in `make_plan`.

        Raises:
            ConfigurationError: a parameter is missing, has another shape than the model's, or is on another device than
                the configuration's.
        """
        self.plan = make_plan(configuration, shares=shares)
        graph = self.plan.graph
        wrong = [
            name
            for name in self.plan.parameters
            if name not in parameters or tuple(parameters[name].shape) != graph.shape(name)
        ]
        if wrong:
            wanted = {name: graph.shape(name) for name in self.plan.parameters}
            raise ConfigurationError(f"parameter {wrong[0]!r} is missing or has another shape; expected {wanted}")
        device_type = configuration.environment["device_type"]
        devices = {parameters[name].device for name in self.plan.parameters}
        if len(devices) != 1 or any(device.type != device_type for device in devices):
            found = " and ".join(sorted(str(device) for device in devices))
            raise ConfigurationError(
                f"the parameters are on {found}, and the configuration was measured on {device_type}: "
                "move all of them to one such device"
            )
        device = devices.pop()
        self.parameters = laid_out(self.plan, device)
        for name, tensor in self.parameters.items():
            tensor.copy_(parameters[name].detach())
        self._masks = {name for name in self.plan.inputs if is_mask(graph, name)}
        sources = [n for n, t in graph.tensors.items() if t.role == "input" and f"grad_{n}" in self.plan.outputs]
        self._ports = Ports(
            tuple(self._declared(name) for name in self.plan.inputs),
            tuple(self._declared(name.removeprefix("grad_")) for name in self.plan.given),
            tuple(self._declared(name) for name in self.plan.outputs if not name.startswith("grad_")),
            tuple(self._declared(name) for name in (*sources, *self.plan.parameters)),
        )
        self.workspace = Workspace(self.plan, self._ports, ParameterMemory(self.parameters), device, Switch(graphs))
        self._all = (True,) * len(self._ports.sources)

    def forward(self, x: Tensor, *others: Tensor | None) -> Tensor:
        """Return y; an additive mask that is not given is zero.

        Args:
            x: the model file's first input.
            others: its other inputs, in its order: a mask over keys, say, or cosines and sines.

        Raises:
            InputError: one has another shape, element type or device than the configuration's, one that is no mask is
                missing, or there are more than the configuration has.
        """
        names = [port.name for port in self._ports.inputs]
        given = (x, *others, *[None] * (len(names) - 1 - len(others)))
        if len(given) > len(names):
            what = "a mask is given, and the configuration has none" if len(names) == 1 else f"its inputs are {names}"
            raise InputError(f"{what}: leave it out, or tune with one")
        for name, tensor in zip(names, given, strict=True):
            if tensor is not None or name not in self._masks:
                self._check(name, tensor)
        return self.workspace.forward(*given)[0]

    def backward(self, grad: Tensor, keeps: bool = False) -> dict[str, Tensor]:
        """Return the gradients of the last forward by name, "grad_x" and those of all parameters.

        Args:
            grad: of the output.
            keeps: whether backward may be called again for the same forward.

        Raises:
            InputError: the gradient has another shape, element type or device than the output.
            RuntimeError: it was called for this forward already, without `keeps`.
        """
        self._check(self._ports.given[0].name, grad, "gradient of ")
        found = self.workspace.backward((grad,), self._all, keeps)
        names = (f"grad_{port.name}" for port in self._ports.sources)
        return {name: tensor for name, tensor in zip(names, found, strict=True) if tensor is not None}

    def _check(self, name: str, given: Tensor | None, what: str = "") -> None:
        """Check that a tensor is like the one that the configuration runs on: it is copied there as it is."""
        if not isinstance(given, Tensor):
            raise InputError(f"the {what}{name} is a {type(given).__name__}: give a tensor")
        graph, device = self.plan.graph, self.workspace.device
        wanted = (graph.shape(name), getattr(torch, graph.tensors[name].dtype), device)
        found = (tuple(given.shape), given.dtype, given.device)
        if found != wanted:
            given_as, runs_as = ("{} {} on {}".format(*one) for one in (found, wanted))
            raise InputError(f"the {what}{name} is {given_as}, and the configuration runs {runs_as}")

    def _declared(self, name: str) -> Port:
        return Port(name, (name,), tuple(self.plan.graph.tensors[name].axes))


def is_mask(graph: Graph, name: str) -> bool:
    """Tell whether a tensor is only added to scores as a mask, perhaps after a cast."""
    return all(
        reader.kind == "mask" or (reader.kind == "cast" and is_mask(graph, reader.outputs[0]))
        for reader in graph.consumers[name]
    )


def laid_out(plan: MemoryPlan, device: torch.device = CPU) -> dict[str, Tensor]:
    """Return a new, unset tensor for each parameter, strides and neighbours as a plan says."""
    found: dict[str, Tensor] = {}
    for buffer in plan.buffers:
        if buffer.role == "parameter":
            base = torch.empty(buffer.elements, dtype=getattr(torch, buffer.dtype), device=device)
            for place, offset in buffer.offsets.items():
                found[place[0]] = base.as_strided(plan.shape(place), plan.strides(place), offset)
    return found
