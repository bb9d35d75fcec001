"""Processes that build calls ahead of timing, on all cores, and stay for the next calls."""

from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

from autotuner.checkpoint import checkpoint
from autotuner.errors import MeasureError
from autotuner.ir.records import Call, Measurement
from autotuner.measure.lock import Waiting
from autotuner.measure.process import Child, DiedError

MAX_WAIT_S = 0.5
LOST_MAX = 3

Built = tuple[Call, Measurement | None]


class CompilerPool:
    """Child processes that build calls. A process imports torch once, which takes seconds, and builds until `close`.

    Args:
        start: what a process needs to know first.
        most: the number of processes at most.
        waiting: told for how long a process has waited for the device, and who holds that.
    """

    def __init__(self, start: Mapping[str, Any], most: int, waiting: Waiting) -> None:
        self._start, self._most, self._waiting = start, most, waiting
        self._idle: list[Child] = []
        self._busy: dict[Child, Built | None] = {}
        """The call of each process and its failure, if any; None while the process starts."""
        self._used_at = monotonic()

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self._idle) + len(self._busy)

    @property
    def idle_s(self) -> float:
        """Seconds since the last call was built."""
        return monotonic() - self._used_at

    def build(self, calls: Sequence[Call]) -> Iterator[Built]:
        """Build calls and yield each as its compilation ends: with None, or with why it cannot be had.

        Leaving early ends all processes.

        Raises:
            MeasureError: a process cannot be started, or processes are lost repeatedly while they are on no call.
        """
        queue = list(reversed(calls))
        lost = 0
        over = False
        try:
            while queue or self._busy:
                while queue and self._idle:
                    child, call = self._idle.pop(), queue.pop()
                    try:
                        child.send({"do": "build", "calls": [call.to_json()]})
                    except DiedError as error:
                        child.kill()
                        queue.append(call)
                        lost += 1
                        if lost == LOST_MAX:
                            raise MeasureError(f"compiling processes were lost {lost} times: {error}") from None
                        continue
                    self._busy[child] = (call, None)
                starting = sum(job is None for job in self._busy.values())
                for _ in range(min(len(queue) - starting, self._most - self.count)):
                    self._busy[Child(self._start, self._waiting)] = None
                for child in _answering(list(self._busy)):
                    yield from self._taken(child)
            over = True
        finally:
            self._used_at = monotonic()
            if not over:
                self.close()

    def _taken(self, child: Child) -> Iterator[Built]:
        """Take an answer of a process, and yield its call if that is done."""
        job = self._busy[child]
        try:
            if job is None:
                child.started()
                answer: Mapping[str, Any] = {}
            else:
                answer = child.receive()
        except DiedError as error:
            del self._busy[child]
            assert job is not None
            yield job[0], error.measurement
            return
        if job is not None and "measurement" in answer:
            self._busy[child] = (job[0], Measurement.from_json(answer["measurement"]))
            return
        del self._busy[child]
        self._idle.append(child)
        if job is not None:
            yield job

    def close(self) -> None:
        """End all processes."""
        for child in (*self._idle, *self._busy):
            child.kill()
        self._idle.clear()
        self._busy.clear()


def _answering(children: Sequence[Child]) -> list[Child]:
    """Wait until some children have something to say or are late, and return those."""
    while True:
        checkpoint()
        soonest = min(child.deadline() for child in children)
        ready = wait([child.connection for child in children], min(MAX_WAIT_S, max(0.0, soonest - monotonic())))
        found = [c for c in children if c.connection in ready or c.deadline() <= monotonic()]
        if found:
            return found
