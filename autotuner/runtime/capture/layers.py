"""Layers of a model: modules with a number in their path, as `model.layers.3`, and operators grouped by them.

A part of the program that is cut where its modules are has one group for each layer, whatever the first one reads.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotuner.ir.kinds import SOFTMAXES
from autotuner.runtime.capture.program import LayerCall, Operation

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_ROOT = re.compile(r"^\w*\[[^\]]*\]\.?")
_CHILD = re.compile(r"(__dict__\['_modules'\]|_modules)\['")
"""The second is how dynamo looks a child up; the first, where the parent's class has a `__getattr__` of its own."""
_OWN_FORWARD = "forward.__self__."
"""Part of dynamo's way to a module whose instance has a forward of its own, as accelerate gives it one."""


@dataclass(frozen=True)
class _Visit:
    """A module whose forward makes a call: its path, its class, and which of its calls it is."""

    path: str
    of: str
    call: str


def layer_calls(stack: Any) -> tuple[LayerCall, ...]:
    """Return the layers that a call of a graph is in, outermost first.

    Args:
        stack: the modules that make the call, as dynamo notes them: by a key that ends in `@2` where it is the third
            call of the module, its path and its class.
    """
    visits = [_Visit(bare_path(path), getattr(of, "__qualname__", str(of)), key.partition("@")[2])
              for key, (path, of) in (stack or {}).items()]  # fmt: skip
    if not visits:
        return ()
    found = []
    for number in _NUMBER.finditer(visits[-1].path):
        path = visits[-1].path[: number.end()]
        inside = [each for each in visits if each.path == path or each.path.startswith(f"{path}.")]
        of = inside[0].of if inside[0].path == path else ""
        found.append(LayerCall(f"{path[: number.start()]}*", of, path, inside[0].call))
    return tuple(found)


def bare_path(path: Any) -> str:
    """Return the path of a module as `named_modules` has it, from that in dynamo's words."""
    return _CHILD.sub("", _ROOT.sub("", str(path))).replace("']", "").replace(_OWN_FORWARD, "")


def siblings_of(operations: Iterable[Operation]) -> dict[tuple[str, str], int]:
    """Return how many layers each family of alike modules has."""
    found: dict[tuple[str, str], set[LayerCall]] = {}
    for operation in operations:
        for layer in operation.layers:
            found.setdefault(layer.kin, set()).add(layer)
    return {kin: len(layers) for kin, layers in found.items()}


def by_layers(operations: Sequence[Operation], depth: int = 0) -> list[tuple[LayerCall | None, list[Operation]]]:
    """Return operators by the layer that they are in, and those of no layer that follow each other.

    A module that holds several layers with an attention each, as a stage of Swin does, is cut into these.
    """
    members: dict[LayerCall | int, list[Operation]] = {}
    behind: LayerCall | int = -1
    within = _layers_within(operations, depth)
    for place, operation in enumerate(operations):
        layer = within.get(operation)
        if layer is not None or not isinstance(behind, int) or behind not in members:
            behind = place if layer is None else layer
        members.setdefault(behind, []).append(operation)
    found: list[tuple[LayerCall | None, list[Operation]]] = []
    for key, group in members.items():
        if isinstance(key, LayerCall) and _holds_layers(group, depth + 1):
            found += by_layers(group, depth + 1)
        else:
            found.append((key if isinstance(key, LayerCall) else None, group))
    return found


def _layers_within(operations: Sequence[Operation], depth: int) -> dict[Operation, LayerCall]:
    """Return the layers that operators are in: by their modules, or between two operators of one layer.

    A sum that is written beside the layer's modules, whose result the layer reads again, cannot be computed behind it.
    """
    own = {operation: operation.layers[depth] for operation in operations if len(operation.layers) > depth}
    behind: dict[Operation, set[LayerCall]] = {}  # what is read of layers, directly or by operators of none
    for operation in operations:
        makers = [operand.view.tensor.made_by for operand in operation.inputs]
        behind[operation] = {own[each] for each in makers if each in own}.union(
            *(behind[each] for each in makers if each is not None and each in behind and each not in own)
        )
    before: dict[Operation, set[LayerCall]] = {operation: set() for operation in operations}
    for operation in reversed(operations):
        layers = {own[operation]} if operation in own else before[operation]
        for operand in operation.inputs:
            if operand.view.tensor.made_by in before:
                before[operand.view.tensor.made_by] |= layers
    between = {each: behind[each] & before[each] for each in operations if each not in own}
    return own | {operation: layers.pop() for operation, layers in between.items() if len(layers) == 1}


def _holds_layers(operations: Iterable[Operation], depth: int) -> bool:
    """Say whether all attentions of some operators are in inner layers that are alike, and more than one."""
    inner = {operation.layers[depth] if len(operation.layers) > depth else None
             for operation in operations if operation.kind in SOFTMAXES}  # fmt: skip
    return len(inner) > 1 and None not in inner and len({layer.kin for layer in inner if layer is not None}) == 1
