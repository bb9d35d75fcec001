"""Values that the database takes and returns: filters, stored measurements and configurations, matches, jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from autotuner.ir.records import Call, Measurement, Status

JobState = Literal["queued", "running", "finished", "failed", "cancelled", "interrupted"]
ENDED: tuple[JobState, ...] = ("finished", "failed", "cancelled", "interrupted")
Answer = Literal["go on", "cancel", "lost"]
MatchStatus = Literal["exact", "doubtful", "near_device", "near_shape", "none"]


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on measurements; a field of None admits all.

    Args:
        signature: `Call.subgraph.signature`.
        kinds: `Call.subgraph.kinds`, all of them in order.
    """

    environment_key: str | None = None
    device_type: str | None = None
    signature: str | None = None
    kernel: str | None = None
    kinds: Sequence[str] | None = None
    status: Status | None = None


EVERY = Filter()


@dataclass(frozen=True, slots=True)
class StoredMeasurement:
    """A measurement with its call, its environment and the time of day."""

    id: int
    environment_key: str
    call: Call
    measurement: Measurement
    measured_at: datetime


@dataclass(frozen=True, slots=True)
class Statistics:
    """The number of measurements by status, and the least, mean and greatest of their medians."""

    statuses: Mapping[Status, int]
    least_us: float | None
    mean_us: float | None
    greatest_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConfiguration:
    """A configuration as it is stored.

    Args:
        id: given by the database, rising.
        text: the configuration as JSON.
        complete: whether all that could matter had been measured.
        total_us: predicted, for one step.
        measured_us: measured end to end, where it was.
        doubts: why it is worth measuring again, in sentences.
    """

    id: int
    text: str
    dtype: str
    extents: Mapping[str, int]
    complete: bool
    device_type: str
    device_name: str
    environment_key: str
    total_us: float
    measured_us: float | None
    created_at: datetime
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The best configuration that is known for a model on a device.

    Args:
        status: "exact"; "doubtful": the same, measured under bad conditions; "near_device": tuned on another
            device; "near_shape": on the device, with other extents.
        differs: the fields in which it is not what was asked for, such as "device_name" or "extents.b".
        stored: None where the status is "none".
    """

    status: MatchStatus
    differs: tuple[str, ...] = ()
    stored: StoredConfiguration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedConfiguration:
    """A configuration as lists show it, without its document.

    Args:
        model: its name, with the preset where it has one.
        proven_gap: share by which it may be longer than the optimum; None where that is not known.
        default_us: every operator alone, with every tensor as declared; None where that is not known.
        budget_bytes: the memory budget that it was made for; None for none.
    """

    id: int
    model: str
    dtype: str
    extents: Mapping[str, int]
    complete: bool
    device_type: str
    device_name: str
    environment_key: str
    total_us: float
    measured_us: float | None
    proven_gap: float | None
    default_us: float | None
    budget_bytes: int | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One tuning run: its request, its progress, and its end.

    Args:
        id: given by the database, rising.
        model: model and preset, for people.
        request: as JSON; empty in lists of summaries, and once a job with a large one has ended.
        device_type, device_name: where it may run; a name of None is any device of the type.
        attended: whether the process that asked runs it itself; if it is killed, nobody goes on with the job.
        state: `queued`, `running`, or how it ended.
        cancelling: it was cancelled while it ran, and has yet to stop.
        worker: name of the runner that has it, or had it last.
        attempt: the number of times that it was taken; what is said of an earlier attempt changes nothing.
        priority: of jobs that wait, a higher one is taken first.
        progress: as JSON.
        revision: rises with every change of the job.
        counts: what it did, by name ("measured", "reused", "failed" ...).
        configuration_id: the answer, once finished.
        message: the sentence that goes with an end that is no answer.
        client: who submitted it to a service.
        summary: what lists tell of the request, where that was given.
        is_lost: it is `running`, and its runner is gone: nobody works on it.
        waits_for: the job that runs with an equal request; this one waits for its end.
        is_new: it was stored by the very call that returned it.
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
    attempt: int
    priority: int
    progress: Mapping[str, Any]
    revision: int
    counts: Mapping[str, int]
    configuration_id: int | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    message: str
    client: str = ""
    summary: Mapping[str, Any] | None = None
    is_lost: bool = False
    waits_for: int | None = None
    is_new: bool = field(default=False, compare=False)

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class FleetGpu:
    """A GPU of a fleet as it was seen last.

    Args:
        slot: its place in the cluster, as "NODE/0".
        device_name: "" where it never said what it is.
        used: it takes part in measuring.
        reason: why it takes no part, or what is odd about it.
        canary_us: the time of the call that all GPUs of a fleet are compared by.
    """

    slot: str
    device_type: str
    device_name: str
    used: bool
    reason: str = ""
    _: KW_ONLY
    host: str = ""
    uuid: str = ""
    canary_us: float | None = None
    seen_at: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)


@dataclass(frozen=True, slots=True)
class Worker:
    """Somebody who takes jobs for a device.

    Args:
        memory_bytes: of the device; None where that was not told.
    """

    name: str
    device_type: str
    device_name: str
    started_at: datetime
    memory_bytes: int | None = None
