"""Functions with code of their own, for torch's compiler."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from autotuner.runtime.ticket import new_number


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose code no other one has: dynamo keeps what it compiles with the code, up to a limit."""
    name = f"{function.__name__}_{new_number()}"
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
