"""Connections of bad clients: slow ones end, there is a bound on their number, and the service stays answering."""

import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from autotuner.database import Database, open_database
from autotuner.server.http import connections
from autotuner.server.http.serving import Server
from tests.server.http.filled import enqueue
from tests.server.http.listening import PATIENCE_S, listening
from tests.server.http.raw import HEAD, connected, problem_of, rest

pytestmark = pytest.mark.slow

# Reading certificates, which nobody looks at here, takes 30 ms for each request.
get, post = partial(httpx2.get, verify=False), partial(httpx2.post, verify=False)


@pytest.fixture
def served(database: Database) -> Iterator[Server]:
    with listening(database) as server:
        yield server


def dribbled(connection: socket.socket, piece: bytes) -> bytes:
    """Send a piece again and again until the other side closes, and return what it said."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            connection.sendall(piece)
        except OSError:
            return b""
        if select.select([connection], [], [], 0.02)[0]:
            return rest(connection)
    raise TimeoutError("the connection goes on")


def test_headers_that_come_slowly_are_given_up(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    with connected(served.url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        found = problem_of(dribbled(connection, b"X-Slow: 1\r\n"))
    assert (found["status"], "headers did not arrive within 0.3 s" in found["detail"]) == (408, True)


def test_a_connection_on_which_nothing_is_asked_is_closed(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    with connected(served.url) as connection:
        assert rest(connection) == b""
    with connected(served.url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert rest(connection).startswith(b"HTTP/1.1 200 "), "kept, and closed when no other request came"


@pytest.mark.parametrize("path", [b"/v1/jobs", b"/v1/jobs/1/cancel", b"/nowhere"])
def test_a_body_that_comes_slowly_is_given_up(served: Server, monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    monkeypatch.setattr(connections, "BODY_S", 0.3)
    with connected(served.url) as connection:
        connection.sendall(HEAD.replace(b"/v1/jobs", path) + b"Content-Length: 100000\r\n\r\n")
        answer = dribbled(connection, b" ")
    if path == b"/v1/jobs":
        assert (problem_of(answer)["status"], "did not arrive within 0.3 s" in answer.decode()) == (408, True)


def test_a_body_that_takes_less_than_its_time_is_read(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)
    body = b'{"model": "bert-encoder:tiny"}'
    with connected(served.url) as connection:
        connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for place in range(0, len(body), 2):  # longer than headers may take
            time.sleep(0.1)
            connection.sendall(body[place : place + 2])
        assert rest(connection).startswith(b"HTTP/1.1 201 ")


def test_streams_of_events_outlive_the_time_of_requests(
    served: Server, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADERS_S", "BODY_S"):
        monkeypatch.setattr(connections, name, 0.2)
    monkeypatch.setattr("autotuner.server.http.events.HEARTBEAT_S", 0.1)
    job = enqueue(database)
    with httpx2.stream("GET", f"{served.url}/v1/jobs/{job.id}/events", timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        for _ in range(10):
            assert next(line for line in lines if line == ": still here")


def test_a_client_that_reads_nothing_is_left(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_S", 0.3)
    monkeypatch.setattr(served.config, "timeout_keep_alive", PATIENCE_S)
    with connected(served.url) as connection:
        for _ in range(20):  # 30 MB, above what the system buffers
            connection.sendall(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        end = time.monotonic() + PATIENCE_S
        while not served.server_state.connections:
            assert time.monotonic() < end
        while served.server_state.connections:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA B: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
    ],
)
def test_what_is_no_http_is_refused_with_problem_details(served: Server, sent: bytes) -> None:
    with connected(served.url) as connection:
        connection.sendall(sent)
        found = problem_of(rest(connection))
    assert (found["status"], found["title"]) == (400, "Bad Request")


def test_garbage_in_the_middle_of_an_answer_ends_the_connection_alone(served: Server, database: Database) -> None:
    job = enqueue(database)
    with connected(served.url) as connection:
        connection.sendall(b"GET /v1/jobs/%d/events HTTP/1.1\r\nHost: localhost\r\n\r\n" % job.id)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"\x00garbage\r\n\r\n")
    assert get(f"{served.url}/healthz").status_code == 200


def test_connections_are_bounded_and_those_above_are_told_to_come_later(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 3)
    with ExitStack() as opened:
        for _ in range(3):
            first = opened.enter_context(connected(served.url))
            first.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert first.recv(10).startswith(b"HTTP/1.1 2")
        with connected(served.url) as fourth:
            found = problem_of(rest(fourth))
        assert (found["status"], "has 3 connections" in found["detail"]) == (503, True)
    end = time.monotonic() + PATIENCE_S
    while get(f"{served.url}/healthz").status_code != 200:
        assert time.monotonic() < end


SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
from autotuner.server.http import ServiceOptions, connections, serve
connections.connections_max = lambda: int(sys.argv[3])
serve(sys.argv[1], ServiceOptions(port=0, log_format="words"))
"""


