"""Submissions: models and options that are sent, checked and bounded -> the requests that workers run."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from autotuner.database import Database
from autotuner.errors import GraphError, ModelError, NotFoundError, ServiceError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.cost import largest_end
from autotuner.ir.models import Model, ModelFile, known_models, load_model, parse_reference, search_spaces_dir
from autotuner.ir.models.bounds import EXTENT_MAX
from autotuner.ir.models.schema import Axes, Definition, Input, Name, OperatorEntry, Option, Parameter
from autotuner.ir.records import Scalar
from autotuner.plan.request import Request
from autotuner.server.wire.requests import SubmittedJob
from autotuner.server.wire.values import OPTIONS_MAX, Axis, Extent, Integer, Text

KEPT_MODELS = 1024
OPERATORS_MAX = 256
"""Eight encoder layers written out, fewer than a model file may have: anybody may submit."""

SENT = "the model that was sent"

ALWAYS_FITS_BYTES = 2**30
MEMORY_BYTES = 2**40
"""1 TiB: taken for the memory of a device type of whose devices none has told its own."""

TENSORS_MAX = 1024
PRESETS_MAX = 64
NAME_MAX = 100

TensorName = Annotated[Name, StringConstraints(max_length=NAME_MAX)]
Stamp = tuple[int, int]


class ModelFiles:
    """The known models, and those of them that were asked for with their extents, options and dtype chosen."""

    def __init__(self) -> None:
        self._directory = search_spaces_dir() / "models"
        self._listed: tuple[Stamp, dict[str, Path]] = ((0, 0), {})
        self._files: dict[Path, tuple[Stamp, ModelFile]] = {}
        self._kept = lru_cache(KEPT_MODELS)(self._model)

    def names(self) -> list[str]:
        return list(self._paths())

    def file(self, name: str) -> ModelFile:
        """Return a model file by the model's name.

        Raises:
            NotFoundError: there is none of this name.
            ServiceError: the file cannot be used.
        """
        return self._read(name)[1]

    def model(
        self, reference: str, extents: Mapping[str, int], options: Mapping[str, Scalar], dtype: str | None
    ) -> Model:
        """Return the model that a reference such as "bert-encoder:tiny" names, with some of its values replaced.

        Raises:
            NotFoundError: there is no such model or preset.
            ModelError: there is no such axis or option, or a value is not valid.
        """
        try:
            name, preset = parse_reference(reference)
        except ModelError:
            raise NotFoundError(f'{reference!r} is no model: write "name" or "name:preset"; {self._known()}') from None
        chosen = tuple((option, type(value), value) for option, value in options.items())
        return self._kept(self._read(name)[0], name, preset, tuple(extents.items()), chosen, dtype)

    def _model(
        self,
        _stamp: Stamp,
        name: str,
        preset: str | None,
        extents: tuple[tuple[str, int], ...],
        options: tuple[tuple[str, type, Scalar], ...],
        dtype: str | None,
    ) -> Model:
        chosen = {option: value for option, _, value in options}
        return instantiated(self._read(name)[1], preset, dict(extents), chosen, dtype)

    def _read(self, name: str) -> tuple[Stamp, ModelFile]:
        path = self._paths().get(name)
        if path is None:
            raise NotFoundError(f"no model {name!r}; {self._known()}; the content of a model file can be sent instead")
        try:
            stamp = _stamp(path)
            kept = self._files.get(path)
            if kept is None or kept[0] != stamp:
                definition = load_model(str(path)).definition
                kept = self._files[path] = stamp, ModelFile(f"model {name!r}", definition)
        except (ModelError, OSError) as error:
            raise ServiceError(f"model {name!r} of the service cannot be used: {error}") from error
        return kept

    def _paths(self) -> Mapping[str, Path]:
        stamp = _stamp(self._directory)
        listed, paths = self._listed
        if listed != stamp:
            paths = known_models()
            self._listed = stamp, paths
        return paths

    def _known(self) -> str:
        return f"known: {', '.join(self.names())}"


def instantiated(
    file: ModelFile,
    preset: str | None,
    extents: Mapping[str, int],
    options: Mapping[str, Scalar],
    dtype: str | None,
) -> Model:
    """Return a file's model with these values.

    Raises:
        NotFoundError: the file has no such preset.
        ModelError: it has no such axis or option, or a value is not valid.
    """
    presets = file.definition.presets
    if preset is not None and preset not in presets:
        raise NotFoundError(f"{file.origin} has no preset {preset!r}; known: {', '.join(presets) or 'none'}")
    return file.instantiate(preset, extents, options, dtype)


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


class InlineModel(Definition):
    """The content of a model file, as JSON, within the bounds of what a service takes from anybody."""

    version: Annotated[Literal[1], Integer]
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=NAME_MAX)]
    axes: Annotated[dict[Axis, Annotated[str, Field(max_length=200)]], Field(max_length=52)]
    options: dict[TensorName, Option] = Field({}, max_length=OPTIONS_MAX)
    presets: dict[Text, dict[Axis, Extent]] = Field({}, max_length=PRESETS_MAX)
    inputs: Annotated[dict[TensorName, Input], Field(max_length=TENSORS_MAX)]
    parameters: dict[TensorName, Axes | Parameter] = Field({}, max_length=TENSORS_MAX)
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
        InputError: a value contradicts the model, the model contradicts itself or is too large, also for the device,
            or nobody tunes for such a device.
    """
    model = _model(submission, files)
    _check_backward(model, submission)
    check_device_type(submission.device.type, database)
    check_memory(model, submission, database)
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


def check_memory(model: Model, submission: Submission, database: Database) -> None:
    """Check that each tensor that goes into a model or comes out of it fits on the device: no kernel does without it.

    Raises:
        ModelError: one is larger than the largest device that is known of this type and name.
    """
    device = submission.device
    largest, needed = largest_end(model.graph())
    if needed <= ALWAYS_FITS_BYTES:
        return
    told = [
        int(dict(environment.facts).get("memory_bytes", 0))
        for environment in database.environments()
        if environment.device_type == device.type and device.name in (None, environment.device_name)
    ]
    told += [
        worker.memory_bytes or 0
        for worker in database.queue.workers()
        if worker.device_type == device.type and device.name in (None, worker.device_name)
    ]
    most = max(told, default=0) or MEMORY_BYTES
    if needed > most:
        raise ModelError(
            f"tensor {largest!r} takes {needed} bytes, and {device.name or f'a device of type {device.type}'} has "
            f"{most}: give smaller extents"
        )


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
