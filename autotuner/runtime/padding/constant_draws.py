"""Random numbers of torch that are all one number, so that batches of several shapes draw the same ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

AT = 0.75
"""Uniform numbers are at this share of their range. At 0.5, noise around zero would be none, whatever its size."""

_CONSTANTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "bernoulli": lambda _: 1.0,
    "bernoulli_": lambda _: 1.0,
    "rand": lambda _: AT,
    "rand_like": lambda _: AT,
    "randn": lambda _: AT,
    "randn_like": lambda _: AT,
    "uniform_": lambda given: given["from"] + AT * (given["to"] - given["from"]),
    "normal_": lambda given: given["mean"] + AT * given["std"],
    "exponential_": lambda given: AT / given["lambd"],
}
"""By the name of an operator, the number that its results have, by its arguments."""


class UnknownDrawError(Exception):
    """A model draws random numbers that cannot be made one number; the message says how."""


class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, what torch draws is constant, and dropout keeps all elements.

    Raises:
        UnknownDrawError: in a call that draws otherwise, such as whole numbers.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made
        given = {
            each.name: args[place] if place < len(args) else (kwargs or {}).get(each.name, each.default_value)
            for place, each in enumerate(func._schema.arguments)
        }
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            x, mask = given["input"], made[1]
            return (x.clone() if given["train"] is False else x / (1 - given["p"])), torch.ones_like(mask)
        if name in _CONSTANTS and isinstance(made, Tensor):
            return made.fill_(_CONSTANTS[name](given))
        if given.get("dropout_p") == 0.0:  # of attention
            return made
        raise UnknownDrawError(f"it draws random numbers by {name}, which a few tokens cannot be tried with")
