"""A region's forward once more in plain torch operators: its gradients can be differentiated again."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from autotuner.ir.kinds import draws
from autotuner.ir.programmed import CHOICE
from autotuner.kernels.reference import evaluate
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Port

NARROW = ("float16", "bfloat16")


def can_repeat(configuration: Configuration) -> bool:
    """Say whether a region computes the same again: it draws no masks, and makes no choice that rounding decides."""
    kinds = [operator.kind for operator in configuration.model.graph().operators]
    return CHOICE not in kinds and not any(map(draws, kinds))


class RepeatedRegion:
    """The forward of a configuration's model, operator by operator, on tensors as its caller has them."""

    def __init__(self, configuration: Configuration, given: Sequence[Port], made: Sequence[Port]) -> None:
        """Prepare it.

        Args:
            given: inputs, and then parameters.
            made: outputs, and what is shown beside.
        """
        self._graph = configuration.model.graph()
        self._given, self._made = tuple(given), tuple(made)
        names, outputs = ([member for port in ports for member in port.members] for ports in (given, made))
        self._subgraph = self._graph.subgraph(self._graph.operators, names, outputs)
        self._narrow = any(tensor.dtype in NARROW for tensor in self._graph.tensors.values())

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what the region's forward makes; torch records how.

        Args:
            tensors: inputs, and then parameters.
        """
        operands = [
            self._as_declared(port, member, part)
            for port, tensor in zip(self._given, tensors, strict=True)
            for member, part in zip(port.members, _parts(tensor, len(port.members)), strict=True)
        ]
        found = evaluate(self._subgraph, operands, rounded=self._narrow)
        return [self._as_wanted(port, each) for port, each in zip(self._made, found, strict=True) if each is not None]

    def _as_declared(self, port: Port, member: str, tensor: Tensor) -> Tensor:
        """Return a caller's tensor with a dimension for each axis, in the order in which the graph declares them."""
        axes, extents = self._axes(port)
        declared = self._graph.tensors[member].axes
        return tensor.reshape([extents[axis] for axis in axes]).permute([axes.index(axis) for axis in declared])

    def _as_wanted(self, port: Port, tensor: Tensor) -> Tensor:
        axes, extents = self._axes(port)
        declared = self._graph.tensors[port.members[0]].axes
        wanted = tensor.permute([declared.index(axis) for axis in axes])
        return wanted.reshape([prod(extents[axis] for axis in dim) for dim in port.dims])

    def _axes(self, port: Port) -> tuple[str, dict[str, int]]:
        """Return the axes of a port in the caller's order, and how many elements each has."""
        tensor = self._graph.tensors[port.members[0]]
        return "".join(port.dims), dict(zip(tensor.axes, self._graph.shape(tensor.name), strict=True))


def _parts(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Return the parts that lie one behind the other along the first dimension."""
    return (tensor,) if count == 1 else tensor.chunk(count)
