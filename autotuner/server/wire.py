"""Bodies and queries that service and client share, as Pydantic models.

Times of day are in UTC.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from autotuner.ir.models.bounds import EXTENT_MAX
from autotuner.ir.records import Scalar, Status
from autotuner.settings import TuneOptions

PAGE = 50
PAGE_MAX = 1000
AXIS = r"^[a-z]$"
INTEGER_MAX = 2**63 - 1
"""The largest integer that the database stores."""

BYTES_MAX = 2**50
"""Above what any device has, and exact as a float, as some readers of JSON take every number."""

OPTIONS_MAX = 64
TEXT_MAX = 1000
"""Characters of any text in a body, above what a model file needs."""

JobStateName = Literal["queued", "running", "finished", "failed", "cancelled", "interrupted"]
MatchName = Literal["exact", "doubtful", "near_device", "near_shape", "none"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Axis = Annotated[str, Field(pattern=AXIS)]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]
Identifier = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _integer(value: Any) -> Any:
    """Read an integer of a body: 980.0 is one, as JSON Schema has it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digits(value: Any) -> Any:
    """Read an integer of a URL or a header: digits alone, which is less than Python takes for one."""
    if not isinstance(value, str):
        return value
    if not (value.isascii() and value.isdigit()) or len(value) > 20:
        raise PydanticCustomError("whole_number", "Input should be a whole number in decimal digits, within 64 bits")
    return int(value)


def _truth(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise PydanticCustomError("true_or_false", "Input should be true or false")


Integer = BeforeValidator(_integer)
Digits = BeforeValidator(_digits)
Extent = Annotated[int, Field(ge=1, le=EXTENT_MAX, strict=True), Integer]
Id = Annotated[int, Field(ge=1, le=INTEGER_MAX), Digits]
Cursor = Annotated[int, Field(ge=0, le=INTEGER_MAX), Digits]
PageLimit = Annotated[int, Field(ge=1, le=PAGE_MAX), Digits]


PRIORITY_MAX = 100
"""Of a job that an admin submits; a submitter's is at most 0."""

KEY_PATTERN = r"^[\x21-\x7e]{1,200}$"
"""Of an idempotency key: visible ASCII, with or without quotes around it."""


class Body(BaseModel):
    """A body with exactly these fields; a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SubmittedLimits(Body):
    """Limits of the job's measuring, after which it answers with the best plan so far; null for no limit."""

    seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    measurements: Annotated[int, Field(ge=1, le=10**9, strict=True), Integer] | None = None


class SubmittedDevice(Body):
    """Device to tune for: a device type, and perhaps the name of one device as `GET /v1/devices` lists it."""

    type: Text = "cpu"
    name: Text | None = None


class SubmittedJob(Body):
    """A tuning job: a model that the service knows ("bert-encoder:tiny"), or the content of a model file."""

    model: Text | dict[str, JsonValue]
    preset: Text | None = None
    extents: dict[Axis, Extent] = {}
    options: dict[Text, bool | int | float | Text] = {}
    dtype: Dtype | None = None
    device: SubmittedDevice = SubmittedDevice()
    gap: Annotated[float, Field(ge=0, le=1e9)] | None = None
    estimated_gap: Annotated[float, Field(ge=0, le=1e9)] | None = None
    budget_bytes: Annotated[int, Field(ge=1, le=BYTES_MAX, strict=True), Integer] | None = None
    exhaustive: bool = False
    limits: SubmittedLimits = SubmittedLimits()
    again: bool = False
    retry: bool = False
    remeasure: bool = False
    end_to_end: bool = True
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX, strict=True), Integer] = 0

    def tune_options(self) -> TuneOptions:
        return TuneOptions.from_json(self.model_dump(include=set(TuneOptions.names())))


class Query(BaseModel):
    """The part of a URL after the question mark; a name that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _said(description: str) -> Any:
    """Describe a query parameter."""
    return Field(description=description)


class JobsQuery(Query):
    """Filter of jobs: all, or those of one state; those with a lesser id than `before`."""

    state: Annotated[JobStateName | None, _said("Only jobs of this state.")] = None
    limit: Annotated[PageLimit, _said("At most so many jobs.")] = PAGE
    before: Annotated[Cursor | None, _said("Only jobs with a lesser id, as `next` of a page has it.")] = None


class BestQuery(Query):
    """Target of a configuration: `model`, or the `family` of a job together with `dtype` and an `extent` per axis.

    `extent` and `option` are written as in the command line, `l=128` and `activation=relu`, once for each; the value
    of an option may be written as JSON. `device_name` is for one device, without it any of the type will do.
    `budget_bytes` asks for what was tuned with this budget, and without it for what was tuned with none.
    """

    model: Annotated[
        Text | None,
        Field(examples=["bert-encoder:base"], description="A model of the service, with or without a preset."),
    ] = None
    family: Annotated[Key | None, _said("In place of `model`: the family of a job, as `GET /v1/jobs` has it.")] = None
    extent: Annotated[
        list[Annotated[str, Field(pattern=r"^[a-z]=[1-9][0-9]{0,9}$")]],
        Field(max_length=26, description="Elements along an axis, such as `l=128`; once for each axis."),
    ] = []
    option: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f]+$", max_length=300)]],
        Field(max_length=OPTIONS_MAX, description="An option of the model, such as `activation=relu`; once for each."),
    ] = []
    dtype: Annotated[Dtype | None, _said("Of inputs, parameters and activations; by default the model's.")] = None
    device_type: Annotated[Text, _said("What it shall run on, such as `cpu` or `cuda`.")] = "cpu"
    device_name: Annotated[Text | None, _said("One device, as `GET /v1/devices` names it; by default any.")] = None
    budget_bytes: Annotated[
        Annotated[int, Field(ge=1, le=INTEGER_MAX)] | None,
        _said("The memory budget that it was tuned with; by default it was tuned without one."),
    ] = None


class MeasurementsQuery(Query):
    """Filter of measurements: those with these values; those with a greater id than `after`.

    `kinds` are those of all operators of a call in their order, such as `contraction` or `bias+gelu_erf`.
    """

    environment_key: Annotated[Key | None, _said("Only of this environment, as `GET /v1/devices` has it.")] = None
    device_type: Annotated[Text | None, _said("Only of devices of this type.")] = None
    signature: Annotated[Key | None, _said("Only of this operator, or of these fused ones.")] = None
    kernel: Annotated[Text | None, _said("Only of this kernel.")] = None
    kinds: Annotated[
        Annotated[str, Field(pattern=r"^[a-z_]+(\+[a-z_]+)*$", max_length=1000)] | None,
        _said("Only of operators of these kinds in this order, such as `bias+gelu_erf`."),
    ] = None
    status: Annotated[Status | None, _said("Only those that ended so.")] = None
    limit: Annotated[PageLimit, _said("At most so many measurements.")] = PAGE
    after: Annotated[Cursor | None, _said("Only those with a greater id, as `next` of a page has it.")] = None
    statistics: Annotated[
        bool, BeforeValidator(_truth), _said("Count all that the filters admit, not only this page.")
    ] = False


class ResponseBody(BaseModel):
    """A body that the service sends; a client ignores fields that it does not know."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


STAGES = {
    "space": "enumerating",
    "search": "searching launch parameters",
    "ceilings": "measuring ceilings",
    "compile": "compiling",
    "measure": "measuring",
    "confirm": "confirming",
    "solve": "solving",
    "end_to_end": "timing end to end",
    "done": "done",
}
"""Words for each stage of a job."""


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
