"""A service that really listens, in a thread of the test."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from autotuner.database import Database
from autotuner.server.http import create_app
from autotuner.server.http.serving import Server, listen

PATIENCE_S = 60.0


@contextmanager
def listening(
    database: Database,
    *,
    ending: Callable[[], None] = lambda: None,
    local: bool = True,
    trusted_proxies: Collection[str] = (),
) -> Iterator[Server]:
    """Yield a server that takes requests; it has ended when the context has."""
    app = create_app(database, local=local)
    server = Server(app, listen("127.0.0.1", 0), ending=ending, trusted_proxies=trusted_proxies)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it does not, for a minute.
    """
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the condition does not hold")
        time.sleep(0.01)
