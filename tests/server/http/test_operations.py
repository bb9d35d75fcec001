"""Metrics, readiness and ids of requests."""

import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event
from starlette.testclient import TestClient

from autotuner.database import Database, Timeouts, open_database, space
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


@pytest.mark.parametrize("path", ["/livez", "/v1/livez"])
def test_a_service_without_its_database_lives(observed: TestClient, tmp_path: Path, path: str) -> None:
    for file in tmp_path.glob("service.sqlite*"):
        file.unlink()
    assert observed.get("/healthz").status_code == 503
    answer = observed.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


def test_metrics_tell_how_much_space_is_left(observed: TestClient, tmp_path: Path) -> None:
    found = figures(observed)
    for volume, folder in (("database", str(tmp_path)), ("temporary", tempfile.gettempdir())):
        told = found["autotuner_disk_free_bytes", volume]
        assert told == pytest.approx(shutil.disk_usage(folder).free, rel=0.2)
    assert found["autotuner_disk_full",] == 0


def test_a_volume_without_space_makes_the_service_unready(
    observed: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert observed.get("/readyz").status_code == 200
    monkeypatch.setattr(space, "LEAST_BYTES", 2**62)
    refused = observed.get("/readyz")
    assert (refused.status_code, "disk of the database is full" in refused.json()["detail"]) == (503, True)
    assert figures(observed)["autotuner_disk_full",] == 1


def test_a_write_that_failed_for_want_of_space_shows_until_one_succeeds(tmp_path: Path) -> None:
    events: list[str] = []
    timeouts = Timeouts(answer_s=1.0, locked_s=0.0, away_s=0.0)
    with open_database(
        tmp_path / "full.sqlite", timeouts=timeouts, log=lambda name, **_: events.append(name)
    ) as opened:
        engine, pages = opened._transactions.engine, [1]
        engine.dispose()

        @event.listens_for(engine, "connect")
        def bounded(connection: sqlite3.Connection, _record: object) -> None:
            connection.execute(f"PRAGMA max_page_count={pages[0]}")  # SQLite's own error, as of a full disk

        with TestClient(Observed(create_app(opened)), "http://localhost", raise_server_exceptions=False) as client:
            for _ in range(100):
                answer = client.post("/v1/jobs", json={"model": "bert-encoder:tiny"})
                if answer.status_code != 201:
                    break
            assert answer.status_code == 503
            assert client.get("/readyz").status_code == 503
            assert figures(client)["autotuner_disk_full",] == 1
            assert client.get("/v1/jobs").status_code == 200
            assert "disk_full" in events
            pages[0] = 2**30
            engine.dispose()
            assert client.post("/v1/jobs", json={"model": "bert-encoder:tiny"}).status_code == 201
            assert client.get("/readyz").status_code == 200


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
