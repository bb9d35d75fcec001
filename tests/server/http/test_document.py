"""The OpenAPI document: complete, and true of its own examples."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.plan.explanation import OperatorExplanation, TensorExplanation
from autotuner.server.http import examples
from autotuner.server.http.problems import PROBLEM_JSON
from autotuner.server.wire.responses import (
    BestView,
    ConfigurationView,
    DeviceView,
    Health,
    JobPage,
    JobView,
    MeasurementPage,
    ModelView,
    ProblemDetails,
)
from autotuner.server.wire.values import Dtype


@pytest.fixture
def document(asked: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = asked.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in document["paths"].values():
        yield from path.values()


def test_every_route_says_what_it_does_and_what_it_refuses(document: dict[str, Any]) -> None:
    for operation in operations(document):
        assert operation["summary"]
        assert operation["description"]
        assert operation["tags"]
        for status in {"422", "500", "503"} | ({"413"} if "requestBody" in operation else set()):
            assert list(operation["responses"][status]["content"]) == [PROBLEM_JSON]
        for response in operation["responses"].values():
            for content in response.get("content", {}).values():
                assert "example" in content or "examples" in content


def test_every_example_fits_its_schema(document: dict[str, Any]) -> None:
    checked = 0
    for operation in operations(document):
        contents = [operation.get("requestBody", {}), *operation["responses"].values()]
        for content in (c for each in contents for c in each.get("content", {}).items()):
            kind, media = content
            if kind == "text/event-stream":
                continue
            values = [media["example"]] if "example" in media else [e["value"] for e in media["examples"].values()]
            for value in values:
                jsonschema.validate(value, media["schema"] | {"components": document["components"]})
                checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    "kind, value",
    [
        (JobView, examples.QUEUED),
        (JobView, examples.CANCELLING),
        (JobPage, examples.JOB_PAGE),
        (ConfigurationView, examples.CONFIGURATION),
        (OperatorExplanation, examples.OPERATOR),
        (TensorExplanation, examples.TENSOR),
        (MeasurementPage, examples.MEASUREMENT_PAGE),
        (list[DeviceView], examples.DEVICES),
        (list[ModelView], examples.MODELS),
        (Health, examples.HEALTH),
        *((BestView, example["value"]) for example in examples.BEST.values()),
    ],
)
def test_every_example_is_what_a_client_reads(kind: Any, value: Any) -> None:
    TypeAdapter(kind).validate_python(value)


def test_a_problem_is_what_a_client_reads(asked: TestClient) -> None:
    response = asked.get("/v1/jobs?limit=0&before=x")
    found = ProblemDetails.model_validate_json(response.text)
    assert (found.type, found.title, found.status) == ("about:blank", HTTPStatus(422).phrase, 422)
    assert [error["field"] for error in found.errors or ()] == ["query limit", "query before"]


def test_the_dtypes_of_the_service_are_those_of_the_graph() -> None:
    assert set(TypeAdapter(Dtype).json_schema()["enum"]) == set(ELEMENT_BYTES)
