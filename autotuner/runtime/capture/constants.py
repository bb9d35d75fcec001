"""Values that a graph computes from nothing but constants: positions, and the masks that follow from them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

LIMIT = 2**26
"""Elements of a tensor up to which it is computed while a model is compiled."""

_MAKE = (
    "arange eye full full_like linspace new_full new_ones new_tensor new_zeros ones ones_like tensor zeros zeros_like"
)
_COMPARE = "eq ge gt isfinite isinf isnan le lt ne"
_COMBINE = "abs add all and any bitwise_and bitwise_not bitwise_or clamp cumsum diff div floor_divide floordiv invert"
_COMBINE += " logical_and logical_not logical_or logical_xor masked_fill max maximum min minimum mod mul neg not or pow"
_COMBINE += " remainder rsqrt rsub sqrt sub sum tril triu truediv where xor"
_MOVE = "broadcast_to cat chunk clone contiguous detach expand expand_as flatten getitem narrow permute repeat reshape"
_MOVE += " select split squeeze stack t transpose unbind unsqueeze view view_as"
_CAST = "bool float int long to type type_as"
PURE = frozenset(f"{_MAKE} {_COMPARE} {_COMBINE} {_MOVE} {_CAST}".split())
"""Functions and methods whose results follow from their arguments: no chance, and no state."""
STATELESS = PURE | {"cos", "exp", "gather", "index_select", "repeat_interleave", "sin"}
"""The same, with those whose results may differ in their last digits between devices."""


class Constants:
    """Computes nodes that follow from constants alone, when they are asked for.

    Attributes:
        is_changed: as given.
    """

    def __init__(
        self,
        order: Mapping[fx.Node, int],
        is_changed: Callable[[fx.Node], bool],
        known: Mapping[fx.Node, Tensor] | None = None,
    ) -> None:
        """Begin; `is_changed` by some node in place is no constant. Inputs may be, as those of a body: `known`."""
        self._order, self.is_changed = order, is_changed
        self._known: dict[fx.Node, Any] = dict(known or {})

    def value(self, node: fx.Node) -> Tensor | None:
        """Return a node's value, or None where an input or a parameter has a part in it, or chance."""
        ancestors = self._ancestors(node)
        if ancestors is None:
            return None
        from torch.utils._python_dispatch import _disable_current_modes

        try:
            with _disable_current_modes(), torch.no_grad():
                for each in ancestors:
                    if each not in self._known:
                        self._known[each] = _called(each, self._known)
        except Exception:  # a constant is a gain, never a need
            return None
        found = self._known[node]
        return found if isinstance(found, Tensor) else None

    def number(self, node: fx.Node) -> float | None:
        """Return the value of a node that is one floating-point number without dimensions, such as a scale."""
        example = node.meta.get("example_value")
        if not isinstance(example, Tensor) or example.dim() or not example.is_floating_point():
            return None
        found = self.value(node)
        return None if found is None else float(found)

    def _ancestors(self, node: fx.Node) -> list[fx.Node] | None:
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each in found:
                continue
            if self.is_changed(each):
                return None
            if each in self._known:
                continue
            if not is_pure(each) or _elements(each) > LIMIT:
                return None
            found.add(each)
            waiting += each.all_input_nodes
        return sorted(found, key=self._order.__getitem__)


def _called(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: known[each])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_pure(node: fx.Node, names: frozenset[str] = PURE) -> bool:
    """Say whether a node is a call of one of these functions, of torch's or of Python's operators."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.op == "call_method":
        return _bare(str(node.target)) in names
    target: Any = node.target
    return getattr(target, "__module__", None) in _HOMES and _bare(getattr(target, "__name__", "")) in names


_HOMES = (None, "builtins", "_operator", "torch", "torch._C._VariableFunctions", "torch.functional")
"""Modules of torch's own functions, some of which have none, and of Python's operators."""


def _bare(name: str) -> str:
    """Return a name without what marks an operator of Python's: `and_`, `__and__` and `__rand__` are `and`."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return name if name in PURE else name.removeprefix("r")
    return name.removesuffix("_") if name in ("and_", "or_", "not_") else name


def _elements(node: fx.Node) -> int:
    example = node.meta.get("example_value")
    return example.numel() if isinstance(example, Tensor) and all(type(e) is int for e in example.shape) else 0
