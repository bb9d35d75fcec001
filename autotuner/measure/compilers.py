"""Processes that build calls ahead of timing or beside it, and stay for the next calls."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from autotuner.checkpoint import checkpoint
from autotuner.errors import MeasureError
from autotuner.ir.records import Call, Measurement
from autotuner.measure.lock import Waiting
from autotuner.measure.process import Child, DiedError

EARLY = 4
"""Processes that are begun before there is anything to compile: enough that races can begin while others start."""
MAX_WAIT_S = 0.5
LOST_MAX = 3

Built = tuple[Call, Measurement | None]


class CompilerPool:
    """Child processes that build calls. A process imports torch once, which takes seconds, and builds until `close`.

    Nothing happens by itself: whoever waits for something else calls `turn` when a process has something to say.

    Args:
        start: what a process needs to know first.
        most: the number of processes at most.
        waiting: told for how long a process has waited for the device, and who holds that.
    """

    def __init__(self, start: Mapping[str, Any], most: int, waiting: Waiting) -> None:
        self._start, self._most, self._waiting = start, most, waiting
        self._queue: deque[Call] = deque()
        self._built: list[Built] = []
        self._lost = 0
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
        """Seconds since the last call was built; 0 while there is one to build."""
        return 0.0 if self._queue or self._busy else monotonic() - self._used_at

    @property
    def connections(self) -> list[Connection]:
        """Of the processes at work: one that is ready to be read asks for a `turn`."""
        return [child.connection for child in self._busy]

    @property
    def asked(self) -> list[Call]:
        """The calls that wait to be built, and those that are being built."""
        return [*self._queue, *(job[0] for job in self._busy.values() if job is not None)]

    def begin(self) -> None:
        """Start some processes now, and go on while they import what they need."""
        for _ in range(min(EARLY, self._most) - self.count):
            self._busy[Child(self._start, self._waiting)] = None

    def ask(self, calls: Sequence[Call]) -> None:
        """Have calls built in this order, in place of those that wait to be; those that are being built go on."""
        under_way = {job[0].key for job in self._busy.values() if job is not None}
        self._queue = deque(call for call in calls if call.key not in under_way)
        self._lost = 0
        self.turn()

    def turn(self, wait_s: float = 0.0) -> None:
        """Take what processes have to say, and give them calls.

        Args:
            wait_s: seconds to wait until one has something to say.

        Raises:
            MeasureError: a process cannot be started, or processes are lost repeatedly while they are on no call.
        """
        self._hand_out()
        if not self._busy:
            return
        soonest_s = min(child.deadline() for child in self._busy) - monotonic()
        ready = wait(self.connections, min(wait_s, max(0.0, soonest_s)))
        for child in [c for c in self._busy if c.connection in ready or c.deadline() <= monotonic()]:
            self._take(child)
            self._used_at = monotonic()
        self._hand_out()

    def built(self) -> list[Built]:
        """Return the calls whose compilation has ended since this was asked: with None, or with why it failed."""
        found, self._built = self._built, []
        return found

    def build(self, calls: Sequence[Call]) -> Iterator[Built]:
        """Build calls and yield each as its compilation ends: with None, or with why it cannot be had.

        Leaving early ends all processes.

        Raises:
            MeasureError: as `turn`.
        """
        over = False
        try:
            self.ask(calls)
            while self._queue or self._busy or self._built:  # asking may have built some already
                checkpoint()
                self.turn(MAX_WAIT_S)
                yield from self.built()
            over = True
        finally:
            if not over:
                self.close()

    def rest(self) -> None:
        """End all processes for now: what waits, and what they were building, is built after the next `turn`."""
        under_way = [job[0] for job in self._busy.values() if job is not None]
        children = (*self._idle, *self._busy)
        for child in children:  # all at once: a device takes its time to take back what each has of it
            child.signal()
        for child in children:
            child.kill()
        self._idle.clear()
        self._busy.clear()
        self._queue.extendleft(reversed(under_way))

    def close(self) -> None:
        """End all processes, and forget what waits."""
        self.rest()
        self._queue.clear()

    def _hand_out(self) -> None:
        """Give waiting calls to idle processes, and start processes for those that are left."""
        while self._queue and self._idle:
            child, call = self._idle.pop(), self._queue.popleft()
            try:
                child.send({"do": "build", "calls": [call.to_json()]})
            except DiedError as error:
                child.kill()
                self._queue.appendleft(call)
                self._lost += 1
                if self._lost == LOST_MAX:
                    raise MeasureError(f"compiling processes were lost {LOST_MAX} times: {error}") from None
                continue
            self._busy[child] = (call, None)
        starting = sum(job is None for job in self._busy.values())
        for _ in range(min(len(self._queue) - starting, self._most - self.count)):
            self._busy[Child(self._start, self._waiting)] = None

    def _take(self, child: Child) -> None:
        """Take an answer of a process, and note its call as built if that is done."""
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
            self._built.append((job[0], error.measurement))
            return
        except MeasureError:  # it did not start
            del self._busy[child]
            raise
        if job is not None and "measurement" in answer:
            self._busy[child] = (job[0], Measurement.from_json(answer["measurement"]))
            return
        del self._busy[child]
        self._idle.append(child)
        self._lost = 0
        if job is not None:
            self._built.append(job)
