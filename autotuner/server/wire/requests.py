"""Bodies and queries that a client sends."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from autotuner.ir.numerics import Numerics, listed_classes
from autotuner.ir.records import Status
from autotuner.server.wire.values import (
    BYTES_MAX,
    INTEGER_MAX,
    OPTIONS_MAX,
    PAGE,
    PRIORITY_MAX,
    Axis,
    Cursor,
    Dtype,
    Extent,
    Integer,
    JobStateName,
    Key,
    PageLimit,
    RoleName,
    Text,
    Truth,
)
from autotuner.settings import TuneOptions

_ALSO = "`{name}`: also {numbers}"


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
    numerics: Numerics = "exact"
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
    `budget_bytes` asks for what was tuned with this budget, and without it for what was tuned with none; `numerics`
    likewise for what was tuned with these.
    """

    model: Annotated[
        Text | None,
        Field(examples=["bert-encoder:base"], description="A model of the service, with or without a preset."),
    ] = None
    family: Annotated[Key | None, _said("In place of `model`: the family of a job, as `GET /v1/jobs` has it.")] = None
    extent: Annotated[
        list[Annotated[str, Field(pattern=r"^[a-zA-Z]=[1-9][0-9]{0,9}$")]],
        Field(max_length=52, description="Elements along an axis, such as `l=128`; once for each axis."),
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
    numerics: Annotated[
        Numerics,
        _said(
            f"What it may save for backward, {listed_classes(_ALSO, ', ', for_memory=True)}; or what products with "
            f"weights may be of, {listed_classes(_ALSO, ', ', for_memory=False)}. By default neither."
        ),
    ] = "exact"


class ConfigurationsQuery(Query):
    """Filter of configurations: those in which each word of `search` occurs; those with a lesser id than `before`."""

    search: Annotated[
        str,
        Field(
            max_length=200,
            pattern=r"^[^\x00-\x1f]*$",
            description="Words that must occur in model, dtype or device.",
            examples=["bert tiny"],
        ),
    ] = ""
    limit: Annotated[PageLimit, _said("At most so many configurations.")] = PAGE
    before: Annotated[Cursor | None, _said("Only configurations with a lesser id, as `next` of a page has it.")] = None


class NewToken(Body):
    """A token to be made for a client; without `expires_in_days` it is valid until it is revoked."""

    name: Annotated[str, Field(max_length=100, pattern=r"^[ -~]*$")] = ""
    role: RoleName
    expires_in_days: Annotated[int, Field(ge=1, le=3650, strict=True), Integer] | None = None


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
    statistics: Annotated[bool, Truth, _said("Count all that the filters admit, not only this page.")] = False