@contextmanager
def process(database: Path, descriptors: int, most: int) -> Iterator[tuple[str, Path]]:
    """Yield the URL and the log of a service that may have so many descriptors and takes so many connections."""
    log = database.with_suffix(".log")
    command = [sys.executable, "-c", SCRIPT, str(database), str(descriptors), str(most)]
    with log.open("w") as file, subprocess.Popen(command, stderr=file, stdout=file) as started:
        try:
            end = time.monotonic() + PATIENCE_S
            while not (said := re.search(r"serving url='([^']+)'", log.read_text())):
                assert time.monotonic() < end
                time.sleep(0.05)
            yield said[1], log
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the descriptors of Linux")
@pytest.mark.parametrize("most", [1000, 20])
def test_a_service_without_file_descriptors_says_so_once_and_goes_on_when_there_are_some(
    tmp_path: Path, most: int
) -> None:
    """Whether connections are bounded below the descriptors or not."""
    file = tmp_path / "served.sqlite"
    with open_database(file):
        pass
    with process(file, 80, most) as (url, log):
        assert get(f"{url}/healthz").status_code == 200
        with ExitStack() as opened:
            for _ in range(150):
                opened.enter_context(connected(url))
            time.sleep(1.5)  # asyncio tries again each second
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                if get(f"{url}/healthz").status_code == 200:
                    break
            except httpx2.TransportError:
                pass
            assert time.monotonic() < end
            time.sleep(0.2)
        lines = log.read_text().splitlines()
    told = [line for line in lines if "connections_not_accepted" in line or "connections_refused" in line]
    assert 1 <= len(told) <= 2
    assert len(lines) < 100


