"""The service as a process: where it listens, what it logs, how it ends."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from autotuner.database import Database, open_database
from autotuner.errors import DatabaseError, InputError
from autotuner.server.http import ServiceOptions, serve
from autotuner.server.http.serving import listen
from tests.server.http.filled import enqueue
from tests.server.http.listening import PATIENCE_S, listening

SCRIPT = """
import sys
from autotuner.server.http import ServiceOptions, serve
serve(sys.argv[1], ServiceOptions(port=0, log_format="words"))
print("returned")
"""


@contextmanager
def process(database: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that serves a database, and its URL."""
    command = [sys.executable, "-c", SCRIPT, str(database)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stderr is not None
            line = next(line for line in started.stderr if " serving " in line)
            yield started, line.split("url=")[1].strip().strip("'")
        finally:
            started.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_open_streams_and_then_the_service(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "served.sqlite"
    with open_database(file) as database:
        enqueue(database)
    with process(file) as (started, url), httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
        with client.stream("GET", "/v1/jobs/1/events") as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line.startswith("event")) == "event: progress"
            started.send_signal(number)
            assert [line for line in lines if line.startswith("event")] == []
        out, err = started.communicate(timeout=PATIENCE_S)
        assert (started.returncode, out) == (0, "returned\n")
        assert " method='GET' path='/v1/jobs/1/events' status=200 duration_ms=" in err
        assert err.splitlines()[-1].endswith(" ended")
        assert "Traceback" not in err


def test_a_body_that_never_ends_is_refused_while_it_comes(database: Database) -> None:
    with listening(database) as server, httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(
                b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(17):
                connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert client.get("/healthz").status_code == 200


def test_what_is_sent_leaves_at_once() -> None:
    """asyncio turns Nagle's algorithm off where a socket names its protocol; otherwise a body waits for 40 ms."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_is_refused_with_what_would_be_valid(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"cannot listen at 127.0.0.1:{port}: .*a port that is free \(0 for any\)"
        ):
            serve(str(tmp_path / "x.sqlite"), ServiceOptions(port=port))
    with pytest.raises(InputError, match=r"cannot listen at no\.such\.host\.invalid:0"):
        serve(str(tmp_path / "x.sqlite"), ServiceOptions("no.such.host.invalid", 0))


def test_a_database_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="there is no directory"):
        serve(str(tmp_path / "nowhere" / "x.sqlite"), ServiceOptions(port=0))
