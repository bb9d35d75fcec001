"""A simulated fleet: devices that time calls on recorded times, in virtual time, for tuning jobs that really run.

Each job is a thread with the project's own tuner. One thread runs at a time, and its processor time is its part of the
virtual clock; devices, compilers and ceilings take what was recorded or is assumed here. Nobody sleeps.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal

from autotuner.ir.records import Call, Environment, Measurement
from autotuner.measure.roofline import NO_ROOFLINE, Roofline
from autotuner.tuner import MeasurerProtocol
from autotuner.tuner.batches import Batch, Batches
from autotuner.tuner.progress import Result

IN_HAND = 2
"""Batches that each device has in hand of one job: it begins the next while results of the last are on their way."""

ROUND_TRIP_S = 0.001
"""To hand a batch over, and its results back."""

Fate = Literal["ok", "dies", "part"]


@dataclass(frozen=True)
class Durations:
    """Seconds that a device takes.

    Args:
        call_s: for one call in a race, with its set-up, by library: the first word of a kernel's name.
        race_s: for a race, beside its calls.
        compile_s: for compiling one call on one core.
        cores: that compile at once, for each job.
        ceilings_s, noise_s: for the roofline, and for the noise floor.
    """

    call_s: Mapping[str, float]
    race_s: float = 0.03
    compile_s: float = 5.0
    cores: int = 16
    ceilings_s: float = 1.1
    noise_s: float = 0.3

    def of(self, batch: Batch) -> float:
        usual = sum(self.call_s.values()) / len(self.call_s)
        return self.race_s + sum(self.call_s.get(c.candidate.kernel.split("_")[0], usual) for c in batch.calls)


class _Job:
    """A job's thread, and its place in virtual time."""

    def __init__(self, name: str, run: Callable[[], Any]) -> None:
        self.name = name
        self.at = 0.0
        self.ended_at: float | None = None
        self.inbox: deque[tuple[Batch, list[Result], float]] = deque()
        self.is_waiting = False
        self.waits: deque[Batch] = deque()
        self.baton = threading.Event()
        self.error: BaseException | None = None
        self.mark = 0.0
        self._run = run
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.back = threading.Event()

    def _main(self) -> None:
        self.baton.wait()
        self.mark = time.thread_time()
        try:
            self._run()
        except BaseException as error:
            self.error = error
        self.own()
        self.ended_at = self.at
        self.back.set()

    def own(self) -> float:
        """Return the job's time by now, its own work counted."""
        now = time.thread_time()
        self.at, self.mark = self.at + now - self.mark, now
        return self.at

    def block(self) -> None:
        """Hand the baton to the scheduler, and wait until it comes back."""
        self.baton.clear()
        self.back.set()
        self.baton.wait()
        self.mark = time.thread_time()


@dataclass(eq=False)
class Device:
    """A device of the fleet.

    Args:
        speed: its times are so many times the recorded ones.
        fates: what becomes of its batches, one after another; all others are ok.
    """

    speed: float = 1.0
    fates: list[Fate] = field(default_factory=list)
    busy_s: float = 0.0
    is_busy: bool = False


