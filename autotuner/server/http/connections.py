"""Connections: bounded in number, and in the time that a request takes to arrive and an answer to be taken.

uvicorn (0.54) itself ends a kept connection that is idle for 5 s (`timeout_keep_alive`), and bounds headers to 16 KiB
(`h11_max_incomplete_event_size`). It lacks what stands here:

- It bounds no time otherwise: a client that sends a byte now and then, or reads nothing, would hold its connection for
  ever.
- It bounds no connections: `limit_concurrency` refuses requests, also those of clients that have a connection.
- It answers what is no HTTP in plain text, and logs two warnings for each request with an `Upgrade` header.
- It keeps half a request until its time to end is over.

A proxy bounds the connections of one address.
"""

import asyncio
import logging
import resource
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from http import HTTPStatus
from time import monotonic
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from autotuner.server.http.problems import problem

CONNECTIONS_MAX = 512
STREAMS_MAX = 256
"""Of connections, those that may follow a job at once."""

HEADERS_S = 10.0
BODY_S = 30.0
ANSWER_S = 30.0
"""For how long a client may leave an answer in the buffers of its connection."""

READERS = 6
PLANNERS = 1
WRITERS = 3
CHECKERS = 2
PROBES = 1
KEEPERS = 1
WATCHERS = 1
"""Threads, apart by what may hold them, so that what waits for the database's write lock holds nobody else.

Together they are the 15 connections that an engine opens, so that no request waits for one in vain. `CHECKERS` check
what is submitted, and `PLANNERS` set plans against measurements: both take the processor. `KEEPERS` look tokens up.
"""

REPEATED_S = 60.0
EXHAUSTED = (EMFILE, ENFILE, ENOBUFS, ENOMEM)
log = logging.getLogger("autotuner.server.http")


def connections_max() -> int:
    """Return how many connections there may be at once: half of the file descriptors that the process may have open.

    The rest is for the database, and for connections that are refused.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else max(1, min(CONNECTIONS_MAX, soft // 2))


def streams_max() -> int:
    """Return how many event streams there may be at once: half of the connections."""
    return max(1, min(STREAMS_MAX, connections_max() // 2))


class Seldom:
    """Logs an event at most once a minute, with how often it happened in between."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._count = 0
        self._said_at: float | None = None

    def __call__(self, **facts: Any) -> None:
        self._count += 1
        now = monotonic()
        if self._said_at is None or now - self._said_at >= REPEATED_S:
            log.warning(self._event, extra={"facts": facts | {"times": self._count}})
            self._said_at, self._count = now, 0


refused = Seldom("connections_refused")
exhausted = Seldom("connections_not_accepted")


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an error of the event loop; where file descriptors have run out, there are hundreds a second."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in EXHAUSTED and "socket" in context:
        exhausted(error=str(error))
    else:
        loop.default_exception_handler(context)


class Connection(H11Protocol):
    """A connection that ends where a request or its reader is too slow; what is no HTTP gets problem details."""

    is_refused = False
    _waiting_for: Any = None
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = connections_max()
        # Those that were refused are there until their answer has left.
        if sum(not getattr(other, "is_refused", False) for other in self.connections) > most:
            self.is_refused = True
            refused(most=most)
            self._refuse(503, f"the service has {most} connections, and takes no more now: try again later")
        else:
            self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._limit()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        self._refuse(400, "the request is no HTTP/1.1, or its headers are above 16 KiB")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(ANSWER_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def end_half_body(self) -> None:
        """End a request whose body has not come as a whole, as the service ends: nobody waits for the rest."""
        if self.conn.their_state is h11.SEND_BODY:
            self._refuse(503, "the service ends, and the body had not arrived: send it again later")

    def _should_upgrade(self) -> bool:
        return False

    def _limit(self) -> None:
        """Start the time that the next part of a request may take, once for each part."""
        state = self.conn.their_state
        if state is self._waiting_for:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._waiting_for, self._deadline = state, None
        seconds = {h11.IDLE: HEADERS_S, h11.SEND_BODY: BODY_S}.get(state)
        if seconds is not None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(seconds, self._end_slow)

    def _end_slow(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._refuse(408, f"the body did not arrive within {BODY_S:g} s: send it at once")
        elif self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not arrive within {HEADERS_S:g} s: send them at once")
        else:
            self.transport.close()

    def _refuse(self, status: int, detail: str) -> None:
        """Send a problem, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = problem(status, detail, headers={"Connection": "close"})
            reason = HTTPStatus(status).phrase.encode()
            head = h11.Response(status_code=status, headers=response.raw_headers, reason=reason)
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                self.cycle.disconnected = True  # whatever handles the request: its answer has no reader
                self.cycle.message_event.set()
        self.transport.close()
