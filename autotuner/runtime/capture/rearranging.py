"""Nodes that show a tensor as others read it: at fixed places, its axes in another order, with torch's strides."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotuner.runtime.capture.axes import Axis
from autotuner.runtime.capture.calls import EXAMPLE

EXAMPLE_SHAPE = "autotuner_shape"
"""Key of the shape of a node that dynamo has not made."""


def in_strides(graph: fx.Graph, node: fx.Node, example: Tensor) -> fx.Node:
    """Write what gives a tensor the strides that torch gives it, where its memory is in another order."""
    shown = graph.call_function(with_strides, (node, list(example.shape), list(example.stride())))
    shown.meta[EXAMPLE_SHAPE] = tuple(example.shape)
    return shown


def with_strides(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return a tensor with these strides: itself, if it has them, or a copy."""
    if all(extent == 1 or a == b for extent, a, b in zip(shape, tensor.stride(), strides, strict=True)):
        return tensor
    for dim, stride in enumerate(strides):
        if not stride:  # repeated: one place of it is in memory
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor).expand(shape)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    if EXAMPLE_SHAPE in node.meta:
        return tuple(node.meta[EXAMPLE_SHAPE])
    return tuple(node.meta[EXAMPLE].shape)


def rearranged(
    graph: fx.Graph,
    node: fx.Node,
    given: Sequence[int],
    axes: Sequence[Axis],
    fixed: Mapping[Axis, int],
    wanted: Sequence[Axis],
    shape: Sequence[int],
) -> fx.Node:
    """Write what takes a tensor at fixed places, in another order of its axes, repeated along those that it lacks.

    Args:
        given: its shape.
        axes: its axes, in order.
        fixed: places along some of them.
        wanted: axes of the result, in order.
        shape: of the result.
    """
    made: list[fx.Node] = [node]

    def call(method: str, result: Sequence[int], *arguments: Any) -> None:
        made.append(graph.call_method(method, (made[-1], *arguments)))
        made[-1].meta[EXAMPLE_SHAPE] = tuple(result)

    left = [axis for axis in axes if axis not in fixed]
    held = [axis for axis in wanted if axis in left]
    if fixed or held != left or len(held) < len(wanted):
        sizes = [axis.extent for axis in axes]
        if list(given) != sizes:
            call("reshape", sizes, sizes)
        for place in reversed(range(len(axes))):
            if axes[place] in fixed:
                sizes = sizes[:place] + sizes[place + 1 :]
                call("select", sizes, place, fixed[axes[place]])
        if held != left:
            order = [left.index(axis) for axis in held]
            sizes = [axis.extent for axis in held]
            call("permute", sizes, order)
        if len(held) < len(wanted):
            ones = [axis.extent if axis in left else 1 for axis in wanted]
            sizes = [axis.extent for axis in wanted]
            call("reshape", ones, ones)
            call("expand", sizes, sizes)
        given = sizes
    if list(given) != list(shape):
        call("reshape", shape, list(shape))
    return made[-1]
