"""The process of a bench actor under Ray."""

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import ray

from autotuner.fleet.actor import IDLE_S, BenchActor


class GpuActor:
    """A `BenchActor` as Ray runs it; questions are methods, and what travels is text."""

    def __init__(self, slot: str, idle_s: float = IDLE_S) -> None:
        self._own: Any = ray.get_runtime_context().current_actor
        self._bench = BenchActor(slot, self._leave, idle_s)

    def open(self, spec: str) -> str:
        return self._bench.open(spec)

    def look(self, spec: str) -> str:
        return self._bench.look(spec)

    def measure(self, spec: str, request: str) -> Iterator[str]:
        yield from self._bench.measure(spec, request)

    def ask(self, spec: str, request: str) -> str:
        return self._bench.ask(spec, request)

    def compile(self, spec: str, request: str) -> str:
        return self._bench.compile(spec, request)

    def _leave(self) -> None:
        threading.Thread(target=ray.kill, args=(self._own,)).start()


@cache
def remote_class() -> Any:
    """Return the class as Ray starts it: one GPU each; one thread for questions, a second one for compiling."""
    GpuActor.compile = ray.method(concurrency_group="compiling")(GpuActor.compile)  # type: ignore[method-assign]
    return ray.remote(num_gpus=1, num_cpus=0, max_restarts=0, concurrency_groups={"compiling": 1})(GpuActor)
