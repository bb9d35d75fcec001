"""Calls of an operator of torch's that reach its function at once, where nothing lies between both.

Between a call and the function of a custom operator, torch has three functions in Python: for gradients, for the
device, and against being compiled. On small layers they take longer than what the operator does itself. Code that is
compiled calls operators without gradients, on plain tensors, with nothing that watches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import library
from torch._C import DispatchKey
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._library.autograd import make_autograd_impl

UNUSUAL = tuple(
    getattr(DispatchKey, name) for name in ("Python", "Functionalize", "Negative", "Conjugate", "ZeroTensor")
)
"""Keys of calls that somebody watches or transforms, or whose tensors stand for other numbers than their memory has."""
KEYS = ("AutogradCPU", "AutogradCUDA")
_LIBRARY = library.Library("autotuner", "FRAGMENT")  # type: ignore[no-untyped-call]


def call_directly(operator: Any, function: Callable[..., Any]) -> None:
    """Have calls of a custom operator without gradients, on plain tensors, run its function and nothing else.

    All that watches or transforms operators, and all that takes gradients, finds the operator as it was.

    Args:
        function: the operator's own; what it returns shares no memory with what it is given.
    """
    usual = make_autograd_impl(operator._opoverload, operator)
    below = torch._C._AutoDispatchBelowAutograd

    def run(keys: Any, *args: Any) -> Any:
        if not _is_plain(keys):
            return usual(keys, *args)
        with below():
            return function(*args)

    for key in KEYS:
        _LIBRARY.impl(operator._name, run, key, with_keyset=True)  # type: ignore[no-untyped-call]


def _is_plain(keys: Any) -> bool:
    """Say whether nobody takes gradients of a call with these keys, watches, transforms or compiles it."""
    return not (
        torch._C.is_grad_enabled()
        or any(map(keys.has, UNUSUAL))
        or torch._C._functorch.peek_interpreter_stack() is not None
        or get_eval_frame_callback()
    )
