"""One sample on the CPU: a timed loop of calls that rotates through operand sets."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, inf
from time import perf_counter_ns, sleep

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import record_function

from autotuner.measure.policy import CpuPolicy
from autotuner.measure.timer import Run, Sweep

THREADS = "/proc/self/task"
CANARY_EXTENT = 160
WARM_US = 1_000.0
LOOK_SAMPLES = 2
LOOK_ATTEMPTS = 5
ATTEMPTS = 10
ATTEMPTS_US = 100_000.0
PAUSE_S = 0.001
WAIT_SHARE = 0.05
CALLS_MAX = 20_000
NEIGHBOUR_ROWS = 128
ALLOCATION = "memory_alloc"
LAP = "autotuner: a lap of counting memory"
BRIEF_SHARE = 0.1
"""A brief sample is so much shorter: of the least of several, short ones are the more optimistic."""
SWEEP = Sweep(bytes_max=1 << 27, extents=(16, 25, 40, 64, 102, 161, 256, 406, 645, 1024))


class CpuSampler:
    """Times one candidate, built on one or more operand sets.

    Where `between` is given, short calls are timed one by one, each after it: a kernel that follows itself finds its
    own instructions and branches at hand, which in a training step it does not.
    """

    def __init__(self, runs: Sequence[Run], policy: CpuPolicy, between: Run | None = None) -> None:
        self._runs, self._policy, self._between = runs, policy, between
        self._turn = 0
        self.is_contended = False
        self._call_us = self._warm()

    def look(self) -> float:
        """Return the least of some samples, in microseconds of a call.

        Two, or one where a call is a sample by itself, and further ones while this process's threads waited for a core
        in all of them. A stall that the system causes spoils one sample and not its neighbours.
        """
        least_us, self.is_contended = inf, True
        for attempt in range(LOOK_ATTEMPTS):
            waited_us = core_wait_us()
            call_us, spent_us = self._loop()
            least_us = min(least_us, call_us)
            self.is_contended &= core_wait_us() - waited_us > WAIT_SHARE * spent_us
            enough = attempt + 1 >= LOOK_SAMPLES or call_us >= self._policy.single_us
            if enough and not self.is_contended:
                break
        return least_us

    def sample(self) -> tuple[float, float]:
        """Return microseconds of one call, averaged over one sample, and microseconds that taking it took.

        A sample during which this process's threads waited for a core is taken again, after a pause; where that goes
        on, the least of them counts.
        """
        least_us, total_us, self.is_contended = inf, 0.0, False
        for attempt in range(ATTEMPTS):
            waited_us = core_wait_us()
            call_us, spent_us = self._loop()
            least_us, total_us = min(least_us, call_us), total_us + spent_us
            if core_wait_us() - waited_us <= WAIT_SHARE * spent_us:
                return call_us, total_us
            if total_us > ATTEMPTS_US:
                break
            sleep(PAUSE_S * attempt)
        self.is_contended = True
        return least_us, total_us

    def _loop(self) -> tuple[float, float]:
        calls, sets = self._calls(), len(self._runs)
        schedule = [self._runs[(self._turn + i) % sets] for i in range(calls)]
        self._turn += calls
        between = self._between if self._call_us < self._policy.apart_us else None
        began = perf_counter_ns()
        if between is None:
            for run in schedule:
                run()
            timed_ns = perf_counter_ns() - began
        else:
            timed_ns = 0
            for run in schedule:
                between()
                start = perf_counter_ns()
                run()
                timed_ns += perf_counter_ns() - start
        self._call_us = timed_ns / 1e3 / calls
        return self._call_us, (perf_counter_ns() - began) / 1e3

    def _calls(self) -> int:
        if self._call_us >= self._policy.single_us:
            return 1
        return min(CALLS_MAX, ceil(self._policy.sample_us / max(self._call_us, 0.001)))

    def _warm(self) -> float:
        """Call each operand set's kernel once, untimed as far as samples go, until a millisecond is over."""
        fastest_us, spent_us = inf, 0.0
        for run in self._runs:
            began = perf_counter_ns()
            run()
            took_us = (perf_counter_ns() - began) / 1e3
            fastest_us, spent_us = min(fastest_us, took_us), spent_us + took_us
            if spent_us > WARM_US:
                break
        return fastest_us


