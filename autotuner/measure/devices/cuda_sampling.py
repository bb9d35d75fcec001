"""One sample on a CUDA device: a replay of a graph of calls, between two events that are part of it."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from statistics import fmean
from time import sleep
from typing import Any

import torch

from autotuner.errors import first_line
from autotuner.ir.device import CUDA
from autotuner.measure.devices.nvml import Nvml, SmClock, cuda_uuid, foreign
from autotuner.measure.failure import ContextLostError, RefusalError
from autotuner.measure.policy import CudaPolicy
from autotuner.measure.timer import Run, Sweep

CANARY_EXTENT = 1024
LOOK_REPLAYS = 3
LEAST_US = 0.1
SHORT_FACTOR = 1.25
"""A graph that turns out to need so many times its calls is captured anew."""
DELAY_CYCLES = 100_000
FIRST_DELAY_CYCLES = 400_000
"""Kernels that only wait, some 50 and 200 us: meanwhile the host queues what comes behind them."""
CALLS_MAX = 512
"""In one graph: capturing a call takes the host 5 us, and nothing needs more calls to last 200 us."""
EVENT_CALLS_MAX = 16
ROUND_US = 500_000.0
ATTEMPTS = 6
PAUSE_S = 0.05
WARM_US = 50_000.0
SWEEP = Sweep(
    bytes_max=1 << 30,
    extents=(16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    full_waves=True,
)
"""Memory that moves 4 TB in a second still shows at 128 MiB how long starting a kernel takes. Matrix units are at their
best where extents are multiples of theirs, and not before 4096."""

Pool = Any  # what torch knows a pool of graphs' memory by; the type's name is its own


def graph_calls(call_us: float, sets: int, policy: CudaPolicy) -> int:
    """Return of how many calls a graph is made: all operand sets equally often, as long as a sample should be.

    Where one call on each set is longer than `single_us`, some sets are left out.
    """
    call_us = max(call_us, LEAST_US)
    if sets * call_us > policy.single_us:
        return max(1, min(sets, int(policy.single_us / call_us)))
    turns = max(1, ceil(policy.sample_us / (sets * call_us)))
    return sets * min(turns, max(1, CALLS_MAX // sets))


class GraphSampler:
    """One candidate as deployed: calls on operand sets in turn, in one CUDA graph.

    The events are nodes of the graph, so that starting it is in no sample: in a step it is started once for all
    operators. What the events themselves add is 2 to 3 us on an H200, of 200 or more.
    """

    is_contended = False

    def __init__(self, runs: Sequence[Run], policy: CudaPolicy, pool: Pool) -> None:
        self._pair = _Pair(inside=True)
        self._capture(runs, graph_calls(_first_us(runs), len(runs), policy), pool)
        needed = graph_calls(_waited(self), len(runs), policy)  # the first replay uploads the graph: no sample
        if needed > SHORT_FACTOR * self._calls:  # first calls may have taken long because they were the first
            self._capture(runs, needed, pool)
            _waited(self)

    def _capture(self, runs: Sequence[Run], calls: int, pool: Pool) -> None:
        self._calls = calls
        schedule = [runs[turn % len(runs)] for turn in range(calls)]
        self._graph = _captured([self._pair.begin, *schedule, self._pair.end], pool)

    def look(self) -> float:
        """Return the least of three replays, in microseconds of a call."""
        return min(_waited(self) for _ in range(LOOK_REPLAYS))

    def queue(self) -> None:
        """Queue one sample."""
        self._graph.replay()

    def call_us(self) -> float:
        """Return microseconds of one call in the sample that was queued and is over."""
        self.sample_us = self._pair.us()
        return self.sample_us / self._calls


class EventSampler:
    """One candidate, launched call by call, each after a flush of the second-level cache."""

    is_contended = False

    def __init__(self, runs: Sequence[Run], policy: CudaPolicy, flushed: torch.Tensor) -> None:
        call_us = max(_first_us(runs), LEAST_US)
        self._runs, self._flushed, self._turn = runs, flushed, 0
        self._pairs = [_Pair() for _ in range(max(1, min(EVENT_CALLS_MAX, ceil(policy.sample_us / call_us))))]
        self.sample_us = len(self._pairs) * call_us

    def look(self) -> float:
        """Return a sample that is not kept, in microseconds of a call."""
        return _waited(self)

    def queue(self) -> None:
        """Queue one sample, behind a delay in which the host gets ahead of the device."""
        _delay(DELAY_CYCLES)
        for pair in self._pairs:
            self._flushed.zero_()
            run = self._runs[self._turn % len(self._runs)]
            self._turn += 1
            pair.begin()
            run()
            pair.end()

    def call_us(self) -> float:
        """Return microseconds of one call in the sample that was queued and is over."""
        return fmean(pair.us() for pair in self._pairs)


class _Pair:
    """Two events around what is timed; `inside` a graph, they are nodes of it."""

    def __init__(self, inside: bool = False) -> None:
        self._begun, self._ended = (
            torch.cuda.Event(enable_timing=True, external=inside)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def begin(self) -> None:
        self._begun.record()

    def end(self) -> None:
        self._ended.record()

    def us(self) -> float:
        return float(1e3 * self._begun.elapsed_time(self._ended))


def allocated_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that torch allocates on the current CUDA device while a function runs, beyond before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


class CudaTimer:
    """Times calls on one CUDA device. Makes a stream of its own the current one: the default one cannot be captured,
    and with one stream nothing has to wait for another."""

    canary_extent = CANARY_EXTENT
    sweep = SWEEP

    def __init__(self, policy: CudaPolicy, device_index: int = 0, *, parent_computes: bool = False) -> None:
        torch.cuda.set_device(device_index)
        self._computing = 2 if parent_computes else 1
        self.policy, self.device = policy, torch.device(CUDA, device_index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self._uuid, self._nvml, self._clock = cuda_uuid(device_index), Nvml(), SmClock()
        self._pool = torch.cuda.graph_pool_handle()
        properties = torch.cuda.get_device_properties(device_index)
        flushed_bytes = 0 if policy.graphs else properties.L2_cache_size
        self._flushed = torch.empty(flushed_bytes, dtype=torch.int8, device=self.device)
        _warm_up(self.device)

    def sampler(self, runs: Sequence[Run]) -> GraphSampler | EventSampler:
        """Make a candidate ready.

        Raises:
            RefusalError: it cannot be captured in a graph, and the policy asks for one.
        """
        if self.policy.graphs:
            return GraphSampler(runs, self.policy, self._pool)
        return EventSampler(runs, self.policy, self._flushed)

    def brief(self) -> "CudaTimer":
        """Return itself: starting a graph is part of a sample, so that none is shorter."""
        return self

    def lone(self, run: Run) -> GraphSampler | EventSampler:
        return self.sampler([run])

    def samples(self, samplers: Sequence[GraphSampler | EventSampler]) -> list[tuple[float, float]]:
        """Queue a sample of each, as many as take half a second, and wait once.

        What ran while the clock was low is taken again after a pause, a few times; the last counts.
        """
        chosen = list(samplers[:1])
        queued_us = samplers[0].sample_us
        for sampler in samplers[1:]:
            queued_us += sampler.sample_us
            if queued_us > ROUND_US:
                break
            chosen.append(sampler)
        found: list[tuple[float, float]] = []
        for attempt in range(ATTEMPTS):
            sleep(PAUSE_S * attempt)
            for sampler in chosen:
                sampler.queue()
            clock_mhz = self._nvml.sm_clock_mhz(self._uuid)
            self._stream.synchronize()
            found = [(sampler.call_us(), sampler.sample_us) for sampler in chosen]
            if not self._clock.is_low(clock_mhz):
                break
        return found

    def allocated_bytes(self, run: Run) -> int:
        """Run a kernel and return the most bytes that it holds of torch's allocator meanwhile, beyond what was held."""
        return allocated_bytes(run)

    def recover(self, error: BaseException) -> None:
        """Wait for the device; where memory ran out, give back what the allocator caches.

        Raises:
            ContextLostError: the device answers with an error: after one of those that end a context, it always does.
        """
        try:
            torch.cuda.synchronize(self.device)
        except Exception as lost:
            raise ContextLostError(first_line(lost)) from error
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()

    def release(self) -> None:
        torch.cuda.empty_cache()

    def contended(self, compilers: int = 0) -> str | None:
        own, computing = {os.getpid(), os.getppid()}, self._computing + compilers
        others = foreign(self._nvml.processes(self._uuid), own, computing)
        if not others:
            return None
        who = "another process computes" if others == 1 else f"{others} other processes compute"
        return f"{who} on CUDA device {self._uuid}: timings may suffer"


