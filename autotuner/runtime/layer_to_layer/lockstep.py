"""Functions that run in turns: each in a thread of its own, one at a time, from one pause to the next."""

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType


class _Abandoned(BaseException):
    """Unwinds a thread whose function is not run to its end."""


class _Turn:
    """A function, its thread, and whose turn it is.

    Args:
        run: the function.
        around: entered in the thread, around the function.
    """

    def __init__(self, run: Callable[[], None], around: Callable[[], AbstractContextManager[object]]) -> None:
        self._run, self._around = run, around
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.has_ended = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main,), daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Run up to the next pause, or to the end.

        Raises:
            Exception: whatever the function raises.
        """
        self._go.release()
        self._back.acquire()
        if self.has_ended:
            self._thread.join()  # what torch keeps for a thread, such as handles of libraries, goes to the next one
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Wait within the function until it is advanced."""
        self._back.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End the thread, and unwind its function where it has not ended."""
        if not self.has_ended:
            self._is_abandoned = True
            self._go.release()
        self._thread.join()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._is_abandoned:
                with self._around():
                    self._run()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.has_ended = True
            self._back.release()


class Lockstep:
    """Functions that are advanced in turns; a context, which leaves no thread behind.

    A model's forward cannot be left in the middle and come back to: a thread can wait there. Only one of them runs at
    any time, so they share all that Python code of one thread may share, and each has torch's own state of a thread.

    Args:
        functions: each calls `pause` of this object where it is to wait.
        around: makes a context for each thread, such as one of autocast: torch keeps that for each thread.
    """

    def __init__(
        self, functions: Sequence[Callable[[], None]], around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._turns = [_Turn(function, around) for function in functions]
        self.current: int | None = None
        """The function that is being advanced."""

    def __enter__(self) -> "Lockstep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, turn in enumerate(self._turns):
            self.current = number
            turn.abandon()
        self.current = None

    def advance(self, number: int) -> bool:
        """Run a function up to its next pause, or to its end, and say whether it is paused.

        Raises:
            Exception: whatever the function raises.
        """
        self.current = number
        try:
            self._turns[number].advance()
        finally:
            self.current = None
        return not self._turns[number].has_ended

    def pause(self) -> None:
        """Wait, within a function, until it is advanced.

        Raises:
            RuntimeError: no function of these is running.
        """
        number = self.current
        if number is None:
            raise RuntimeError("pause is called outside of the functions that run in turns")
        self._turns[number].pause()
