"""Routes of configurations: the best one for what somebody wants to run, one by its id, and why it is as it is.

The document of a configuration is sent as the text that the database keeps: reading and writing it anew takes longer
than all the rest of an answer.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from threading import Lock
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from starlette.responses import Response

from autotuner.database import Database, Match, StoredConfiguration
from autotuner.errors import ModelError, NotFoundError
from autotuner.ir.models import read_value
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import OperatorExplanation, TensorExplanation, explain_operator, explain_tensor
from autotuner.plan.request import family_key
from autotuner.server.http.documentation import refusals
from autotuner.server.http.strict import StrictRoute
from autotuner.server.http.submissions import ModelFiles, given_extents
from autotuner.server.wire import BestQuery, BestView, ConfigurationView, Id, Identifier

KNOWN_MAX = 8
KEPT_ANSWERS = 256
KEPT_CONFIGURATIONS = 8
ALWAYS_ASK = "no-cache"
NEVER_CHANGES = "public, max-age=31536000, immutable"

ConfigurationId = Annotated[Id, Path(description="Of a configuration, as a finished job has it.", examples=[1])]
OperatorName = Annotated[Identifier, Path(description="Of an operator of its training graph.", examples=["product"])]
TensorName = Annotated[Identifier, Path(description="Of a tensor of its training graph.", examples=["product"])]
IfNoneMatch = Annotated[
    str | None, Header(description="The ETag of an answer that the client has, which is then not sent again.")
]
TAG: dict[str, Any] = {"ETag": {"description": "Of this answer.", "schema": {"type": "string"}}}


def tagged(model: type, description: str, *refused: int) -> dict[int | str, dict[str, Any]]:
    """Return what a route answers whose answers have a tag; `refused` as in `refusals`."""
    unchanged = {"description": "The client has this answer already.", "headers": TAG}
    return {
        200: {"model": model, "description": description, "headers": TAG},
        304: unchanged,
        **refusals(*refused),
    }


def configuration_routes(database: Database, files: ModelFiles) -> APIRouter:
    answers = Answers(database)
    routes = APIRouter(prefix="/v1/configurations", tags=["configurations"], route_class=StrictRoute)

    @routes.get(
        "/best",
        operation_id="best_configuration",
        summary="Get the best configuration for a model on a device",
        response_model=None,
        responses=tagged(BestView, "The best that is known, and how good a match it is.", 404, 409),
    )
    def best(query: Annotated[BestQuery, Query()], if_none_match: IfNoneMatch = None) -> Response:
        """Return the best configuration known for a model with these extents and options, on a device.

        `match` is `exact`; `doubtful` for the same, measured under bad conditions; `near_device` for one from
        another device, which runs if that is of the same type; `near_shape` for the nearest extents on this device,
        which does not run with those asked for; or `none`. `differs` names the fields in which it is not what was
        asked for, `message` explains it.

        Give `model`, as in `bert-encoder:base`; or `family` as a job has it, with `dtype` and all extents.
        """
        return _sent(answers.best(_target(query, files)), ALWAYS_ASK, if_none_match)

    @routes.get(
        "/{configuration_id}",
        operation_id="get_configuration",
        summary="Get a configuration by its id",
        response_model=None,
        responses=tagged(ConfigurationView, "The configuration; it never changes.", 404),
    )  # fmt: skip
    def configuration(configuration_id: ConfigurationId, if_none_match: IfNoneMatch = None) -> Response:
        """Return a configuration; its `configuration` is the document that `autotuner.apply` runs."""
        return _sent(_answer(None, _stored(database, configuration_id)), NEVER_CHANGES, if_none_match)

    @routes.get(
        "/{configuration_id}/operators/{name}",
        operation_id="explain_operator",
        summary="Say why an operator is computed as it is",
        response_model=None,
        responses=tagged(OperatorExplanation, "Its kernel, and every other way.", 404, 409),
    )
    def operator(configuration_id: ConfigurationId, name: OperatorName, if_none_match: IfNoneMatch = None) -> Response:
        """Say which kernel computes an operator in a configuration, what it loses against its own best, and what the
        best whole plan with another way would take; `words` says all of it in sentences.
        """
        found = explain_operator(answers.configuration(configuration_id), name)
        return _sent(_explanation(found), ALWAYS_ASK, if_none_match)

    @routes.get(
        "/{configuration_id}/tensors/{name}",
        operation_id="explain_tensor",
        summary="Say in which forms a tensor exists, and why",
        response_model=None,
        responses=tagged(TensorExplanation, "Its forms, and every other one.", 404, 409),
    )
    def tensor(configuration_id: ConfigurationId, name: TensorName, if_none_match: IfNoneMatch = None) -> Response:
        """Say in which forms a tensor exists in a configuration, which steps make and read it, what its conversions
        cost, and what the best whole plan with another form would take; `words` says all of it in sentences.
        """
        found = explain_tensor(answers.configuration(configuration_id), name)
        return _sent(_explanation(found), ALWAYS_ASK, if_none_match)

    return routes


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a device that a configuration is asked for; a device name of None is any device of the type."""

    family: str
    dtype: str
    extents: tuple[tuple[str, int], ...]
    device_type: str
    device_name: str | None


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """A body, and the tag that changes with it."""

    tag: str
    body: bytes