class Neighbours:
    """Small operators of several kinds, run between timed calls as other operators are in a step.

    Args:
        half_rows: of the product in bfloat16.
    """

    def __init__(self, half_rows: int) -> None:
        self._x, self._y = torch.randn(2, NEIGHBOUR_ROWS, NEIGHBOUR_ROWS)
        self._vector = torch.randn(NEIGHBOUR_ROWS)
        self._out, self._sum = torch.empty_like(self._x), torch.empty_like(self._vector)
        self._halves = [torch.randn(half_rows, half_rows).bfloat16() for _ in range(3)]

    def run(self) -> None:
        x, y, out = self._x, self._y, self._out
        torch.mm(x, y, out=out)
        torch.ops.aten.gelu.out(x, out=out)
        torch.ops.aten._softmax.out(x, 1, False, out=out)
        torch.native_layer_norm(x, [NEIGHBOUR_ROWS], self._vector, self._vector, 1e-5)
        torch.sum(x, 0, out=self._sum)
        out.copy_(x.t())
        torch.add(x, y, out=out)
        torch.mm(self._halves[0], self._halves[1], out=self._halves[2])


def core_wait_us() -> float:
    """Return how long the threads of this process have been ready to run without a core, so far; 0 where none can say.

    It rises when another process computes on our cores, even if that stays invisible to a load average.
    """
    total_ns = 0
    try:
        for thread in os.listdir(THREADS):
            with open(f"{THREADS}/{thread}/schedstat", "rb") as file:
                total_ns += int(file.read().split()[1])
    except (OSError, IndexError):
        return 0.0
    return total_ns / 1e3


def allocated_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at any time while a function runs, as `AllocationCount` has them."""
    count = AllocationCount()
    try:
        run()
    finally:
        (most,), _ = count.stop()
    return most


class AllocationCount:
    """Counts bytes that are allocated, beyond what was there when it began, lap by lap.

    Counted is what the thread that began takes from torch's CPU allocator and gives back, in the sizes that it asks
    for; a library's own memory (oneDNN's scratch) is not. Torch's older profiler reports these events at 2 us a
    recording, the one in `torch.profiler` at 400 us, where each kernel that is measured has one.
    """

    counts_all = False
    others_bytes = 0

    def __init__(self) -> None:
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(config)

    def lap(self) -> None:
        """End a lap, and begin the next one."""
        with record_function(LAP):
            pass

    def stop(self) -> tuple[list[int], int]:
        """Count no more.

        Returns:
            The most bytes of each lap, the last one among them; and 0, since nothing that is freed is kept.
        """
        now, laps = 0, [0]
        for thread in _disable_profiler_legacy():
            for event in thread:
                if event.kind() == "push" and event.name() == LAP:  # type: ignore[comparison-overlap]
                    laps.append(now)
                elif event.kind() == ALLOCATION:  # type: ignore[comparison-overlap]  # a name, to the stub a number
                    now += event.cpu_memory_usage()
                    laps[-1] = max(laps[-1], now)
        return laps, 0


class CpuTimer:
    """Times calls on this machine's cores."""

    device = torch.device("cpu")
    canary_extent = CANARY_EXTENT
    sweep = SWEEP

    def __init__(self, policy: CpuPolicy, neighbours: Neighbours | None = None) -> None:
        self.policy = policy
        self.neighbours = neighbours or Neighbours(policy.half_rows)

    def sampler(self, runs: Sequence[Run]) -> CpuSampler:
        return CpuSampler(runs, self.policy, self.neighbours.run)

    def brief(self) -> "CpuTimer":
        """Return the same with shorter samples."""
        return CpuTimer(replace(self.policy, sample_us=BRIEF_SHARE * self.policy.sample_us), self.neighbours)

    def lone(self, run: Run) -> CpuSampler:
        return CpuSampler([run], self.policy)

    def samples(self, samplers: Sequence[CpuSampler]) -> list[tuple[float, float]]:
        """Take a sample of the first: here nothing can be queued."""
        return [samplers[0].sample()]

    def allocated_bytes(self, run: Run) -> int:
        return allocated_bytes(run)

    def recover(self, error: BaseException) -> None:
        """Do nothing: an exception leaves the processor as it was."""

    def release(self) -> None:
        """Do nothing: memory that is freed goes back to the system."""

    def contended(self, compilers: int = 0) -> str | None:  # noqa: ARG002
        return None
