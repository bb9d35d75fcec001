"""Bodies that the service sends."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from autotuner.ir.numerics import Numerics
from autotuner.ir.records import Scalar, Status
from autotuner.server.wire.requests import SubmittedLimits
from autotuner.server.wire.values import JobStateName, MatchName, RoleName


class ResponseBody(BaseModel):
    """A body that the service sends; a client ignores fields that it does not know."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class ProgressView(ResponseBody):
    """Progress of a job: `done` of `total` calls of this stage; the best plan so far, and by what share it may take
    longer than the best there can be: `gap` is proven, `estimated_gap` follows from learned costs. `eta_s` is until
    this stage is over, `left_s` until the plan is chosen. `note` says what is waited for.
    """

    stage: str
    done: int
    total: int
    measured: int
    reused: int
    failed: int
    best_us: float | None
    bound_us: float | None
    gap: float | None
    estimated_gap: float | None = None
    eta_s: float | None
    left_s: float | None = None
    note: str = ""


class JobView(ResponseBody):
    """A job; `revision` rises with every change, `family` is the key of its model for `GET /v1/configurations/best`.

    Of jobs that wait, those of a higher `priority` are taken first; `attempt` counts how often it was taken.
    `waits_for` is the job that runs with the same request: one that waits for it goes on from what it has measured.
    `stalled` says in a sentence why nobody works on a job that is `running`; it is empty where somebody does. `client`
    is who submitted it: "token 3", or an address.
    """

    id: int
    state: JobStateName
    cancelling: bool
    attended: bool
    model: str
    family: str
    extents: dict[str, int]
    options: dict[str, Scalar]
    dtype: str
    device_type: str
    device_name: str | None
    gap: float | None
    estimated_gap: float | None = None
    budget_bytes: int | None = None
    numerics: Numerics = "exact"
    exhaustive: bool = False
    limits: SubmittedLimits
    worker: str | None
    attempt: int = 0
    priority: int = 0
    progress: ProgressView | None
    counts: dict[str, int]
    configuration_id: int | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    message: str
    revision: int
    stalled: str = ""
    waits_for: int | None = None
    client: str = ""

    @property
    def ended(self) -> bool:
        return self.state not in ("queued", "running")


class TracePoint(ResponseBody):
    """Progress of a job at a moment: calls so far, the predicted time of the best plan, and the proven bound."""

    at: datetime
    measured: int
    reused: int
    failed: int
    best_us: float | None
    bound_us: float | None


class TraceView(ResponseBody):
    """A job's progress over time, as its worker has noted it: at most some hundred moments, the first one first."""

    points: list[TracePoint]


class JobPage(ResponseBody):
    """Jobs, the newest first; `next` is the value of `before` for the page after this one, null on the last."""

    items: list[JobView]
    next: int | None


class ConfigurationView(ResponseBody):
    """A configuration with where it comes from; `configuration` is the document that `autotuner.apply` runs.

    `doubts` says in sentences why it is worth measuring again; then it is not `complete`.
    """

    id: int
    dtype: str
    extents: dict[str, int]
    complete: bool
    device_type: str
    device_name: str
    environment_key: str
    predicted_us: float
    measured_us: float | None
    created_at: datetime
    doubts: list[str] = []
    configuration: dict[str, Any]


class ListedConfigurationView(ResponseBody):
    """A configuration in a list; `default_us` is every operator alone, with every tensor as declared."""

    id: int
    model: str
    dtype: str
    extents: dict[str, int]
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


class ConfigurationPage(ResponseBody):
    """Configurations, the newest first; `next` is the value of `before` for the next page, null on the last."""

    items: list[ListedConfigurationView]
    next: int | None


class BestView(ResponseBody):
    """The best configuration known for a model on a device, how good a match it is, and in which fields it differs."""

    match: MatchName
    differs: list[str]
    message: str
    best: ConfigurationView | None


class MeasurementView(ResponseBody):
    """Measurement of a call in an environment: its time, or why there is none.

    `marks` say under which conditions: `eliminated` (dropped early: the least of a few looks), `contended`, `drifted`.
    """

    id: int
    environment_key: str
    call_key: str
    signature: str
    kinds: list[str]
    kernel: str
    forms: list[str]
    params: dict[str, Any]
    extents: list[list[int]]
    status: Status
    median_us: float | None
    low_us: float | None
    high_us: float | None
    samples: int
    workspace_bytes: int
    message: str
    marks: list[str] = []
    measured_at: datetime


class StatisticsView(ResponseBody):
    """Statistics of all measurements that the filters admit, not only of this page."""

    statuses: dict[Status, int]
    least_us: float | None
    mean_us: float | None
    greatest_us: float | None


class MeasurementPage(ResponseBody):
    """Measurements in the order of their ids; `next` is the value of `after` for the next page, null on the last."""

    items: list[MeasurementView]
    next: int | None
    statistics: StatisticsView | None


class EnvironmentView(ResponseBody):
    """A device with versions and measuring policy, in which timings are comparable."""

    key: str
    facts: dict[str, Any]
    policy: dict[str, Any]
    measurements: dict[Status, int]


class WorkerView(ResponseBody):
    """A worker that takes jobs; `memory_bytes` is that of its device, where it tells it."""

    name: str
    started_at: datetime
    memory_bytes: int | None = None


class GpuView(ResponseBody):
    """A GPU of a fleet as it was seen last; `reason` says why it is not `used`, or what is odd about it."""

    slot: str
    host: str
    uuid: str
    used: bool
    reason: str
    canary_us: float | None
    seen_at: datetime


class DeviceView(ResponseBody):
    """A device that somebody measured on, or for which a worker takes jobs; `name` is "" of GPUs that tell no name."""

    type: str
    name: str
    workers: list[WorkerView]
    environments: list[EnvironmentView]
    gpus: list[GpuView] = []


class ModelView(ResponseBody):
    """A model file of the service: its axes, presets and options."""

    name: str
    dtype: str
    axes: dict[str, str]
    presets: dict[str, dict[str, int]]
    options: dict[str, Any]


class CallerView(ResponseBody):
    """The client that asks, "token 3" or an address, and its role; `needs_token`: the service asks for tokens."""

    name: str
    role: RoleName
    needs_token: bool
    version: str


class TokenView(ResponseBody):
    """A token of a client, without its text."""

    id: int
    name: str
    role: RoleName
    state: Literal["valid", "expired", "revoked"]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class MadeTokenView(ResponseBody):
    """A new token: its text, which is shown this once."""

    token: str
    made: TokenView


class Health(ResponseBody):
    status: Literal["ok"]
    version: str
    queued: int
    running: int
    workers: int


class Liveness(ResponseBody):
    status: Literal["alive"]


class Readiness(ResponseBody):
    status: Literal["ready"]


class ProblemDetails(ResponseBody):
    """Problem details (RFC 9457) of a request that failed; `errors` names the fields that are not valid."""

    model_config = ConfigDict(title="Problem")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: list[Mapping[str, Any]] | None = None
