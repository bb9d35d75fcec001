"""Connections: each address has a share of them, and a service that ends tells those that wait for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from autotuner.database import Database
from autotuner.server.http import connections
from autotuner.server.http.serving import GRACE_S, Server
from tests.server.http.listening import PATIENCE_S, listening, wait_until
from tests.server.http.raw import HEAD, connected, problem_of, rest

pytestmark = pytest.mark.slow


@pytest.fixture
def served(database: Database) -> Iterator[Server]:
    with listening(database) as server:
        yield server


def test_one_address_has_a_share_of_the_connections_and_others_are_answered(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 16)
    with ExitStack() as opened:
        greedy = [opened.enter_context(connected(served.url, "127.0.0.9")) for _ in range(40)]
        refusals = [problem_of(rest(connection)) for connection in greedy[4:]]
        assert {found["status"] for found in refusals} == {429}
        assert all("127.0.0.9 has 4 connections" in found["detail"] for found in refusals)
        for number in range(20):
            with connected(served.url, f"127.0.0.{number + 20}") as other:
                other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert rest(other).startswith(b"HTTP/1.1 200 ")
        greedy[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert rest(greedy[0]).startswith(b"HTTP/1.1 200 "), "what it has, it keeps"


def test_a_trusted_proxy_has_as_many_connections_as_there_are(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 16)
    secret = database.tokens.create("one", "reader")[1].encode()
    head = b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + secret + b"\r\n\r\n"
    with listening(database, local=False, trusted_proxies=["127.0.0.8/31"]) as server, ExitStack() as opened:
        for _ in range(16):
            connection = opened.enter_context(connected(server.url, "127.0.0.9"))
            connection.sendall(head)
            assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("203.0.113.7", "203.0.113.8", False),
        ("203.0.113.7", "::ffff:203.0.113.7", True),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::9", True),
        ("2001:db8:1:2::4", "2001:db8:1:3::4", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_a_client_of_ipv6_is_its_network(one: str, other: str, same: bool) -> None:
    assert (connections.client_of(one) == connections.client_of(other)) == same


def test_a_service_that_ends_says_so_to_half_bodies_and_logs_no_traceback(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as opened:
        with listening(database) as server:
            halves = [opened.enter_context(connected(server.url)) for _ in range(100)]
            for connection in halves:
                connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n{")
            wait_until(lambda: sum(bool(c.cycle) for c in server.server_state.connections) == 100)  # type: ignore[union-attr]
            began = time.monotonic()
        assert time.monotonic() - began < GRACE_S
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
