"""LayerDrop of transformers' models, with a probability of 0: no number is drawn for it.

Up to version 5.17 at least, and no longer in 5.23, encoders and decoders draw one on the host for each layer, and
compare it with the probability, which is 0 by default. Dynamo cuts the graph at each of these decisions, and a step
that draws on the host is not captured.
"""

import re
from collections.abc import Callable
from functools import wraps
from inspect import getsource, unwrap
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWN = re.compile(r"\b(\w+) = torch\.rand\(\[\]\)")


class _Uniform:
    """A number of [0, 1), drawn once it is compared with one that it may be below."""

    def __lt__(self, probability: float) -> bool:
        return probability > 0 and bool(torch.empty([]).uniform_() < probability)


class _DrawnLate(TorchFunctionMode):
    """Numbers that `torch.rand([])` makes are drawn once they are compared."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.rand and args == ([],) and not kwargs:
            return _Uniform()
        return func(*args, **(kwargs or {}))


def draw_for_no_layer(model: Any) -> None:
    """Have the modules of a model that drop layers with a probability of 0 draw nothing for that.

    They compute what they did. The generator on the host, which they moved on, stays as it is.
    """
    own = getattr(model, "_orig_mod", model)
    for module in own.modules() if isinstance(own, nn.Module) else ():
        probability = getattr(module, "layerdrop", getattr(getattr(module, "config", None), "layerdrop", None))
        if probability == 0 and "forward" not in vars(module) and _draws_always(type(module).forward):
            module.forward = MethodType(_drawing_late(type(module).forward), module)


def _draws_always(forward: Callable[..., Any]) -> bool:
    """Say whether a function draws numbers, whatever the probability, and does nothing but compare them with it."""
    try:
        source = getsource(unwrap(forward))
    except (OSError, TypeError):
        return False
    names = _DRAWN.findall(source)
    if not names or source.count("torch.rand(") != len(names) or "layerdrop > 0" in source:
        return False
    compared = [rf"\b{name} < self\.(?:config\.)?layerdrop\b" for name in set(names)]
    uses = sum(len(re.findall(rf"\b{name}\b", source)) for name in set(names))
    return uses == len(names) + sum(len(re.findall(each, source)) for each in compared)


def _drawing_late(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def drawing_late(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with _DrawnLate():
            return forward(self, *arguments, **keywords)

    return drawing_late