def test_the_number_of_connections_leaves_descriptors_for_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most, streams in ((1024, 512, 256), (256, 128, 64), (resource.RLIM_INFINITY, 512, 256), (1, 1, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert (connections.connections_max(), connections.streams_max()) == (most, streams)


# The database


@pytest.mark.slow
def test_writers_that_wait_for_the_database_hold_up_neither_readers_nor_probes(
    served: Server, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, waiting = threading.Event(), threading.Semaphore(0)
    enqueue_really = database.queue.enqueue

    def held(**given: Any) -> Any:
        waiting.release()
        assert free.wait(PATIENCE_S)
        return enqueue_really(**given)

    monkeypatch.setattr(database.queue, "enqueue", held)
    answers: list[int] = []

    def submit() -> None:
        body = {"model": "bert-encoder:tiny"}
        answers.append(post(f"{served.url}/v1/jobs", json=body, timeout=PATIENCE_S).status_code)

    threads = [threading.Thread(target=submit) for _ in range(30)]
    try:
        for thread in threads:
            thread.start()
        assert waiting.acquire(timeout=PATIENCE_S)
        with httpx2.Client(base_url=served.url, timeout=10) as client:
            for path in ("/healthz", "/v1/jobs", "/v1/devices", "/v1/models", "/docs"):
                assert client.get(path).status_code == 200
    finally:
        free.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert answers == [201] * 30


@pytest.mark.slow
def test_readers_that_wait_do_not_hold_up_probes(
    served: Server, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, waiting = threading.Event(), threading.Semaphore(0)

    def held(**_: Any) -> Any:
        waiting.release()
        assert free.wait(PATIENCE_S)
        return []

    monkeypatch.setattr(database.queue, "jobs", held)
    threads = [threading.Thread(target=get, args=(f"{served.url}/v1/jobs",)) for _ in range(30)]
    try:
        for thread in threads:
            thread.start()
        assert waiting.acquire(timeout=PATIENCE_S)
        time.sleep(0.5)
        assert get(f"{served.url}/healthz", timeout=10).status_code == 200
    finally:
        free.set()
        for thread in threads:
            thread.join(PATIENCE_S)


# What takes the processor


def bad_bodies() -> Iterator[tuple[str, bytes]]:
    many = ",".join(f'"{n:x}":[]' for n in range(100_000))
    yield "options", b'{"model": "bert-encoder:tiny", "options": {' + many.encode() + b"}}"
    yield "fields", b"{" + many.encode() + b"}"
    yield "nested", b'{"model": {"operators": [' + b",".join([b'{"inputs":[' + b"1," * 2000 + b"1]}"] * 250) + b"]}}"


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in bad_bodies()])
def test_a_megabyte_of_errors_is_refused_without_listing_them(served: Server, body: bytes) -> None:
    with httpx2.Client(base_url=served.url, timeout=PATIENCE_S) as client:
        before = peak_bytes()
        response = client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
        assert (response.status_code, len(response.content) < 10_000) == (422, True)
        assert "more than 20000 values" in response.json()["detail"]
        assert peak_bytes() - before < 64 << 20


def test_an_object_with_too_many_keys_is_refused_before_each_is_checked(served: Server) -> None:
    body = b"{" + b",".join(b'"%d": 1' % n for n in range(1025)) + b"}"
    response = post(f"{served.url}/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, "has 1025 keys: give at most 1024" in response.json()["detail"]) == (422, True)


def test_errors_below_the_bound_are_counted_and_the_first_hundred_listed(served: Server) -> None:
    body = b'{"model": "bert-encoder:tiny", ' + b",".join(b'"%d": 1' % n for n in range(1000)) + b"}"
    response = post(f"{served.url}/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    found = response.json()
    assert (response.status_code, len(found["errors"])) == (422, 100)
    assert found["detail"].endswith("; and 997 more")


def test_a_name_that_is_long_is_not_sent_back_whole(served: Server) -> None:
    body = b'{"model": "bert-encoder:tiny", "' + b"x" * 1_000_000 + b'": 1}'
    response = post(f"{served.url}/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, len(response.content) < 5000) == (422, True)


def test_bodies_are_checked_beside_the_event_loop(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is, other requests are answered."""
    from autotuner.server.http import strict

    free, checking, read = threading.Event(), threading.Event(), strict.read_json

    def held(body: bytes) -> Any:
        checking.set()
        assert free.wait(PATIENCE_S)
        return read(body)

    monkeypatch.setattr(strict, "read_json", held)
    body, answers = {"model": "bert-encoder:tiny"}, []
    thread = threading.Thread(
        target=lambda: answers.append(post(f"{served.url}/v1/jobs", json=body, timeout=PATIENCE_S).status_code)
    )
    thread.start()
    try:
        assert checking.wait(PATIENCE_S)
        assert get(f"{served.url}/v1/jobs", timeout=10).status_code == 200
    finally:
        free.set()
        thread.join(PATIENCE_S)
    assert answers == [201]


def peak_bytes() -> int:
    """Return the most memory that this process, which serves, has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)
