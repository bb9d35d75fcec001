"""Warnings and errors point at the user's code, however deep in the package they are made."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autotuner.errors import first_cause

INSIDE = """
import warnings
from autotuner.errors import stacklevel

def warn():
    warnings.warn("look", stacklevel=stacklevel())

def deeper(depth):
    warn() if depth == 0 else deeper(depth - 1)

def called_back(function):
    function()
"""


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module that claims to be of this package."""
    module = ModuleType("autotuner.made_up")
    exec(compile(INSIDE, "/somewhere/autotuner/made_up.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "autotuner.made_up", module)
    return module


def place(call: Callable[[], object]) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught[0].filename, caught[0].lineno


@pytest.mark.parametrize("depth", [0, 1, 7])
def test_a_warning_points_at_the_first_frame_outside_the_package(inside: ModuleType, depth: int) -> None:
    filename, line = place(lambda: inside.deeper(depth))
    assert (filename, line) == (__file__, sys._getframe().f_lineno - 1)


def test_what_the_user_has_the_package_call_is_the_users_code(inside: ModuleType) -> None:
    filename, _ = place(lambda: inside.called_back(lambda: inside.warn()))
    assert filename == __file__


def test_frames_of_torch_and_of_context_managers_are_passed_over(inside: ModuleType) -> None:
    between = ModuleType("torch.nn.made_up")
    exec(compile("def call(module): module.warn()", "/somewhere/torch/nn/made_up.py", "exec"), between.__dict__)

    filename, line = place(lambda: between.call(inside))
    assert (filename, line) == (__file__, sys._getframe().f_lineno - 1)
    stack = contextlib.ExitStack()
    stack.callback(inside.warn)
    filename, _ = place(stack.close)
    assert filename == __file__


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Fail at its end where what runs within fails, as the capture of a CUDA graph does."""
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_the_first_error_is_told_with_its_line_in_the_users_code(inside: ModuleType) -> None:
    def wait() -> None:
        inside.called_back(lambda: int("x\ny"))

    with pytest.raises(RuntimeError, match="previous error") as raised, capture():
        wait()
    line = wait.__code__.co_firstlineno + 1
    assert first_cause(raised.value) == (
        f"invalid literal for int() with base 10: 'x\\ny'; {Path(__file__).name}, line {line}"
    )


def test_an_error_stands_for_itself_where_what_led_to_it_is_left_out() -> None:
    def instead() -> None:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError from None

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        instead()
    assert first_cause(raised.value).startswith("ValueError; test_errors.py, line ")
    assert first_cause(MemoryError("no more\nat all")) == "no more"
