"""Limited connections: psycopg's, that give up a server which accepts them and then says nothing.

The server's own `statement_timeout` ends a statement that takes too long. A server that hangs, or that the network has
swallowed, does not end it: so this side stops to wait as well.
"""

from collections.abc import Generator
from math import ceil
from time import monotonic
from typing import Any

from sqlalchemy import Engine, event

from autotuner.database.patience import Waiting

GRACE_S = 0.5
"""The server says first that a statement took too long."""

CONNECT_S = 3.0
LOOK_S = 0.1


def limit(engine: Engine, waiting: Waiting) -> None:
    """Have an engine of psycopg make connections that wait no longer than patience allows."""
    from psycopg import Connection, OperationalError
    from psycopg.waiting import wait as waits

    class Limited(Connection):  # type: ignore[misc]  # psycopg need not be installed where types are checked
        answer_s: float | None = waiting.patience.answer_s

        def wait(self, generator: Generator[Any, Any, Any], interval: float = LOOK_S, **named: Any) -> Any:
            try:
                return waits(self._limited(generator), self.pgconn.socket, interval=interval, **named)
            except (KeyboardInterrupt, SystemExit):
                self.pgconn.finish()  # psycopg's own would first ask the server to cancel, and wait for that
                raise

        def _limited(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
            """Pass on what a generator waits for, and end it when its time is up; psycopg looks in every `interval`."""
            began = monotonic()
            try:
                wanted = next(generator)
                while True:
                    ready = yield wanted
                    if not ready and self.answer_s is not None:
                        waited_s = monotonic() - began
                        if waiting.left_s(self.answer_s + GRACE_S - waited_s) <= 0:
                            generator.close()
                            self.pgconn.finish()
                            raise OperationalError(f"the server did not answer for {waited_s:.0f} s")
                    wanted = generator.send(ready)
            except StopIteration as end:
                return end.value

    def connect(_dialect: object, _record: object, arguments: list[Any], named: dict[str, Any]) -> Limited:
        left_s = waiting.left_s(CONNECT_S)
        if left_s <= 0:
            raise OperationalError("no connection is made any more: the process ends")
        named.setdefault("connect_timeout", ceil(left_s))  # psycopg waits for 2 s at least
        connection: Limited = Limited.connect(*arguments, **named)
        answer_ms = ceil(1e3 * waiting.patience.answer_s)
        connection.execute(f"SET statement_timeout = {answer_ms}")
        connection.commit()
        return connection

    event.listen(engine, "do_connect", connect)


def unlimited(driver_connection: object) -> None:
    """Let a limited connection take its time from now on, as a migration may."""
    if hasattr(driver_connection, "answer_s"):
        driver_connection.answer_s = None
