"""A model of any definition as an `nn.Module`: ordinary parameters named as in its file, run by configurations."""

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import AutotunerError, ConfigurationError, InputError
from autotuner.ir.graph import Graph
from autotuner.ir.kinds import draws, kind_of
from autotuner.ir.models import Model
from autotuner.ir.models.model import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Subgraph
from autotuner.kernels.reference import evaluate
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port
from autotuner.runtime.fallbacks import TALLY, count_fallback
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.region_plan import RegionPorts

Shapes = tuple[tuple[int, ...], ...]


class ModelOperators(nn.Module):
    """A model's forward over parameters of its own, operator by operator in plain torch."""

    def __init__(self, model: Model, device: str) -> None:
        """Make parameters, with random values.

        Weights are uniform within the inverse root of the elements that a result sums; biases are 0, scales of norms 1.
        """
        super().__init__()
        self._model, self._drops = model, _drops(model)
        graph = model.graph()
        self._inputs = _ports(graph).inputs
        self._prepared: dict[Shapes, tuple[Subgraph, list[int]]] = {}
        for name, (shape, dtype) in _parameters(graph).items():
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self.register_parameter(name, nn.Parameter(_initial(graph, name, value)))

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the model's output, or all of them where there are several."""
        found = self._plain(tuple(tuple(each.shape) for each in inputs), inputs, list(self.parameters()))
        return found[0] if len(found) == 1 else tuple(found)

    def _plain(self, shapes: Shapes, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Run operator by operator in plain torch."""
        if shapes not in self._prepared:
            self._prepared[shapes] = self._prepare(self._graph(shapes))
        subgraph, drawn = self._prepared[shapes]
        like = parameters[0]
        masks = {} if self.training else {n: torch.ones((), dtype=like.dtype, device=like.device) for n in drawn}
        return [tensor for tensor in evaluate(subgraph, [*inputs, *parameters], masks) if tensor is not None]

    def _prepare(self, graph: Graph) -> tuple[Subgraph, list[int]]:
        """Return a graph as it is evaluated, and its dropout masks by number."""
        names = [tensor for operator in graph.operators for tensor in (*operator.inputs, *operator.outputs)]
        boundary = [*(port.name for port in self._inputs), *_parameters(graph)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys((*boundary, *graph.outputs, *names)))}
        drawn = [numbers[operator.outputs[0]] for operator in graph.operators if draws(operator.kind)]
        return graph.subgraph(graph.operators, boundary, graph.outputs), drawn

    def _graph(self, shapes: Shapes) -> Graph:
        """Return the model's graph for inputs of these shapes."""
        extents = dict(self._model.extents)
        fixed = {axis for name in _parameters(self._model.graph()) for axis in self._model.graph().tensors[name].axes}
        for port, shape in zip(self._inputs, shapes, strict=True):
            axes = port.dims
            if len(axes) != len(shape):
                raise InputError(f"{port.name} has {len(shape)} dimensions, the model's {len(axes)}: {''.join(axes)}")
            for axis, extent in zip(axes, shape, strict=True):
                if axis in fixed and extent != extents[axis]:
                    raise InputError(f"{port.name} has {extent} elements along {axis}, the parameters {extents[axis]}")
                extents[axis] = extent
        model = self._model
        if extents == dict(model.extents):
            return model.graph()
        try:
            file = ModelFile("a module", parse_definition(model.definition, "a module"))
            return file.instantiate(extents=extents, options=model.options, dtype=model.dtype).graph()
        except AutotunerError as error:
            raise InputError(f"inputs of shapes {shapes}: {error}") from error


class ModelModule(ModelOperators):
    """A model's forward over parameters of its own; calls are as the model file declares inputs and outputs.

    A call runs the configuration for its shapes. In eval mode, only one that drops nothing is used. Where none fits,
    the operators run one by one in plain torch, and the call counts as a fallback in `autotuner.summary()`.
    """

    def __init__(self, configurations: Sequence[Configuration], *, graphs: bool = True) -> None:
        """Make parameters on the configurations' device, with random values.

        Args:
            configurations: of one model, each for other shapes or another mode.
            graphs: whether calls become CUDA graphs; ignored on the CPU.

        Raises:
            ConfigurationError: there is none, or they have other inputs, parameters or outputs than the first.
        """
        if not configurations:
            raise ConfigurationError("a module needs a configuration at least")
        graph = configurations[0].model.graph()
        ports = _ports(graph)
        for configuration in configurations:
            other = configuration.model.graph()
            if _parameters(other) != _parameters(graph) or _ports(other) != ports:
                raise ConfigurationError(
                    f"configurations of one module have the same inputs, parameters and outputs; {other.name!r} has "
                    f"others than {graph.name!r}"
                )
        models = [configuration.model for configuration in configurations]
        of = next((each for each in models if _drops(each)), models[0])
        super().__init__(of, str(configurations[0].environment["device_type"]))
        self._configurations, self._replays = tuple(configurations), graphs
        self._regions = self._made_regions()

    def _made_regions(self) -> dict[tuple[Shapes, bool], TunedRegion]:
        found: dict[tuple[Shapes, bool], TunedRegion] = {}
        for configuration in self._configurations:
            graph = configuration.model.graph()
            ports = _ports(graph)
            shapes = tuple(graph.shape(port.name) for port in ports.inputs)
            key = shapes, _drops(configuration.model)
            found.setdefault(key, TunedRegion(configuration, ports, graphs=self._replays))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_regions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._regions = self._made_regions()  # a copy has regions of its own, over its own parameters

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the model's output, or all of them where there are several.

        Raises:
            InputError: the number of inputs, or their shapes, are none of the model's.
        """
        if len(inputs) != len(self._inputs):
            names = ", ".join(port.name for port in self._inputs)
            raise InputError(f"{len(inputs)} inputs are given; the model's are {names}")
        shapes = tuple(tuple(each.shape) for each in inputs)
        region = self._regions.get((shapes, self.training and self._drops))
        parameters = list(self.parameters())
        found: Sequence[Tensor]
        if region is None or not _fits(region, (*inputs, *parameters)):
            count_fallback(TALLY.fallbacks, (self._model.reference, "shape", shapes[0] if shapes else ()))
            found = self._plain(shapes, inputs, parameters)
        else:
            found = region.call(inputs, parameters)
            TALLY.calls += 1
        return found[0] if len(found) == 1 else tuple(found)

    def extra_repr(self) -> str:
        return f"{self._model.reference}, {len(self._regions)} configurations"

    def renew(self) -> None:
        """Give up the memory of its calls; the next ones allocate theirs."""
        self._regions = self._made_regions()

    def skip_kernels(self) -> None:
        """Have what has run leave out its kernels from now on, which shows what a step costs beside them."""
        for region in self._regions.values():
            region.skip_kernels()


def _drops(model: Model) -> bool:
    return any(draws(operator.kind) for operator in model.graph().operators)


def _fits(region: TunedRegion, tensors: Sequence[Tensor]) -> bool:
    """Say whether tensors have the types of a region, on its device, outside of autocast."""
    kind = region.plan.device_type
    return not torch.is_autocast_enabled(kind) and all(
        tensor.dtype is dtype and tensor.device.type == kind
        for (_, dtype, _), tensor in zip(region.plan.expected, tensors, strict=True)
    )


def _parameters(graph: Graph) -> Mapping[str, tuple[tuple[int, ...], str]]:
    return {n: (graph.shape(n), t.dtype) for n, t in graph.tensors.items() if t.role == "parameter"}


def _ports(graph: Graph) -> RegionPorts:
    """Return the ports of a graph's tensors as they are declared."""

    def port(name: str) -> Port:
        return Port(name, (name,), tuple(graph.tensors[name].axes))

    inputs, parameters = (
        tuple(port(name) for name, tensor in graph.tensors.items() if tensor.role == role)
        for role in ("input", "parameter")
    )
    return RegionPorts(inputs, parameters, tuple(port(name) for name in graph.outputs))


def _initial(graph: Graph, name: str, value: Tensor) -> Tensor:
    """Fill a parameter with its first values, by what reads it."""
    reader = graph.consumers[name][0]
    place = reader.inputs.index(name)
    first_values = kind_of(reader).first_values
    if place in first_values:
        return value.fill_(first_values[place])
    letters = graph.letters(reader)
    summed = set(reader.input_axes[place]) - set("".join(reader.output_axes))
    bound = 1 / sqrt(max(1, prod(letters[letter] for letter in summed)))
    return value.uniform_(-bound, bound)
