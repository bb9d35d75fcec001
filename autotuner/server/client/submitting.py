"""Bodies and queries for the service, made and checked from the arguments of a client's methods."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from autotuner.errors import InputError, ModelError
from autotuner.ir.models import ModelFile, load_model, parse_reference
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Scalar, canonical_json
from autotuner.server.wire.requests import BestQuery, Query
from autotuner.server.wire.values import KEY_PATTERN

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


def best_query(
    model: GivenModel | None,
    *,
    family: str | None,
    preset: str | None,
    extents: Mapping[str, int] | None,
    options: Mapping[str, Scalar] | None,
    dtype: str | None,
    **chosen: Any,
) -> BestQuery:
    """Return the query that asks for the best configuration; of a model file, it names the family.

    Args:
        chosen: the fields of `BestQuery` that are not of the model.

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
            made = file.instantiate(preset, extents=extents, options=options, dtype=dtype)
            model, family, extents, options, dtype = None, made.family, made.extents, None, made.dtype
        else:
            model = sent if preset is None else f"{sent}:{preset}"
    extent = [f"{axis}={extent}" for axis, extent in (extents or {}).items()]
    option = [f"{name}={canonical_json(value)}" for name, value in (options or {}).items()]
    return checked(BestQuery, model=model, family=family, extent=extent, option=option, dtype=dtype, **chosen)


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


def checked_key(key: str) -> str:
    """Return an idempotency key.

    Raises:
        InputError: no header could carry it.
    """
    if re.fullmatch(KEY_PATTERN, key) is None:
        raise InputError(f"the idempotency key is {key!r}: give 1 to 200 visible ASCII characters without spaces")
    return key


def _sentence(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place} is {error['input']!r}: {error['msg']}"
