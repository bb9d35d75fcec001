"""A service in a test's own words."""

import itertools
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from autotuner.server.client import Client
from autotuner.server.client.transport import Clock

Given = httpx2.Response | Exception | Callable[[httpx2.Request], httpx2.Response]

JOB: dict[str, Any] = {
    "id": 3, "state": "queued", "cancelling": False, "attended": False, "model": "bert-encoder:tiny", "family": "f",
    "extents": {"b": 4}, "options": {"activation": "relu"}, "dtype": "float32", "device_type": "cpu",
    "device_name": None, "gap": None, "limits": {"seconds": None, "measurements": None}, "worker": None,
    "progress": None, "counts": {}, "configuration_id": None, "created_at": "2026-11-20T10:00:00Z",
    "started_at": None, "finished_at": None, "message": "", "revision": 1,
}  # fmt: skip

MEASUREMENT: dict[str, Any] = {
    "id": 1, "environment_key": "e", "call_key": "c", "signature": "s", "kinds": ["bias"], "kernel": "torch_bias",
    "forms": ["ab"], "params": {}, "extents": [[2, 3]], "status": "ok", "median_us": 2.0, "low_us": 1.0,
    "high_us": 3.0, "samples": 5, "workspace_bytes": 0, "message": "", "measured_at": "2026-11-20T10:00:00Z",
}  # fmt: skip

PROGRESS: dict[str, Any] = {
    "stage": "measure", "done": 5, "total": 20, "measured": 4, "reused": 1, "failed": 2, "best_us": 1500.0,
    "bound_us": 1000.0, "gap": 0.5, "estimated_gap": None, "eta_s": 30.0,
}  # fmt: skip


def job(**changes: Any) -> dict[str, Any]:
    return JOB | changes


def problem(status: int, detail: str, **more: Any) -> httpx2.Response:
    """Return a refusal as RFC 9457 has it."""
    body = {"title": "refused", "status": status, "detail": detail} | more
    headers = {"Content-Type": "application/problem+json"}
    return httpx2.Response(status, text=json.dumps(body), headers=headers)


def events(*jobs: dict[str, Any], broken: bool = False, ids: bool = True) -> httpx2.Response:
    """Return a stream of events, one for each job; a broken one ends in an error of the connection."""

    def stream() -> Iterator[bytes]:
        yield b": here\n\n"
        for found in jobs:
            yield (f"id: {found['revision']}\n" if ids else "").encode()
            yield f"event: job\ndata: {json.dumps(found)}\n\n".encode()
        if broken:
            raise httpx2.ReadError("the connection was lost")

    return httpx2.Response(200, content=stream(), headers={"Content-Type": "text/event-stream; charset=utf-8"})


class Pretended:
    """Answers each "METHOD path" with what was given for it, in order; the last one stays."""

    def __init__(self) -> None:
        self.answers: dict[str, deque[Given]] = defaultdict(deque)
        self.requests: list[httpx2.Request] = []
        self.pauses: list[float] = []
        self.transport = httpx2.MockTransport(self._handle)
        self.clock = Clock(sleep=self.pauses.append)

    def client(self, url: str = "http://service", clock: Clock | None = None) -> Client:
        """Return a client of this service, whose pauses are counted, not made."""
        return Client(url, transport=self.transport, clock=clock or self.clock)

    def ticking(self, step_s: float) -> Clock:
        """Return a clock that goes on by a step each time that it is read."""
        ticks = itertools.count(step=step_s)
        return Clock(lambda: next(ticks), self.pauses.append)

    def on(self, route: str, *answers: Given | dict[str, Any] | list[Any]) -> None:
        """Say how a route answers: a body as JSON, a response, an error of the connection, or what makes one."""
        for answer in answers:
            made = httpx2.Response(200, json=answer) if isinstance(answer, dict | list) else answer
            self.answers[route].append(made)

    @property
    def asked(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]

    def _handle(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answers = self.answers[f"{request.method} {request.url.path}"]
        if not answers:
            return httpx2.Response(404, text="<html>not here</html>")
        answer = answers.popleft() if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(request) if callable(answer) else answer
