"""Ports: tensors as the caller sees them, over tensors of the graph.

The framework's `in_proj_weight` (3h, h) is a port over query_weight, key_weight and value_weight with dimensions "np"
and "h": axes n and p act as one, and the three lie one behind the other along the first dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from autotuner.errors import ConfigurationError


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
    """How a port's tensor lies: buffer number, offset in it, shape and strides, in elements."""

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
    """

    inputs: tuple[Port, ...]
    given: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sources: tuple[Port, ...]
