"""Whom the service answers: hosts of its own, and no page of another site that would change something."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from autotuner.database import Database
from autotuner.errors import InputError
from autotuner.server.http import create_app
from autotuner.server.http.guard import Hosts
from tests.server.http.filled import enqueue

JOB = {"model": "bert-encoder:tiny"}
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:9000", "[::1]:8000", "[0:0::1]"]
)
def test_this_machines_own_names_are_answered(asked: TestClient, host: str) -> None:
    assert asked.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/v1/jobs", "/docs", "/openapi.json", "/nowhere"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1"])
def test_a_host_that_is_not_served_is_refused_with_the_option_that_would_serve_it(
    asked: TestClient, path: str, host: str
) -> None:
    response = asked.get(path, headers={"Host": host})
    assert (response.status_code, response.headers["Content-Type"]) == (421, "application/problem+json")
    assert f"--allow-host {host.partition(':')[0]}`" in response.json()["detail"]


@pytest.mark.parametrize("host", ["", "a b", "user@localhost", "localhost:x", "[::1", "a/b"])
def test_what_is_no_host_is_refused(asked: TestClient, host: str) -> None:
    response = asked.get("/healthz", headers={"Host": host})
    assert (response.status_code, response.headers["Content-Type"]) == (400, "application/problem+json")


def test_a_host_that_is_allowed_is_answered(database: Database) -> None:
    app = create_app(database, Hosts(("tuner-1", "10.0.0.7"), ["Tuning.example", "2001:db8::1"]))
    with TestClient(app) as asked:
        for host in ("tuner-1:8000", "10.0.0.7", "tuning.example", "[2001:db8::1]:80", "localhost"):
            assert asked.get("/healthz", headers={"Host": host}).status_code == 200
        assert asked.get("/healthz", headers={"Host": "10.0.0.8"}).status_code == 421
    with pytest.raises(InputError, match="'http://x': write a name, such as"):
        Hosts((), ["http://x"])


@pytest.mark.parametrize("served", ["0.0.0.0", "::"])
def test_a_service_that_listens_everywhere_answers_to_addresses_and_not_to_names(
    database: Database, served: str
) -> None:
    """No page can make a browser send an address that it does not connect to; a name of its own, it can."""
    with TestClient(create_app(database, Hosts([served]))) as asked:
        for host in ("192.168.1.5:8000", "[2001:db8::2]", "localhost:8000", "127.0.0.1"):
            assert asked.get("/healthz", headers={"Host": host}).status_code == 200
        assert asked.get("/healthz", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "null"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_site_changes_nothing(asked: TestClient, database: Database, headers: dict[str, str]) -> None:
    job = enqueue(database)
    for path, content in ((f"/v1/jobs/{job.id}/cancel", b""), ("/v1/jobs", b'{"model": "bert-encoder:tiny"}')):
        for kind in ({"Content-Type": "text/plain"}, JSON, {}):
            response = asked.post(path, content=content, headers=headers | kind)
            assert (response.status_code, response.headers["Content-Type"]) == (403, "application/problem+json")
            assert "another site" in response.json()["detail"]
    assert [(job.id, job.state) for job in database.queue.jobs()] == [(job.id, "queued")]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://localhost"},
        {"Origin": "https://localhost:443"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_clients_and_the_services_own_page_change_what_they_ask_for(asked: TestClient, headers: dict[str, Any]) -> None:
    job = asked.post("/v1/jobs", json=JOB, headers=headers)
    assert job.status_code == 201
    assert asked.post(f"/v1/jobs/{job.json()['id']}/cancel", headers=headers).json()["state"] == "cancelled"


def test_a_request_without_a_body_of_its_own_takes_no_other_body_than_json(
    asked: TestClient, database: Database
) -> None:
    job = enqueue(database)
    response = asked.post(f"/v1/jobs/{job.id}/cancel", content=b"x", headers={"Content-Type": "text/plain"})
    assert (response.status_code, database.queue.job(job.id).state) == (415, "queued")


def test_a_page_of_another_site_may_not_read_the_answers(asked: TestClient) -> None:
    for method in ("GET", "OPTIONS"):
        headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        response = asked.request(method, "/v1/jobs", headers=headers)
        assert not [name for name in response.headers if name.lower().startswith("access-control-")]


# HEAD


@pytest.mark.slow
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "path",
    [
        "/", "/docs", "/docs/swagger-ui.css", "/openapi.json", "/healthz", "/v1/healthz", "/v1/jobs", "/v1/jobs/1",
        "/v1/jobs/1/events", "/v1/jobs/5/events", "/v1/jobs/99", "/v1/configurations/1", "/v1/devices", "/v1/models",
        "/v1/measurements?limit=1", "/v1/configurations/best?model=bert-encoder:tiny",
    ],
)  # fmt: skip
def test_head_is_get_without_its_body(asked: TestClient, path: str) -> None:
    headers = {"Last-Event-ID": "0"}
    head = asked.head(path, headers=headers)
    assert head.content == b""
    if path == "/v1/jobs/5/events":  # which would not end
        assert (head.status_code, head.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        return
    get = asked.get(path, headers=headers)
    assert (head.status_code, dict(head.headers)) == (get.status_code, dict(get.headers))


def test_head_is_refused_where_get_is(asked: TestClient) -> None:
    assert asked.head("/v1/jobs/1/cancel").status_code == 405


# Where a body ends


def test_a_request_that_says_twice_where_its_body_ends_is_refused(asked: TestClient, database: Database) -> None:
    body = b'{"model": "bert-encoder:tiny"}'
    headers = {**JSON, "Content-Length": str(len(body)), "Transfer-Encoding": "chunked"}
    response = asked.post("/v1/jobs", content=body, headers=headers)
    assert (response.status_code, response.headers["Connection"]) == (400, "close")
    assert database.queue.jobs() == []
