"""Reporting: a job's progress and the sign of life of whoever runs it, written while it runs."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from autotuner.database import Database, Job
from autotuner.errors import DatabaseError
from autotuner.tuner import Progress, Stage, Watch

BEAT_S = 5.0
TELL_AFTER_S = 1.0
"""Progress is stored once a second; a new stage at once."""

Log = Callable[..., None]


class CancelledError(Exception):
    """Somebody cancelled the job that runs."""


class LostError(Exception):
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
        while not self._over.wait(BEAT_S):
            try:
                self.heard = self._database.queue.renew(self._job.id, self._worker)
                self._also()
            except DatabaseError as error:
                self._log("beat_failed", job=self._job.id, error=str(error))


class Reporter:
    """Stores a job's progress, and ends its walk when it is cancelled or was given to another worker."""

    def __init__(self, database: Database, job: Job, worker: str, beat: Beat, watch: Watch) -> None:
        self._database, self._job, self._worker = database, job, worker
        self._beat, self._watch = beat, watch
        self._last: Progress | None = None
        self._told_at = 0.0

    def stage(self, name: Stage, total: int) -> None:
        """Go on to a stage after the walk; what the walk found stays."""
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
        self._last = progress
        now = time.monotonic()
        heard = self._beat.heard
        if is_new or now - self._told_at > TELL_AFTER_S:
            self._told_at = now
            value: dict[str, Any] = progress.to_json()
            heard = self._database.queue.renew(
                self._job.id, self._worker, progress=value, advanced=progress.measured > 0
            )
        if heard == "cancel":
            raise CancelledError
        if heard == "lost":
            raise LostError
