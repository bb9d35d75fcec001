"""A service that ends tells those that wait for it."""

import threading
import time
from contextlib import ExitStack

import pytest

from autotuner.database import Database
from autotuner.server.http import serving
from tests.server.http.listening import PATIENCE_S, listening, wait_until
from tests.server.http.raw import HEAD, connected, problem_of, rest

pytestmark = pytest.mark.slow


def test_a_service_that_ends_says_so_to_half_bodies_and_logs_no_traceback(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GRACE_S", PATIENCE_S)
    with ExitStack() as opened:
        with listening(database) as server:
            halves = [opened.enter_context(connected(server.url)) for _ in range(100)]
            for connection in halves:
                connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n{")
            wait_until(lambda: sum(bool(c.cycle) for c in server.server_state.connections) == 100)  # type: ignore[union-attr]
            began = time.monotonic()
        assert time.monotonic() - began < PATIENCE_S / 2, "it does not wait for them"
        assert {problem_of(rest(connection))["status"] for connection in halves} == {503}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR" or record.exc_info] == []


def test_a_request_that_outlives_the_service_is_told_so_and_logs_no_traceback(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        began.set()
        go_on.wait(PATIENCE_S)

    monkeypatch.setattr(database.queue, "waiting", slow)
    with ExitStack() as opened, listening(database) as server:
        connection = opened.enter_context(connected(server.url))
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert began.wait(PATIENCE_S)
        server.should_exit = True
        assert problem_of(rest(connection))["status"] == 503
        go_on.set()
    assert not [record for record in caplog.records if record.exc_info]
