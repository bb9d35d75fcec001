"""Calls that change a tensor in place, each with the call that returns the changed tensor instead."""

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autotuner.runtime.capture.calls import EXAMPLE
from autotuner.runtime.capture.placed import placed

_OF_PYTHON = {
    getattr(operator, f"i{name}"): getattr(operator, other)
    for name, other in {
        "add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv", "floordiv": "floordiv", "mod": "mod",
        "pow": "pow", "and": "and_", "or": "or_", "xor": "xor", "lshift": "lshift", "rshift": "rshift",
    }.items()
}  # fmt: skip
"""Python's operators that work in place, and those that do not."""


@dataclass(frozen=True, eq=False)
class FunctionalForm:
    """The call that returns what another one leaves in a tensor.

    Args:
        changed: the tensor that is changed in place.
        function: called in its stead: a function, or the name of a method.
    """

    changed: fx.Node
    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def functional_form(node: fx.Node) -> FunctionalForm | None:
    """Return the functional form of a call in place, or None where it has none that is exact, or is not in place."""
    out: Any = node.kwargs.get("out")
    if out is not None:
        kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
        function: Any = node.target
        return FunctionalForm(out, function, node.args, kwargs) if _is_tensor(out) else None
    changed = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(changed, fx.Node) or not _is_tensor(changed):
        return None
    if node.op == "call_method":
        return _of_method(node, changed, str(node.target))
    if node.target is operator.setitem:
        _, index, value = node.args
        return FunctionalForm(changed, placed, (changed, value, index), {})
    if node.target in _OF_PYTHON:
        return FunctionalForm(changed, _OF_PYTHON[node.target], node.args, node.kwargs)
    name = getattr(node.target, "__name__", "")
    for module in (torch, functional) if _is_changing(name) else ():
        other = getattr(module, name[:-1], None)
        if node.target is getattr(module, name, None) and other is not None:
            return FunctionalForm(changed, other, node.args, node.kwargs)
    return _of_flag(node, changed)


def _of_method(node: fx.Node, changed: fx.Node, name: str) -> FunctionalForm | None:
    if name == "__setitem__":
        return FunctionalForm(changed, placed, (changed, node.args[2], node.args[1]), {})
    if name in ("copy_", "fill_", "zero_"):
        values = (*node.args[1:2], *node.kwargs.values()) if name != "zero_" else (0,)
        return FunctionalForm(changed, placed, (changed, values[0]), {}) if len(values) == 1 else None
    if not _is_changing(name) or not callable(getattr(Tensor, name[:-1], None)):
        return None
    return FunctionalForm(changed, name[:-1], node.args, node.kwargs)


def _of_flag(node: fx.Node, changed: fx.Node) -> FunctionalForm | None:
    """Return the form of a function that is told to work in place, as activations are."""
    if getattr(node.target, "__module__", None) != functional.__name__:
        return None
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a built-in function
        return None
    if given.arguments.get("inplace") is not True:
        return None
    given.arguments["inplace"] = False
    function: Any = node.target
    return FunctionalForm(changed, function, given.args, given.kwargs)


def _is_changing(name: str) -> bool:
    """Say whether a name is of an operator of ATen that changes its first argument's values, and nothing by chance."""
    if not name.endswith("_") or name.endswith("__") or not hasattr(torch.ops.aten, name[:-1]):
        return False
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    never = {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}
    return any(map(_writes_first, overloads)) and not any(never.intersection(each.tags) for each in overloads)


def _writes_first(overload: Any) -> bool:
    """Say whether a schema writes its first argument alone, as those that newer versions of torch tag so."""
    written = [place for place, each in enumerate(overload._schema.arguments)
               if each.alias_info is not None and each.alias_info.is_write]  # fmt: skip
    return written == [0]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get(EXAMPLE), Tensor)
