"""What is submitted -> the request that a worker runs: models are looked up or checked, and bounded."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from autotuner.database import Database
from autotuner.errors import GraphError, ModelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, ModelFile, search_spaces_dir
from autotuner.ir.models.bounds import EXTENT_MAX
from autotuner.ir.models.schema import Axes, Definition, Input, Name, OperatorEntry, Option
from autotuner.server.http.modelfiles import ModelFiles, instantiated
from autotuner.server.wire import OPTIONS_MAX, Axis, Extent, Integer, SubmittedJob, Text
from autotuner.tuner.request import Request

OPERATORS_MAX = 256
"""Eight encoder layers written out, fewer than a model file may have: anybody may submit."""

SENT = "the model that was sent"

TENSORS_MAX = 1024
PRESETS_MAX = 64
NAME_MAX = 100

TensorName = Annotated[Name, StringConstraints(max_length=NAME_MAX)]


class InlineModel(Definition):
    """The content of a model file, as JSON, within the bounds of what a service takes from anybody."""

    version: Annotated[Literal[1], Integer]
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=NAME_MAX)]
    axes: Annotated[dict[Axis, Annotated[str, Field(max_length=200)]], Field(max_length=26)]
    options: dict[TensorName, Option] = Field({}, max_length=OPTIONS_MAX)
    presets: dict[Text, dict[Axis, Extent]] = Field({}, max_length=PRESETS_MAX)
    inputs: Annotated[dict[TensorName, Input], Field(max_length=TENSORS_MAX)]
    parameters: dict[TensorName, Axes] = Field({}, max_length=TENSORS_MAX)
    operators: Annotated[list[OperatorEntry], Field(min_length=1, max_length=OPERATORS_MAX)]
    outputs: Annotated[list[TensorName], Field(min_length=1, max_length=TENSORS_MAX)]


def _given(model: Any) -> str:
    return "reference" if isinstance(model, str) else "file"


class Submission(SubmittedJob):
    """A tuning job: a model that the service knows ("bert-encoder:tiny"), or the content of a model file."""

    model: Annotated[  # type: ignore[assignment]
        Annotated[Text, Tag("reference")] | Annotated[InlineModel, Tag("file")], Discriminator(_given)
    ]


def request_of(submission: Submission, files: ModelFiles, database: Database) -> Request:
    """Return the request of a submission.

    Raises:
        NotFoundError: there is no such model or preset.
        InputError: a value contradicts the model, the model contradicts itself or is too large, or nobody tunes for
            such a device.
    """
    model = _model(submission, files)
    _check_backward(model, submission)
    check_device_type(submission.device.type, database)
    return Request(model, submission.device.type, submission.device.name, submission.tune_options())


def _model(submission: Submission, files: ModelFiles) -> Model:
    given, preset = submission.model, submission.preset
    extents, options, dtype = submission.extents, submission.options, submission.dtype
    if isinstance(given, InlineModel):
        return instantiated(ModelFile(SENT, given), preset, extents, options, dtype)
    named = given.partition(":")[2]
    if preset is not None and named and named != preset:
        raise ModelError(f"model {given!r} names preset {named!r}, and `preset` is {preset!r}: name one")
    reference = given if preset is None or named else f"{given}:{preset}"
    return files.model(reference, extents, options, dtype)


def _check_backward(model: Model, submission: Submission) -> None:
    """Check that a model can be differentiated.

    Raises:
        ModelError: it cannot; the message names the operator.
    """
    try:
        training_graph(model.graph())
    except GraphError as error:
        origin = SENT if isinstance(submission.model, InlineModel) else f"model {model.name!r}"
        raise ModelError(f"{origin}: {error}") from None


def check_device_type(device_type: str, database: Database) -> None:
    """Check that somebody could ever take a job for devices of a type: what is misspelt would wait for ever.

    Raises:
        ModelError: nobody could.
    """
    known = {path.stem for path in (search_spaces_dir() / "kernels").glob("*.yaml")}
    if device_type in known:
        return
    known |= {worker.device_type for worker in database.queue.workers()}
    known |= {environment.device_type for environment in database.environments()}
    if device_type not in known:
        raise ModelError(f"nobody tunes for devices of type {device_type!r}; known: {', '.join(sorted(known))}")


def given_extents(texts: Mapping[str, str]) -> dict[str, int]:
    """Read extents out of a query.

    Raises:
        ModelError: one is beyond 32 bits.
    """
    extents = {axis: int(text) for axis, text in texts.items()}
    for axis, extent in extents.items():
        if extent > EXTENT_MAX:
            raise ModelError(f"extent {axis}={extent}: give at most {EXTENT_MAX}")
    return extents