def _delay(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _waited(sampler: "GraphSampler | EventSampler") -> float:
    sampler.queue()
    torch.cuda.current_stream().synchronize()
    return sampler.call_us()


def _warm_up(device: torch.device) -> None:
    """Multiply until the clock has risen."""
    x = torch.ones(CANARY_EXTENT, CANARY_EXTENT, device=device)
    took_us = 0.0
    while took_us < WARM_US:
        pair = _Pair()
        pair.begin()
        for _ in range(100):
            x @ x
        pair.end()
        torch.cuda.current_stream().synchronize()
        took_us += pair.us()


def _first_us(runs: Sequence[Run]) -> float:
    """Call each operand set's kernel once, outside of any graph, and return the mean in microseconds."""
    pair = _Pair()
    _delay(FIRST_DELAY_CYCLES)
    pair.begin()
    for run in runs:
        run()
    pair.end()
    torch.cuda.current_stream().synchronize()
    return pair.us() / len(runs)


def _captured(schedule: Sequence[Run], pool: Pool) -> torch.cuda.CUDAGraph:
    """Capture calls in one graph. Unlike `torch.cuda.graph`, without collecting garbage and emptying caches.

    Raises:
        RefusalError: one of them does what cannot be captured: waits for the device, say.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for run in schedule:
            run()
        graph.capture_end()
    except Exception as error:
        with suppress(Exception):
            graph.capture_end()
        raise RefusalError(f"it cannot be captured in a CUDA graph: {first_line(error)}") from error
    return graph
