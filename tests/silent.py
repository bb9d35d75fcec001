"""A server that accepts connections and then says nothing, in the place of a PostgreSQL that hangs."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from autotuner.database import Database, Timeouts
from autotuner.database.engine import make_engine, read_url
from autotuner.database.retrying import Retrying


def message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body


WELCOME = b"".join((
    message(b"R", (0).to_bytes(4, "big")),
    *(message(b"S", b"%s\0%s\0" % pair) for pair in ((b"server_version", b"15.0"), (b"client_encoding", b"UTF8"))),
    message(b"K", bytes(8)),
    message(b"Z", b"I"),
))  # fmt: skip


@contextmanager
def silent(*, welcomes: bool) -> Iterator[str]:
    """Yield the URL of a server that accepts connections, lets in who comes if it `welcomes`, and then says nothing."""
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            if welcomes:
                threading.Thread(target=welcome, args=(connection,), daemon=True).start()

    def welcome(connection: socket.socket) -> None:
        while len(request := connection.recv(4096)) == 8:  # for encryption: "N" is no
            connection.sendall(b"N")
        if request:
            connection.sendall(WELCOME)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"postgresql+psycopg://tuner:secret@127.0.0.1:{listener.getsockname()[1]}/tunings?gssencmode=disable"
    for connection in kept:
        connection.close()


def on(url: str, timeouts: Timeouts) -> Database:
    """Return a database that was opened while its server still answered, as far as it knows."""
    retrying = Retrying(timeouts, lambda *_, **__: None)
    return Database(make_engine(read_url(url), retrying), retrying)
