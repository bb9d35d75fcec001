"""Routes of configurations: the best one for what somebody wants to run, one by its id, and why it is as it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from starlette.responses import Response

from autotuner.database import Database
from autotuner.errors import ModelError
from autotuner.ir.models import read_value
from autotuner.plan.explanation import OperatorExplanation, TensorExplanation, explain_operator, explain_tensor
from autotuner.plan.request import family_key
from autotuner.server.http.answers import (
    ALWAYS_ASK,
    Answers,
    TaggedBody,
    Target,
    answer_of,
    names,
    stored_configuration,
)
from autotuner.server.http.documentation import refusals
from autotuner.server.http.strict import StrictRoute
from autotuner.server.http.submissions import ModelFiles, given_extents
from autotuner.server.wire.requests import BestQuery
from autotuner.server.wire.responses import BestView, ConfigurationView
from autotuner.server.wire.values import Id, Identifier

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


def configuration_routes(database: Database, files: ModelFiles, answers: Answers) -> APIRouter:
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
        return sent(answers.best(_target(query, files)), ALWAYS_ASK, if_none_match)

    @routes.get(
        "/{configuration_id}",
        operation_id="get_configuration",
        summary="Get a configuration by its id",
        response_model=None,
        responses=tagged(ConfigurationView, "The configuration; it never changes.", 404),
    )  # fmt: skip
    def configuration(configuration_id: ConfigurationId, if_none_match: IfNoneMatch = None) -> Response:
        """Return a configuration; its `configuration` is the document that `autotuner.apply` runs."""
        return sent(answer_of(None, stored_configuration(database, configuration_id)), NEVER_CHANGES, if_none_match)

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
        return sent(_explanation(found), ALWAYS_ASK, if_none_match)

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
        return sent(_explanation(found), ALWAYS_ASK, if_none_match)

    return routes


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
        family = family_key(model.family, query.budget_bytes, query.numerics)
        return _of(query, family, model.dtype, model.extents)
    if query.dtype is None or not extents or options:
        raise ModelError("with `family` give `dtype` and every `extent`, and no `option`: a family has its options")
    assert query.family is not None
    family = family_key(query.family, query.budget_bytes, query.numerics)
    return _of(query, family, query.dtype, dict(sorted(extents.items())))


def _of(query: BestQuery, family: str, dtype: str, extents: Mapping[str, int]) -> Target:
    return Target(family, dtype, tuple(extents.items()), query.device_type, query.device_name)


def _pairs(name: str, texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key in found:
            raise ModelError(f"{name} {key!r} is given twice, as {found[key]!r} and {value!r}: give it once")
        found[key] = value
    return found


def _explanation(explained: OperatorExplanation | TensorExplanation) -> TaggedBody:
    text = json.dumps(asdict(explained), separators=(",", ":"))
    return TaggedBody(f'"{sha256(text.encode()).hexdigest()[:32]}"', text.encode())


def sent(answer: TaggedBody, cached: str, if_none_match: str | None) -> Response:
    """Return a response with an answer, or 304 where the client has it."""
    headers = {"ETag": answer.tag, "Cache-Control": cached}
    if if_none_match is not None and names(if_none_match, answer.tag):
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers=headers, media_type="application/json")
