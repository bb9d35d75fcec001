"""A module's forward, replaced on the module itself until that is undone; copies of the module have their own one."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn


class ReplacedForward:
    """Calls a function in place of a module's forward; dynamo does not trace into it.

    A copy of the module, or one that is loaded from a pickle, has the forward of its class.

    Args:
        module: whose forward is replaced.
        run: is called with what the module is called with.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._before = module, vars(module).get("forward")

        def call(*arguments: Any, **keywords: Any) -> Any:
            return run(*arguments, **keywords)

        self._run = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        module.forward = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._run(*arguments, **keywords)

    def undo(self) -> None:
        """Give the module the forward back that it had."""
        if vars(self._module).get("forward") is self:
            del self._module.forward
            if self._before is not None:
                self._module.forward = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return own_forward(memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        return own_forward, (self._module,)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class."""
    return MethodType(type(module).forward, module)
