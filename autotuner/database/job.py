"""A job as the database remembers it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

JobState = Literal["running", "finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Job:
    """One tuning run: what was asked, where, and how it ended.

    Args:
        id: given by the database, rising.
        model: model and preset, for people.
        graph_key: key of the training graph.
        request_key: key of all that was asked; equal requests have equal keys.
        request: what was asked, as JSON.
        environment_key: where it ran.
        state: `running` until it is finished, failed or interrupted.
        counts: what it did, by name ("measured", "reused", "failed" ...).
        finished_at: None while it runs; both times are in UTC.
        message: the sentence that goes with failed and interrupted.
    """

    id: int
    model: str
    graph_key: str
    request_key: str
    request: Mapping[str, Any]
    environment_key: str
    state: JobState
    counts: Mapping[str, int]
    started_at: datetime
    finished_at: datetime | None
    message: str
