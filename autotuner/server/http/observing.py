"""Observed requests: each has an id, a line of the log and its place in the metrics."""

import asyncio
import logging
import re
from secrets import token_hex
from time import perf_counter

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from autotuner.server.http.metrics import Metrics
from autotuner.server.http.problems import problem
from autotuner.server.logs import BOUND

STREAM = b"text/event-stream"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
log = logging.getLogger("autotuner.server.http")


class Observed:
    """Logs and counts each request when its answer is complete, and says its id in `X-Request-Id`.

    The id is the client's own, where it sends one of letters, digits, dots, colons, dashes and underscores. All that is
    logged on the way to the answer has it.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._metrics: Metrics = app.state.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, streams = perf_counter(), 0, False
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else token_hex(8)
        state = scope.setdefault("state", {})
        BOUND.set({"request_id": request_id})  # each request is a task, with a context of its own

        async def noted(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                streams = any(name == b"content-type" and value.startswith(STREAM) for name, value in headers)
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:  # the service ends, and this took longer than it may then
            if not status:
                detail = "the service ends before it could answer: try again later"
                await problem(503, detail, instance=scope["path"], headers={"Connection": "close"})(
                    scope, receive, noted
                )
        finally:
            seconds, route = perf_counter() - began, state.get("route")
            # Without a status the client went before there was an answer.
            self._metrics.count(scope["method"], route, status, None if streams else seconds)
            if log.isEnabledFor(logging.INFO):
                query, caller = scope["query_string"].decode("latin-1"), state.get("caller")
                facts = {
                    "method": scope["method"],
                    "path": scope["path"] + (f"?{query}" if query else ""),
                    "status": status,
                    "duration_ms": round(1e3 * seconds, 2),
                    "client": (scope.get("client") or ("",))[0],
                    "caller": "" if caller is None else caller.name,
                }
                log.info("request", extra={"facts": facts})
