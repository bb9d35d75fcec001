"""Reporting: a job's progress, stored while it runs, and what is to become of it, heard by who runs it."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from autotuner.database import Answer, Database, Job
from autotuner.errors import DatabaseError
from autotuner.tuner import Progress, Stage, Watch

BEAT_S = 1.0
"""The time after which a job hears that it was cancelled; it ends at its next checkpoint."""

PATIENCE_S = 1.0
"""The time for which a tuning run waits until its progress is stored; then it goes on meanwhile."""

ALSO_AFTER_S = 5.0
TELL_AFTER_S = 1.0
"""Progress is stored once a second; a new stage at once."""

TRACE_MAX = 120
TRACED = ("measured", "reused", "failed", "best_us", "bound_us")
"""Of a job's progress over time: moments that are kept, and what is kept of each."""

KEEP_AFTER_S = 5.0
"""In a stage that tells nothing, what a job with a limit of seconds has taken is stored so often."""

Log = Callable[..., None]


class CancelledError(Exception):
    """Somebody cancelled the job that runs."""


class JobLostError(Exception):
    """Another attempt has the job that runs, or it has ended."""


class Beat:
    """A thread that stores how far a job is, and hears every second whether it was cancelled.

    While the database is away, what works on the job goes on: the thread waits, and stores the latest progress after.
    """

    def __init__(self, database: Database, job: Job, also: Callable[[], None], log: Log) -> None:
        self._database, self._job, self._also, self._log = database, job, also, log
        self._over = False
        self._changed = threading.Condition()
        self._waiting: tuple[dict[str, Any], bool] | None = None
        self._stores = self._is_behind = False
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self.heard: Answer = "go on"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def tell(self, progress: Mapping[str, Any], *, advanced: bool) -> None:
        """Have progress stored, and wait for that; not where the database takes its time."""
        with self._changed:
            self._waiting = dict(progress), advanced or (self._waiting is not None and self._waiting[1])
            self._changed.notify_all()
            if not self._is_behind:
                self._is_behind = not self._changed.wait_for(self._is_idle, PATIENCE_S)

    def flush(self) -> None:
        """Wait until all progress is stored, or until the database was given up."""
        with self._changed:
            self._changed.wait_for(self._is_idle)

    def _is_idle(self) -> bool:
        return self._waiting is None and not self._stores

    def _run(self) -> None:
        also_at = time.monotonic() + ALSO_AFTER_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._waiting is not None, BEAT_S)
                if self._over:
                    return
                (progress, advanced), self._waiting = self._waiting or (None, False), None
                self._stores = True
            try:
                self.heard = self._database.queue.report(
                    self._job.id, self._job.attempt, progress=progress, advanced=advanced
                )
                if time.monotonic() >= also_at:
                    self._also()
                    also_at = time.monotonic() + ALSO_AFTER_S
            except DatabaseError as error:
                self._log("beat_failed", job=self._job.id, error=str(error))
            except Exception as error:  # whatever it is, a job does not go on unheard because of it
                self._log("beat_failed", job=self._job.id, error=f"{type(error).__name__}: {error}")
            finally:
                with self._changed:
                    self._stores = self._is_behind = False
                    self._changed.notify_all()


class Trace:
    """A job's progress over time, as few moments as a chart needs: where there are too many, every other one goes.

    Args:
        points: of the attempts before.
    """

    def __init__(self, points: Iterable[Mapping[str, Any]] = ()) -> None:
        self.points: list[dict[str, Any]] = [dict(point) for point in points]

    def note(self, progress: Progress) -> None:
        """Note how far a job is now."""
        told = {name: getattr(progress, name) for name in TRACED}
        if self.points and all(self.points[-1][name] == value for name, value in told.items()):
            return
        self.points.append({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **told})
        if len(self.points) > TRACE_MAX:
            self.points = [self.points[0], *self.points[2::2]]


class Reporter:
    """Tells a job's progress, and ends its tuning run when it is cancelled or another attempt has it.

    Args:
        limited: the job has a limit of seconds.
        trace: of the attempts before.
    """

    def __init__(self, beat: Beat, watch: Watch, *, limited: bool = False, trace: Trace | None = None) -> None:
        self._beat, self._watch, self._limited = beat, watch, limited
        self._trace = trace or Trace()
        self._last: Progress | None = None
        self._heard_at = self._told_at = 0.0

    def stage(self, name: Stage, total: int) -> None:
        """Go on to a stage after the tuning run; what the run found stays."""
        last = self._last or Progress(name, 0, total)
        self(replace(last, stage=name, done=0, total=total, eta_s=None, left_s=None))

    def wait(self, note: str) -> None:
        """Say what is waited for, at the progress of before."""
        if self._last is not None:
            self(replace(self._last, note=note))

    def __call__(self, progress: Progress) -> None:
        self._watch(progress)
        last = self._last
        is_new = last is None or (progress.stage, progress.note) != (last.stage, last.note)
        self._last, self._heard_at = progress, time.monotonic()
        if is_new or time.monotonic() - self._told_at > TELL_AFTER_S:
            self._store(progress)
        self._obey()

    def look(self) -> None:
        """Be asked whether the job goes on, at each checkpoint of what works on it."""
        silent_s = time.monotonic() - self._heard_at
        if self._last is not None and self._limited and silent_s > KEEP_AFTER_S:
            self._last = replace(self._last, spent_s=self._last.spent_s + silent_s)
            self._heard_at = time.monotonic()
            self._store(self._last)
        self._obey()

    def _store(self, progress: Progress) -> None:
        self._told_at = time.monotonic()
        self._trace.note(progress)
        self._beat.tell({**progress.to_json(), "trace": self._trace.points}, advanced=progress.measured > 0)

    def _obey(self) -> None:
        if self._beat.heard == "cancel":
            raise CancelledError
        if self._beat.heard == "lost":
            raise JobLostError
