"""What a client is asked for -> the bodies and queries that the service takes."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, Unpack

from pydantic import BaseModel, ValidationError

from autotuner.errors import InputError, ModelError
from autotuner.ir.models import ModelFile, load_model, parse_reference
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Scalar, canonical_json
from autotuner.server.wire import BestQuery, Query, SubmittedJob
from autotuner.settings import TuneKeywords

GivenModel = str | Path | Mapping[str, Any]
T = TypeVar("T", bound=BaseModel)


def given_model(model: GivenModel, preset: str | None) -> tuple[str | dict[str, Any], str | None]:
    """Return a model as it is sent: the name that the service knows, or a file's content; and the preset.

    Args:
        model: "bert-encoder" or "bert-encoder:tiny"; the path of a model file, with ":preset" or without; or the
            content of a model file.
        preset: the same as a preset in the reference.

    Raises:
        ModelError: the file cannot be read or breaks a rule, or two presets are named.
    """
    if isinstance(model, Mapping):
        return dict(model), preset
    name, own = parse_reference(str(model))
    if own and preset and own != preset:
        raise ModelError(f"{str(model)!r} names preset {own!r}, and preset is {preset!r}: name one")
    if name.endswith((".yaml", ".yml")):
        return load_model(name).definition.model_dump(mode="json", exclude_none=True), own or preset
    return name, own or preset


def submission(
    model: GivenModel,
    *,
    preset: str | None,
    extents: Mapping[str, int] | None,
    options: Mapping[str, Scalar] | None,
    dtype: str | None,
    device: str,
    device_name: str | None,
    max_seconds: float | None = None,
    max_measurements: int | None = None,
    **tuning: Unpack[TuneKeywords],
) -> SubmittedJob:
    """Return the body that asks for a job; `tuning` are fields of `TuneOptions`.

    Raises:
        ModelError: see `given_model`.
        InputError: a value that no service takes.
    """
    sent, preset = given_model(model, preset)
    given = tuning.pop("limits", None)
    limits = asdict(given) if given else {"seconds": max_seconds, "measurements": max_measurements}
    return checked(
        SubmittedJob,
        model=sent,
        preset=preset,
        extents=dict(extents or {}),
        options=dict(options or {}),
        dtype=dtype,
        device={"type": device, "name": device_name},
        limits=limits,
        **tuning,
    )


def best_query(
    model: GivenModel | None,
    *,
    family: str | None,
    preset: str | None,
    extents: Mapping[str, int] | None,
    options: Mapping[str, Scalar] | None,
    dtype: str | None,
    device: str,
    device_name: str | None,
    budget_bytes: int | None = None,
) -> BestQuery:
    """Return the query that asks for the best configuration; of a model file, it names the family.

    Raises:
        ModelError: see `given_model`, or a value that the file does not take.
        InputError: neither model nor family is given, or both, or a value that no service takes.
    """
    if (model is None) == (family is None):
        raise InputError("give a model, or the family of a job with its extents and dtype: one of the two")
    if model is not None:
        sent, preset = given_model(model, preset)
        if isinstance(sent, dict):
            file = ModelFile("the model", parse_definition(sent, "the model"))
            chosen = file.instantiate(preset, extents=extents, options=options, dtype=dtype)
            model, family, extents, options, dtype = None, chosen.family, chosen.extents, None, chosen.dtype
        else:
            model = sent if preset is None else f"{sent}:{preset}"
    return checked(
        BestQuery,
        model=model,
        family=family,
        extent=[f"{axis}={extent}" for axis, extent in (extents or {}).items()],
        option=[f"{name}={canonical_json(value)}" for name, value in (options or {}).items()],
        dtype=dtype,
        device_type=device,
        device_name=device_name,
        budget_bytes=budget_bytes,
    )


def params(query: Query) -> dict[str, Any]:
    """Return a query as the pairs of a URL; what has its default is left out."""
    return query.model_dump(exclude_defaults=True)


def checked(kind: type[T], **values: Any) -> T:
    """Return a body or query.

    Raises:
        InputError: a value that no service takes; the message names it.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        raise InputError("; ".join(_sentence(found) for found in error.errors(include_url=False))) from error


def _sentence(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place} is {error['input']!r}: {error['msg']}"
