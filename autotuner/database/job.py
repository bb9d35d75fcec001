"""A job and a worker as the database remembers them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

JobState = Literal["queued", "running", "finished", "failed", "cancelled", "interrupted"]
ENDED: tuple[JobState, ...] = ("finished", "failed", "cancelled", "interrupted")


@dataclass(frozen=True, slots=True)
class Job:
    """One tuning run: what was asked, how far it is, and how it ended. Times of day are in UTC.

    Args:
        id: given by the database, rising.
        model: model and preset, for people.
        request: what was asked, as JSON.
        device_type, device_name: where it may run; a name of None is any device of the type.
        attended: whether the process that asked runs it itself; if it is killed, nobody goes on with the job.
        state: `queued`, `running`, or how it ended.
        cancelling: it was cancelled while it ran, and has yet to stop.
        worker: who runs it, or ran it last.
        progress: how far it is, as JSON.
        revision: rises with every change of the job.
        counts: what it did, by name ("measured", "reused", "failed" ...).
        configuration_id: the answer, once finished.
        message: the sentence that goes with an end that is no answer.
        is_lost: it is `running`, and who ran it is gone: nobody works on it.
    """

    id: int
    model: str
    request: Mapping[str, Any]
    device_type: str
    device_name: str | None
    attended: bool
    state: JobState
    cancelling: bool
    worker: str | None
    progress: Mapping[str, Any]
    revision: int
    counts: Mapping[str, int]
    configuration_id: int | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    message: str
    is_lost: bool = False

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that owns a device and takes jobs for it."""

    name: str
    device_type: str
    device_name: str
    started_at: datetime
    seen_at: datetime