class Answers:
    """Answers from one database, kept in memory: asked for again, each is one short query or none."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = Lock()
        self._kept: OrderedDict[Target, tuple[tuple[int, int], TaggedBody]] = OrderedDict()
        self._read = lru_cache(KEPT_CONFIGURATIONS)(self._configuration)

    def best(self, target: Target) -> TaggedBody:
        """Return the `BestView` of a target; the one in memory, until its family has another configuration."""
        state = (self._database.generation, self._database.configurations.count(target.family))
        with self._lock:
            kept = self._kept.get(target)
            if kept is not None and kept[0] == state:
                self._kept.move_to_end(target)
                return kept[1]
        body = self._best(target)
        with self._lock:
            self._kept[target] = (state, body)
            self._kept.move_to_end(target)
            while len(self._kept) > KEPT_ANSWERS:
                self._kept.popitem(last=False)
        return body

    def _best(self, target: Target) -> TaggedBody:
        found = self._database.configurations.best(
            family_key=target.family, dtype=target.dtype, extents=dict(target.extents),
            device_type=target.device_type, device_name=target.device_name,
        )  # fmt: skip
        message = _message(self._database, target, found)
        return _answer({"match": found.status, "differs": found.differs, "message": message}, found.stored)

    def configuration(self, configuration_id: int) -> Configuration:
        """Return a configuration; to read its document takes longer than to explain all of it.

        Raises:
            NotFoundError: there is none of this id.
            ConfigurationError: it is of another version of autotuner.
        """
        return self._read(self._database.generation, configuration_id)

    def _configuration(self, _generation: int, configuration_id: int) -> Configuration:
        stored = _stored(self._database, configuration_id)
        return Configuration.from_json(json.loads(stored.text), f"configuration {configuration_id}")


def _target(query: BestQuery, files: ModelFiles) -> Target:
    """Return the target of a query.

    Raises:
        NotFoundError: there is no such model or preset.
        ModelError: a value contradicts the model, or the query itself.
    """
    extents = given_extents(_pairs("extent", query.extent))
    options = {name: read_value(text) for name, text in _pairs("option", query.option).items()}
    if (query.model is None) == (query.family is None):
        raise ModelError("give `model`, or `family` with `dtype` and every `extent`: one of the two")
    if query.model is not None:
        model = files.model(query.model, extents, options, query.dtype)
        family = family_key(model.family, query.budget_bytes)
        return Target(family, model.dtype, tuple(model.extents.items()), query.device_type, query.device_name)
    if query.dtype is None or not extents or options:
        raise ModelError("with `family` give `dtype` and every `extent`, and no `option`: a family has its options")
    assert query.family is not None
    family = family_key(query.family, query.budget_bytes)
    return Target(family, query.dtype, tuple(sorted(extents.items())), query.device_type, query.device_name)


def _pairs(name: str, texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key in found:
            raise ModelError(f"{name} {key!r} is given twice, as {found[key]!r} and {value!r}: give it once")
        found[key] = value
    return found


def _message(database: Database, target: Target, found: Match) -> str:
    """Return the sentence that explains a match."""
    stored, device = found.stored, target.device_name or f"any device of type {target.device_type}"
    if stored is None:
        return _nothing(database, target)
    if found.status == "near_device":
        runs = "it runs there, and may not be the fastest"
        if stored.device_type != target.device_type:
            runs = f"it does not run on a device of type {target.device_type}"
        return (
            f"tuned on {stored.device_name} ({stored.device_type}), not on {device}: {runs}; POST /v1/jobs tunes for "
            "that device, where a worker has one"
        )
    if found.status == "near_shape":
        return (
            f"tuned for {_shown(stored.extents)}, not for {_shown(dict(target.extents))}: it does not run with these; "
            "POST /v1/jobs tunes for them"
        )
    if stored.doubts:
        return f"tuned for exactly this, and doubtful: {' '.join(stored.doubts)} POST /v1/jobs measures again what is"
    whole = "" if stored.complete else "; not all that could matter was measured: a job stopped at its limit or gap"
    return f"tuned for exactly this{whole}"


def _nothing(database: Database, target: Target) -> str:
    known = database.configurations.known(target.family)
    if not known:
        return "nothing is known of this model with these options: POST /v1/jobs tunes for it"
    texts = list(dict.fromkeys(f"{kind} {dtype} {_shown(extents)}" for kind, dtype, extents in known))
    more = f", and {len(texts) - KNOWN_MAX} more" if len(texts) > KNOWN_MAX else ""
    wanted = f"{target.device_type} {target.dtype} {_shown(dict(target.extents))}"
    return (
        f"nothing is known of this model for {wanted}: POST /v1/jobs tunes for it; known: "
        f"{'; '.join(texts[:KNOWN_MAX])}{more}"
    )


def _shown(extents: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={extent}" for axis, extent in extents.items())


def _answer(head: dict[str, Any] | None, stored: StoredConfiguration | None) -> TaggedBody:
    """Return the view of a configuration, alone or as the `best` of a head."""
    view = None if stored is None else _view(stored)
    text = json.dumps(view if head is None else head | {"best": view}, separators=(",", ":"))
    # Configurations never change, so what is said about one stands for its document as well.
    tag = f'"{sha256(text.encode()).hexdigest()[:32]}"'
    if stored is not None:
        braces = "}" if head is None else "}}"
        text = f'{text[: -len(braces)]},"configuration":{stored.text}{braces}'
    return TaggedBody(tag, text.encode())


def _stored(database: Database, configuration_id: int) -> StoredConfiguration:
    """Return a configuration as the database has it.

    Raises:
        NotFoundError: there is none of this id.
    """
    try:
        return database.configurations.get(configuration_id)
    except NotFoundError:
        raise NotFoundError(
            f"no configuration {configuration_id}: a finished job names its own, GET /v1/configurations/best the best "
            "for a model"
        ) from None


def _explanation(explained: OperatorExplanation | TensorExplanation) -> TaggedBody:
    text = json.dumps(asdict(explained), separators=(",", ":"))
    return TaggedBody(f'"{sha256(text.encode()).hexdigest()[:32]}"', text.encode())


def _sent(answer: TaggedBody, cached: str, if_none_match: str | None) -> Response:
    """Return a response with an answer, or 304 where the client has it."""
    headers = {"ETag": answer.tag, "Cache-Control": cached}
    if if_none_match is not None and _names(if_none_match, answer.tag):
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers=headers, media_type="application/json")


def _view(stored: StoredConfiguration) -> dict[str, Any]:
    """Return a `ConfigurationView` without its document."""
    return {
        "id": stored.id,
        "dtype": stored.dtype,
        "extents": stored.extents,
        "complete": stored.complete,
        "device_type": stored.device_type,
        "device_name": stored.device_name,
        "environment_key": stored.environment_key,
        "predicted_us": stored.total_us,
        "measured_us": stored.measured_us,
        "created_at": stored.created_at.isoformat(),
        "doubts": list(stored.doubts),
    }


def _names(if_none_match: str, tag: str) -> bool:
    given = [text.strip().removeprefix("W/") for text in if_none_match.split(",")]
    return tag in given or given == ["*"]
