"""Backlog: results of a tuning run that wait in memory while the database is away, so that measuring goes on."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic

from autotuner.database.retrying import Retrying, exit_in_hand
from autotuner.errors import DatabaseError, UnavailableError
from autotuner.ir.records import Call, Measurement

Result = tuple[Call, Measurement]
Store = Callable[[str, Iterable[Result], bool], int]

PATIENCE_S = 1.0
"""A run waits so long for results to be stored; then it goes on meanwhile."""

LOOK_S = 5.0
"""While the database is away, it is asked so often what others have measured; less often where it takes its time."""


class Backlog:
    """Stores results on a thread of its own, in the order in which they came.

    Where the database answers, whoever puts results waits until they are stored. Where it does not, they wait up to the
    timeouts of the database; then what comes next fails, and says how many are not stored.
    """

    def __init__(self, store: Store, retrying: Retrying) -> None:
        self._store, self._retrying = store, retrying
        self._waiting: deque[tuple[str, list[Result], bool]] = deque()
        self._changed = threading.Condition()
        self._over = self._is_behind = False
        self._error: DatabaseError | None = None
        self._away_since: float | None = None
        self._ask_again_at = -inf
        self.has_begun = False
        self._thread = threading.Thread(target=self._run, name="backlog", daemon=True)
        self._thread.start()

    def put(self, environment_key: str, results: Iterable[Result], *, replace: bool) -> int:
        """Have results stored, and return their number.

        Raises:
            DatabaseError: these, or earlier ones, cannot be stored.
        """
        given = list(results)
        with self._changed:
            self._waiting.append((environment_key, given, replace))
            self.has_begun = True
            self._changed.notify_all()
            if not self._is_behind:
                self._is_behind = not self._changed.wait_for(self._is_idle, PATIENCE_S)
            self._check()
        return len(given)

    def waiting(self, environment_key: str) -> dict[str, Measurement]:
        """Return the results that wait, by call key."""
        with self._changed:
            batches = [results for key, results, _ in self._waiting if key == environment_key]
        return {call.key: measurement for results in batches for call, measurement in results}

    def looked_up(
        self, environment_key: str, ask: Callable[[float | None], dict[str, Measurement]]
    ) -> dict[str, Measurement]:
        """Return what is known by the database and here; while the database is away, what is known here.

        Args:
            ask: asks the database, and gives up after so many seconds; after those of its timeouts for None.
        """
        now = monotonic()
        patient = None if not self.has_begun or self._is_too_long(now) else PATIENCE_S
        found: dict[str, Measurement] = {}
        if patient is None or self._away_since is None or now > self._ask_again_at:
            try:
                found = ask(patient)
                self._away_since = None
            except UnavailableError:
                if patient is None:
                    raise
                self._away_since = now if self._away_since is None else self._away_since
                self._ask_again_at = monotonic() + max(LOOK_S, 4 * (monotonic() - now))
        return found | self.waiting(environment_key)

    def close(self) -> None:
        """Wait until all is stored, and end the thread.

        Raises:
            DatabaseError: something cannot be stored.
        """
        if exit_in_hand() is not None:
            self._retrying.left_s(inf)  # from now on, the database may take seconds only
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()
        self._check()

    def _is_too_long(self, now: float) -> bool:
        return self._away_since is not None and now - self._away_since > self._retrying.timeouts.away_s

    def _is_idle(self) -> bool:
        return not self._waiting or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            number = sum(len(results) for _, results, _ in self._waiting)
            raise type(self._error)(
                f"{self._error}; {number} results that were measured are not stored"
            ) from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._waiting)
                if not self._waiting:
                    return
                environment_key, results, replace = self._waiting[0]
            try:
                self._store(environment_key, results, replace)
            except Exception as error:
                told = error if isinstance(error, DatabaseError) else DatabaseError(f"{type(error).__name__}: {error}")
                with self._changed:
                    self._error = told
                    self._changed.notify_all()
                return
            with self._changed:
                self._waiting.popleft()
                self._is_behind = bool(self._waiting)
                self._changed.notify_all()
