"""A job's events: connections that are lost, services that are started anew, and patience that ends."""

import httpx2
import pytest

from autotuner.errors import NotFoundError, ServiceError
from autotuner.server.client import Client
from tests.server.client.pretended import PROGRESS, Pretended, events, job, problem

EVENTS = "GET /v1/jobs/3/events"
RUNNING = job(state="running", revision=2, progress=PROGRESS)
FINISHED = job(state="finished", revision=5, configuration_id=7)


def test_a_job_is_told_after_each_change_until_it_has_ended(service: Pretended, asked: Client) -> None:
    service.on(EVENTS, events(job(), RUNNING, FINISHED, job(revision=6)))
    told = list(asked.events(3))
    assert [(j.state, j.revision) for j in told] == [("queued", 1), ("running", 2), ("finished", 5)]
    assert told[1].progress is not None
    assert (told[1].progress.gap, told[2].configuration_id) == (0.5, 7)


def test_a_lost_connection_is_opened_again_behind_the_last_event(service: Pretended, asked: Client) -> None:
    service.on(EVENTS, events(job(), RUNNING, broken=True), events(FINISHED))
    assert [j.revision for j in asked.events(3)] == [1, 2, 5]
    assert [request.headers.get("Last-Event-ID") for request in service.requests] == [None, "2"]


def test_a_state_that_a_service_tells_again_comes_once(service: Pretended, asked: Client) -> None:
    service.on(EVENTS, events(RUNNING, broken=True), events(RUNNING, FINISHED))
    assert [j.revision for j in asked.events(3)] == [2, 5]


def test_a_service_that_is_started_anew_is_waited_for(service: Pretended, asked: Client) -> None:
    down = httpx2.ConnectError("connection refused")
    service.on(EVENTS, events(RUNNING), *[down] * 8, problem(503, "starting"), events(FINISHED))
    assert [j.revision for j in asked.events(3)] == [2, 5]
    assert len(service.pauses) == 10
    assert max(service.pauses) <= 5


def test_patience_with_a_service_that_stays_away_ends(service: Pretended) -> None:
    service.on(EVENTS, events(RUNNING), httpx2.ConnectError("connection refused"))
    told = service.client(clock=service.ticking(0.5)).events(3, patience_s=10)
    assert next(told).revision == 2
    with pytest.raises(ServiceError, match="no service answers at http://service"):
        next(told)
    assert 5 <= len(service.pauses) <= 12


def test_patience_begins_anew_where_a_connection_was_held(service: Pretended) -> None:
    service.on(EVENTS, *[events(broken=True) for _ in range(5)], events(FINISHED))
    told = service.client(clock=service.ticking(100.0)).events(3, patience_s=10)
    assert [j.revision for j in told] == [5]


def test_the_events_of_a_job_that_is_not_there_are_not_waited_for(service: Pretended, asked: Client) -> None:
    service.on(EVENTS, problem(404, "there is no job 3"))
    with pytest.raises(NotFoundError, match="there is no job 3"):
        list(asked.events(3))
    assert service.pauses == []


def test_a_page_instead_of_events_is_no_service(service: Pretended, asked: Client) -> None:
    service.on(EVENTS, httpx2.Response(200, text="<html>", headers={"Content-Type": "text/html"}))
    with pytest.raises(ServiceError, match="is no autotuner service of this version"):
        list(asked.events(3))
    assert service.pauses == []
