"""Connections of clients that write HTTP by hand."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.http.listening import PATIENCE_S

HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """Yield a connection to a service."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes."""
    got = b""
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


def problem_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    found: dict[str, Any] = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % found["status"])
    return found