class Simulation:
    """Jobs and devices in virtual time; events happen in its order, whatever the processor does.

    Args:
        environment: of all devices.
        recorded: measurements by call key; what is not recorded has no result.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        durations: Durations,
        environment: Environment,
        recorded: Mapping[str, Measurement],
        ceilings: Roofline = NO_ROOFLINE,
    ) -> None:
        self.devices, self.durations = devices, durations
        self.environment, self.recorded, self.ceilings = environment, recorded, ceilings
        self.jobs: list[_Job] = []
        self.now = 0.0
        self.batches: list[tuple[float, float, int]] = []
        """When each batch began and ended, and how many calls it had."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._turn = 0

    def add(self, name: str, tune: Callable[["SimulatedFleet"], Any]) -> None:
        """Add a job that begins at once: a function that tunes with a measurer."""
        job = _Job(name, lambda: tune(SimulatedFleet(self, job)))
        self.jobs.append(job)

    def run(self) -> None:
        """Run all jobs to their end. The first error of a job is raised here."""
        for job in self.jobs:
            job.thread.start()
            self.at(0.0, lambda job=job: self.resume(job))  # type: ignore[misc]
        while self._events:
            self.now, _, happen = heappop(self._events)
            happen()
        for job in self.jobs:
            job.thread.join()
            if job.error is not None:
                raise job.error

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (when_s, next(self._numbers), happen))

    def resume(self, job: _Job) -> None:
        """Let a job run from now until it waits for something."""
        job.at = max(job.at, self.now)
        job.back.clear()
        job.baton.set()
        job.back.wait()

    def look(self, job: _Job) -> None:
        """Let a job go on if a result is there for it, or else when one is."""
        job.is_waiting = not job.inbox
        if job.inbox:
            self.resume(job)

    def submit(self, job: _Job, batch: Batch) -> None:
        job.waits.append(batch)
        self.hand_out()

    def hand_out(self) -> None:
        """Give the waiting batches of all jobs, in turn, to devices that are free."""
        for device in self.devices:
            while not device.is_busy and (job := self._next_job()) is not None:
                self._begin(device, job, job.waits.popleft())

    def _next_job(self) -> _Job | None:
        turns = [self.jobs[(self._turn + number) % len(self.jobs)] for number in range(len(self.jobs))]
        for job in turns:
            if job.waits:
                self._turn = self.jobs.index(job) + 1
                return job
        return None

    def _begin(self, device: Device, job: _Job, batch: Batch) -> None:
        took_s = ROUND_TRIP_S + self.durations.of(batch)
        fate = device.fates.pop(0) if device.fates else "ok"
        found = [(call, self.recorded[call.key]) for call in batch.calls if call.key in self.recorded]
        results = [(call, _at_speed(measurement, device.speed)) for call, measurement in found]
        if fate != "ok":
            results = results[: len(results) // 2] if fate == "part" else []
        began, device.is_busy = self.now, True

        def end() -> None:
            device.is_busy = False
            device.busy_s += took_s
            self.batches.append((began, self.now, len(results)))
            job.inbox.append((batch, results, took_s))
            if job.is_waiting:
                job.is_waiting = False
                self.resume(job)
            self.hand_out()

        self.at(self.now + took_s, end)


class SimulatedFleet(MeasurerProtocol):
    """The measurer of one job: hands its races to the devices of a simulation."""

    def __init__(self, simulation: Simulation, job: _Job) -> None:
        self._simulation, self._job = simulation, job
        self._began = time.monotonic()
        self._compiling: list[tuple[float, Call]] = []
        """Calls that are compiled or wait for it, each with the time at which it is."""

    @property
    def environment(self) -> Environment:
        return self._simulation.environment

    @property
    def devices(self) -> int:
        return len(self._simulation.devices)

    @property
    def now(self) -> float:
        """The job's virtual time."""
        return self._job.own()

    @property
    def waited_s(self) -> float:
        """What has passed beside virtual time: a tuner's clock without it is the virtual one."""
        return time.monotonic() - self._began - self._job.own()

    def hear(self, tell: Callable[[str], None]) -> None:
        """Never wait for another process."""

    def _takes(self, seconds: float) -> None:
        job, simulation = self._job, self._simulation
        simulation.at(job.own() + seconds, lambda: simulation.resume(job))
        job.block()

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        durations = self._simulation.durations
        for number, call in enumerate(calls):
            if number % durations.cores == 0:
                self._takes(durations.compile_s)
            yield call, None

    @property
    def compiles_beside(self) -> bool:
        return True

    def compile_beside(self, calls: Sequence[Call]) -> None:
        now, durations = self._job.own(), self._simulation.durations
        self._compiling = [(end, call) for end, call in self._compiling if end - durations.compile_s <= now]
        begun = {call.key for _, call in self._compiling}
        free = sorted(end for end, _ in self._compiling)[-durations.cores :]
        cores = [now] * (durations.cores - len(free)) + free
        for call in calls:
            if call.key not in begun:
                end = max(now, heappop(cores)) + durations.compile_s
                self._compiling.append((end, call))
                heappush(cores, end)

    def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
        now = self._job.own()
        found = [call for end, call in self._compiling if end <= now]
        self._compiling = [(end, call) for end, call in self._compiling if end > now]
        return [(call, None) for call in found]

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        batches, left, in_hand = Batches(self.devices), deque[Batch](), 0
        coming: Iterator[Sequence[Call]] | None = iter(races)
        while True:
            while in_hand < IN_HAND * self.devices and (left or coming is not None):
                if left:
                    self._submit(batches.renewed(left.popleft()))
                    in_hand += 1
                elif coming is not None:
                    race = next(coming, None)
                    if race is not None and not race:  # nothing is compiled yet
                        break
                    coming = None if race is None else coming
                    left.extend(batches.cut(race) if race else ())
            if not in_hand and coming is not None:
                self._takes(min(end for end, _ in self._compiling) - self._job.own())
                continue
            if not in_hand:
                return
            batch, results, took_s = self._next()
            in_hand -= 1
            yield from batches.join(batch, results, took_s)
            if len(results) < len(batch.calls):
                rest = batches.rest(batch)
                known = () if rest is None else [c for c in rest.calls if c.key in self._simulation.recorded]
                if rest is not None and any(call.key != rest.leads for call in known):
                    left.appendleft(rest)

    def _submit(self, batch: Batch) -> None:
        job, simulation = self._job, self._simulation
        simulation.at(job.own(), lambda: simulation.submit(job, batch))

    def _next(self) -> tuple[Batch, list[Result], float]:
        job, simulation = self._job, self._simulation
        simulation.at(job.own(), lambda: simulation.look(job))
        job.block()
        return job.inbox.popleft()

    def noise_floor(self) -> float:
        self._takes(self._simulation.durations.noise_s)
        return 0.0

    def ceilings(self, dtypes: Collection[str]) -> Roofline:  # noqa: ARG002
        self._takes(self._simulation.durations.ceilings_s)
        return self._simulation.ceilings


def _at_speed(measurement: Measurement, speed: float) -> Measurement:
    if speed == 1.0 or measurement.median_us is None:
        return measurement
    low_us, high_us = measurement.low_us, measurement.high_us
    return replace(
        measurement,
        median_us=speed * measurement.median_us,
        low_us=None if low_us is None else speed * low_us,
        high_us=None if high_us is None else speed * high_us,
    )
