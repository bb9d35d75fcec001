"""Reporting: a job's progress and the sign of life of whoever runs it, written while it runs."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from autotuner.database import Database, Job
from autotuner.errors import DatabaseError
from autotuner.tuner import Progress, Stage, Watch

BEAT_S = 1.0
"""The time after which a job hears that it was cancelled; it ends at its next checkpoint."""

ALSO_AFTER_S = 5.0
TELL_AFTER_S = 1.0
"""Progress is stored once a second; a new stage at once."""

KEEP_AFTER_S = 5.0
"""In a stage that tells nothing, what a job with a limit of seconds has taken is stored so often."""

Log = Callable[..., None]


class CancelledError(Exception):
    """Somebody cancelled the job that runs."""


class JobLostError(Exception):
    """The job that runs belongs to another worker now, or has ended."""


class Beat:
    """A thread that says every few seconds that this process lives, and hears whether its job was cancelled."""

    def __init__(self, database: Database, job: Job, worker: str, also: Callable[[], None], log: Log) -> None:
        self._database, self._job, self._worker = database, job, worker
        self._also, self._log = also, log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self.heard = "go on"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        also_at = time.monotonic() + ALSO_AFTER_S
        while not self._over.wait(BEAT_S):
            try:
                self.heard = self._database.queue.renew(self._job.id, self._worker)
                if time.monotonic() >= also_at:
                    self._also()
                    also_at = time.monotonic() + ALSO_AFTER_S
            except DatabaseError as error:
                self._log("beat_failed", job=self._job.id, error=str(error))


class Reporter:
    """Stores a job's progress, and ends its tuning run when it is cancelled or was given to another worker.

    Args:
        limited: the job has a limit of seconds.
    """

    def __init__(
        self, database: Database, job: Job, worker: str, beat: Beat, watch: Watch, *, limited: bool = False
    ) -> None:
        self._database, self._job, self._worker = database, job, worker
        self._beat, self._watch, self._limited = beat, watch, limited
        self._last: Progress | None = None
        self._heard_at = self._told_at = 0.0

    def stage(self, name: Stage, total: int) -> None:
        """Go on to a stage after the tuning run; what the run found stays."""
        last = self._last or Progress(name, 0, total)
        self(replace(last, stage=name, done=0, total=total, eta_s=None))

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
            with suppress(DatabaseError):  # it is stored with the next progress
                self._store(self._last)
        self._obey()

    def _store(self, progress: Progress) -> None:
        self._told_at = time.monotonic()
        value: dict[str, Any] = progress.to_json()
        self._beat.heard = self._database.queue.renew(
            self._job.id, self._worker, progress=value, advanced=progress.measured > 0
        )

    def _obey(self) -> None:
        if self._beat.heard == "cancel":
            raise CancelledError
        if self._beat.heard == "lost":
            raise JobLostError
