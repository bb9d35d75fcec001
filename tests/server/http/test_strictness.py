"""What the service refuses before it reads it, and how it says so."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from autotuner.database import Database
from autotuner.server.http import create_app, jobs
from autotuner.server.http.strict import BODY_MAX_BYTES, StrictRoute
from autotuner.server.http.submissions import request_of

JSON = {"Content-Type": "application/json"}


def test_a_body_is_validated_once(asked: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    taken: list[Any] = []
    valid = StrictRoute._valid

    def noted(route: StrictRoute, body: bytes) -> Any:
        made.append(valid(route, body))
        return made[-1]

    def requested(*given: Any) -> Any:
        taken.append(given[0])
        return request_of(*given)

    monkeypatch.setattr(StrictRoute, "_valid", noted)
    monkeypatch.setattr(jobs, "request_of", requested)
    assert asked.post("/v1/jobs", json={"model": "bert-encoder:tiny"}).status_code == 201
    assert len(made) == len(taken) == 1
    assert taken[0] is made[0]


@pytest.mark.parametrize(
    "query, words",
    [
        ("stat=queued", "no parameter 'stat': valid are state, limit, before"),
        ("limit=1&limit=2", "'limit' is given twice"),
        ("state=", "query state"),
        ("state=%ff", "no UTF-8"),
        ("limit=1001", "less than or equal to 1000"),
        ("limit=0", "greater than or equal to 1"),
        ("limit=+5", "whole number"),
        ("limit=5.0", "whole number"),
        ("limit=1_0", "whole number"),
        ("limit=%D9%A3", "whole number"),
        ("before=9223372036854775808", "less than or equal to 9223372036854775807"),
        ("before=" + "9" * 5000, "whole number"),
        ("before=-1", "whole number"),
        ("%00=1", "no parameter"),
    ],
)
def test_a_query_that_says_what_the_service_would_not_understand_is_refused(
    asked: TestClient, query: str, words: str
) -> None:
    response = asked.get(f"/v1/jobs?{query}")
    assert (response.status_code, response.headers["Content-Type"]) == (422, "application/problem+json")
    assert words in response.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/jobs/1?verbose=1", "/v1/devices?type=cpu", "/healthz?x=1"])
def test_a_parameter_where_there_are_none_is_refused(asked: TestClient, path: str) -> None:
    response = asked.get(path)
    assert response.status_code == 422
    assert "there are none here" in response.json()["detail"]


@pytest.mark.parametrize("job", ["abc", "0", "-1", "1.0", "01x", "9223372036854775808", "%00", "%ff", "1e3"])
def test_what_is_no_id_is_refused(asked: TestClient, job: str) -> None:
    assert asked.get(f"/v1/jobs/{job}").status_code == 422


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "the body"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no UTF-8"),
        (b"null", "the body"),
        (b"[]", "the body"),
        (b'{"model": "bert-encoder:tiny", "gap": NaN}', "NaN is no number"),
        (b'{"model": "bert-encoder:tiny", "gap": -Infinity}', "-Infinity is no number"),
        (b'{"model": "bert-encoder:tiny", "gap": 1e999}', "beyond the range"),
        (b'{"model": "bert-encoder:tiny", "gap": ' + b"9" * 5000 + b"}", "beyond the range"),
        (b'{"model": "a", "model": "b"}', "'model' occurs twice"),
        (b'{"model": "a\\u0000b"}', "NUL"),
        (b'{"model": {"operators": ["a\\u0000"]}}', "NUL"),
        (b'{"model": "a", "\\u0000": 1}', "NUL"),
        (b'{"model": "\\ud800"}', "model"),
        (b'{"model": {"\\ud800": 1}}', "model"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_plain_json_is_refused(asked: TestClient, body: bytes, words: str) -> None:
    response = asked.post("/v1/jobs", content=body, headers=JSON)
    assert response.status_code == 422
    assert words in response.json()["detail"]


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=latin-1",
        "multipart/form-data",
        "json",
        None,
    ],
)
def test_a_body_that_is_not_said_to_be_json_is_refused(asked: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = asked.post("/v1/jobs", content=b'{"model": "bert-encoder:tiny"}', headers=headers)
    assert response.status_code == 415
    assert "send JSON" in response.json()["detail"]


def test_a_charset_that_is_utf_8_is_taken(asked: TestClient) -> None:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    assert asked.post("/v1/jobs", content=b'{"model": "bert-encoder:tiny"}', headers=headers).status_code == 201


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/1/cancel", "/nowhere"])
def test_a_body_that_is_announced_too_large_is_refused(asked: TestClient, path: str) -> None:
    response = asked.post(path, content=b" " * (BODY_MAX_BYTES + 1), headers=JSON)
    assert (response.status_code, response.headers["Content-Type"]) == (413, "application/problem+json")
    assert str(BODY_MAX_BYTES) in response.json()["detail"]


def test_a_body_that_comes_in_pieces_is_refused_as_well(asked: TestClient) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * 65536

    response = asked.post("/v1/jobs", content=pieces(), headers=JSON)
    assert (response.status_code, response.headers["Content-Type"]) == (413, "application/problem+json")


def test_a_body_of_the_limit_is_read(asked: TestClient) -> None:
    body = b'{"model": "bert-encoder:tiny"}'
    response = asked.post("/v1/jobs", content=body + b" " * (BODY_MAX_BYTES - len(body)), headers=JSON)
    assert response.status_code == 201


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("PUT", "/v1/jobs", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/jobs", "GET, HEAD, POST"),
        ("DELETE", "/v1/jobs/1", "GET, HEAD"),
        ("GET", "/v1/jobs/1/cancel", "POST"),
        ("POST", "/v1/configurations/best", "GET, HEAD"),
    ],
)
def test_a_method_that_a_path_does_not_have_is_refused_with_those_that_it_has(
    asked: TestClient, method: str, path: str, allowed: str
) -> None:
    response = asked.request(method, path)
    assert (response.status_code, response.headers["Allow"]) == (405, allowed)
    assert response.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("path", ["/v1", "/v1/jobs/", "/v1/jobs//events", "/v2/jobs", "/v1/jobs/1/2", "/%00"])
def test_a_path_that_is_not_there_is_a_problem_as_well(asked: TestClient, path: str) -> None:
    response = asked.get(path)
    assert (response.status_code, response.headers["Content-Type"]) == (404, "application/problem+json")
    assert "/docs" in response.json()["detail"]


def test_what_nobody_expected_is_a_problem_without_its_traceback(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the password is 1234")

    monkeypatch.setattr(database.queue, "jobs", fail)
    app: FastAPI = create_app(database)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as asked:
        response = asked.get("/v1/jobs")
    assert (response.status_code, response.headers["Content-Type"]) == (500, "application/problem+json")
    assert response.json()["detail"] == "the service failed; its log says why"
    assert "1234" not in response.text
