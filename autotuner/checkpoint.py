"""Checkpoints: where long work asks whether it is to go on, so that a job can be cancelled or stopped at its limit.

Whatever may take longer than a fraction of a second calls `checkpoint` in its loops. Who runs it watches: what the
watch raises ends the work there. Without a watch, a checkpoint does nothing.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Thread
from typing import TypeVar

Look = Callable[[], None]
T = TypeVar("T")

# While work without checkpoints runs, they are asked so often.
LOOK_S = 0.05

_looks: ContextVar[tuple[Look, ...]] = ContextVar("looks", default=())


class OverError(Exception):
    """The work inside `until` took longer than it may."""


def checkpoint() -> None:
    """Ask everyone who watches this work whether it is to go on, the outermost first."""
    for look in _looks.get():
        look()


@contextmanager
def watched(look: Look) -> Iterator[None]:
    """Call `look` at every checkpoint of the work inside; what it raises ends the work there."""
    token = _looks.set((*_looks.get(), look))
    try:
        yield
    finally:
        _looks.reset(token)


@contextmanager
def until(is_over: Callable[[], bool]) -> Iterator[None]:
    """End the work inside with `OverError`, at its first checkpoint at which it is over."""

    def look() -> None:
        if is_over():
            raise OverError

    with watched(look):
        yield


def heeding(work: Callable[[], T]) -> T:
    """Return what work without checkpoints returns: it runs in a thread, and they are asked meanwhile.

    Where one raises, the thread is left to end by itself.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    checkpoint()
    Thread(target=run, name="work without checkpoints", daemon=True).start()
    while not wait([future], LOOK_S).done:
        checkpoint()
    return future.result()
