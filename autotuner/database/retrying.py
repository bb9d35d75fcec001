"""Retries of transactions while the database is locked or away, up to timeouts and to the end of the process."""

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import inf
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

from autotuner.errors import DatabaseError, UnavailableError

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
TELL_AFTER_S = 2.0
PROBE_S = 0.5
"""A server that is away is asked so often whether it is back."""

HURRY_S = 2.0
"""Seconds that the database may still take in all, once the process is told to end."""

P = ParamSpec("P")
T = TypeVar("T")
Log = Callable[..., None]
log = logging.getLogger("autotuner.database")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to wait for a database.

    Args:
        answer_s: for a connection, and for the answer to one statement.
        locked_s: for a database that another process has locked.
        away_s: for one that cannot be reached, or that loses its connections; 0 to be told at once.
        busy_s: for a lock of SQLite at a time, during which no signal is handled; then it is asked again.
    """

    answer_s: float
    locked_s: float
    away_s: float
    busy_s: float = 1.0


WORKING = Timeouts(answer_s=30.0, locked_s=600.0, away_s=600.0)
"""Of a tuning: what it has measured waits in memory meanwhile."""

SERVING = Timeouts(answer_s=4.0, locked_s=5.0, away_s=0.0)
"""Of a service: its clients are told to come again."""


def warn(event: str, **facts: object) -> None:
    """Log an event as a warning, which Python writes on standard error unless logging is set up otherwise."""
    log.warning("%s", " ".join([event, *(f"{name}={value!r}" for name, value in facts.items())]))


class Retrying:
    """The retries of one process on one database, shared by its threads.

    They end soon once the process ends: when `hurry` is called, or when whoever asks is on its way out by SystemExit
    or KeyboardInterrupt. Where that is caught and the same thread asks again, all is as before. tenacity would not
    shorten `call`: its limits run from what other callers have found, and a pause ends with the process.

    Args:
        timeouts: when it gives up.
        log: called with an event and facts when a wait begins, and when the database is back.
    """

    def __init__(self, timeouts: Timeouts = WORKING, log: Log = warn) -> None:
        self.timeouts, self.log = timeouts, log
        self._failing: dict[bool, float] = {}  # since when it is locked (True), or away (False)
        self._probing = threading.Lock()
        self.probe: Callable[[], object] | None = None
        """Asks a server whether it is back, on a thread of its own: that may take seconds, which no request has."""
        self._prober: threading.Thread | None = None
        self._hurried = threading.Event()
        self._ends_at = inf
        self._leaving: int | None = None  # the thread whose way out has hurried all
        self._exit_before = exit_in_hand()

    def hurry(self) -> None:
        """Have all waiting end within a few seconds, and nothing be asked a second time."""
        self._leaving = None
        if not self._hurried.is_set():
            self._ends_at = monotonic() + HURRY_S
            self._hurried.set()

    def left_s(self, allowed_s: float) -> float:
        """Return for how long something may take that is allowed so many seconds: less where the process ends."""
        if exit_in_hand() not in (None, self._exit_before):
            if not self._hurried.is_set():
                self.hurry()
                self._leaving = threading.get_ident()
        elif self._leaving == threading.get_ident():
            self._leaving, self._ends_at = None, inf
            self._hurried.clear()
        return min(allowed_s, self._ends_at - monotonic())

    def call(self, ask: Callable[[], T], *, away_s: float | None = None) -> T:
        """Return what `ask` returns, and ask again while the database is locked or away.

        Args:
            ask: a whole transaction.
            away_s: in place of the timeout's own.

        Raises:
            UnavailableError: it stayed so for as long as the timeouts allow.
            DatabaseError: anything else.
        """
        away_s = self.timeouts.away_s if away_s is None else away_s
        began, pause_s, told = monotonic(), FIRST_PAUSE_S, False
        while True:
            try:
                found = self._asked(ask, probes=not away_s)
            except UnavailableError as error:
                allowed_s = self.timeouts.locked_s if error.locked else away_s
                # It is waited for once, whoever asks: what fails after it is not waited for again.
                waited_s = monotonic() - self._failing.setdefault(error.locked, began)
                if waited_s >= allowed_s or self._hurried.is_set():
                    tried = f"; it was tried for {monotonic() - began:.0f} s" if told else ""
                    raise UnavailableError(f"{error}{tried}", locked=error.locked) from error
                if not told and (waited_s >= TELL_AFTER_S or not error.locked):
                    self.log("database_waited_for", error=str(error), for_s=allowed_s)
                    told = True
            else:
                self._failing.clear()
                if told:
                    self.log("database_back", after_s=round(monotonic() - began, 1))
                return found
            self._hurried.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _asked(self, ask: Callable[[], T], *, probes: bool) -> T:
        """Ask once. Of threads that would not wait, none does while a server is known to be away."""
        if self.left_s(inf) <= 0:
            raise UnavailableError("the database is not asked any more: the process ends")
        if not probes or False not in self._failing:
            return ask()
        if self.probe is not None:
            self._look_for_it()
            raise UnavailableError("the database is away, as another request has found")
        if not self._probing.acquire(blocking=False):
            raise UnavailableError("the database is away, as another request has found")
        try:
            return ask()
        finally:
            self._probing.release()

    def _look_for_it(self) -> None:
        """Have a thread ask a server whether it is back, until it is."""
        with self._probing:
            if self._prober is None or not self._prober.is_alive():
                self._prober = threading.Thread(target=self._probe, name="probe", daemon=True)
                self._prober.start()

    def _probe(self) -> None:
        began = monotonic()
        while (probe := self.probe) is not None and not self._hurried.wait(PROBE_S):
            try:
                probe()
            except UnavailableError:
                continue
            except DatabaseError:
                pass  # it answers, and says what is wrong to those who ask
            self._failing.pop(False, None)
            self.log("database_back", after_s=round(monotonic() - began, 1))
            return


def retried(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Have a method that is one transaction asked again while the database is locked or away."""

    @wraps(method)
    def asked(self: Any, /, *args: P.args, **named: P.kwargs) -> T:
        retrying: Retrying = self._transactions.retrying
        return retrying.call(lambda: method(self, *args, **named))

    return asked


def exit_in_hand() -> BaseException | None:
    """Return the SystemExit or KeyboardInterrupt that this thread handles, perhaps by way of other errors, if any."""
    error = sys.exception()
    while isinstance(error, Exception):
        error = error.__context__
    return error if isinstance(error, SystemExit | KeyboardInterrupt) else None
