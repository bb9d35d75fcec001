"""Values that a graph computes from nothing but constants: positions, and the masks that follow from them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

LIMIT = 2**26
"""Elements of a tensor up to which it is computed while a model is compiled."""


class Constants:
    """Computes nodes that no input of the graph reaches, when they are asked for."""

    def __init__(self, order: Mapping[fx.Node, int], is_changed: Callable[[fx.Node], bool]) -> None:
        """Begin; what some node changes in place is no constant."""
        self._order, self._is_changed = order, is_changed
        self._known: dict[fx.Node, Any] = {}

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

    def _ancestors(self, node: fx.Node) -> list[fx.Node] | None:
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each in found:
                continue
            if (
                each.op not in ("call_function", "call_method")
                or _is_random(each)
                or _elements(each) > LIMIT
                or self._is_changed(each)
            ):
                return None
            found.add(each)
            waiting += each.all_input_nodes
        return sorted(found, key=self._order.__getitem__)


def _called(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: known[each])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_random(node: fx.Node) -> bool:
    name = str(node.target)
    return any(word in name for word in ("rand", "dropout", "bernoulli", "normal", "uniform", "multinomial"))


def _elements(node: fx.Node) -> int:
    example = node.meta.get("example_value")
    return example.numel() if isinstance(example, Tensor) and all(type(e) is int for e in example.shape) else 0
