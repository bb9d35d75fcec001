"""Metrics, readiness and ids of requests."""

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from autotuner.database import Database
from autotuner.database.migrations import VERSION_TABLE
from autotuner.server.http import create_app
from autotuner.server.http.observing import Observed


@pytest.fixture
def observed(database: Database) -> Iterator[TestClient]:
    """Asks the service as it is served: with ids and metrics of requests."""
    with TestClient(Observed(create_app(database)), "http://localhost", raise_server_exceptions=False) as client:
        yield client


def figures(client: TestClient) -> dict[tuple[str, ...], float]:
    """All metrics by name and labels, as Prometheus reads them."""
    page = client.get("/metrics")
    assert page.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(page.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.usefixtures("filled")
def test_metrics_tell_of_requests_jobs_workers_and_measurements(observed: TestClient) -> None:
    for path in ("/v1/jobs/1", "/v1/jobs/2", "/v1/jobs/99", "/nowhere", "/elsewhere"):
        observed.get(path)
    found = figures(observed)
    assert found["autotuner_http_requests_total", "GET", "/v1/jobs/{job_id}", "200"] == 2
    assert found["autotuner_http_requests_total", "GET", "/v1/jobs/{job_id}", "404"] == 1
    assert found["autotuner_http_requests_total", "GET", "none", "404"] == 2
    assert found["autotuner_http_request_duration_seconds_count", "/v1/jobs/{job_id}"] == 3
    states = {key[1]: value for key, value in found.items() if key[0] == "autotuner_jobs"}
    assert states == {"queued": 1, "running": 1, "finished": 1, "failed": 1, "cancelled": 1, "interrupted": 0}
    assert found["autotuner_measurements",] == 3
    assert found["autotuner_workers", "cpu"] == 1
    assert 0 < found["autotuner_queue_oldest_seconds",] < 600
    assert (found["autotuner_database_up",], found["autotuner_event_streams",]) == (1, 0)


def test_strange_methods_and_paths_make_no_labels(observed: TestClient) -> None:
    for number in range(5):
        observed.request(f"X{number}", f"/v1/jobs/{number}")
        observed.get(f"/{number}?a={number}")
    labels = {key[1:] for key in figures(observed) if key[0] == "autotuner_http_requests_total"}
    assert labels == {("other", "none", "405"), ("GET", "none", "404")}


def test_where_the_database_is_gone_it_is_not_ready_and_metrics_say_so(observed: TestClient, tmp_path: Path) -> None:
    assert observed.get("/readyz").json() == {"status": "ready"}
    for file in tmp_path.glob("service.sqlite*"):
        file.unlink()
    assert observed.get("/readyz").status_code == 503
    assert figures(observed)["autotuner_database_up",] == 0


def test_with_the_tables_of_another_version_it_is_not_ready(observed: TestClient, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "service.sqlite") as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    refused = observed.get("/v1/readyz")
    assert (refused.status_code, "9999" in refused.text) == (503, False)


def test_a_service_that_ends_is_not_ready(database: Database) -> None:
    app = create_app(database)
    with TestClient(app, "http://localhost") as client:
        app.state.end_streams()
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a\tb", "ü"])
def test_a_request_has_an_id_its_own_if_that_is_one(
    observed: TestClient, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    caplog.set_level(logging.INFO, "autotuner")
    assert (
        observed.get("/healthz", headers={"X-Request-Id": "build-7:a.b_c"}).headers["X-Request-Id"] == "build-7:a.b_c"
    )
    made = observed.get("/nowhere", headers=[(b"X-Request-Id", given.encode("latin-1"))])
    assert len(made.headers["X-Request-Id"]) == 16
    assert [record.getMessage() for record in caplog.records] == ["request", "request"]
