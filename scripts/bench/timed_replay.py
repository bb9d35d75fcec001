"""A recorded device that takes its time: answers from a recording, by a clock that runs ahead as measuring would.

What takes how long is a model, from figures of an H200 (docs/results/bench_tuning_cuda.md): a race sets up operands and
references in 0.03 s and 3 ns an element; then each call takes what its library's calls took there. Kernels compile in
14 processes beside timing. What the tuner itself computes counts as it does here, by the processor's time.
"""

import heapq
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from statistics import mean
from unittest.mock import patch

from autotuner.checkpoint import checkpoint
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.records import Attributes, Call, Environment, Measurement
from autotuner.kernels import KERNELS
from autotuner.measure.process import POLL_S
from autotuner.measure.roofline import Roofline
from autotuner.solve.problem.formulate import formulate
from autotuner.space import Cell, build_space, space_file, without_params
from autotuner.tuner import Replay
from autotuner.tuner.learned import learned_costs, traits_of
from autotuner.tuner.progress import Result
from autotuner.tuner.solving import solved

SETUP_S, ELEMENT_S = 0.03, 3e-9
CALL_S = {
    "cublas": 0.0093, "cublaslt": 0.0125, "cuda": 0.013, "cudnn": 0.0625, "cupy": 0.0075, "inductor": 0.37,
    "torch": 0.03, "triton": 0.0116,
}  # fmt: skip
"""Seconds of a call by its library, which begins the kernel's name."""
RANDOM_S = 0.6
"""Of a call that draws, whose frequencies are verified."""
COMPILE_S = {"cupy": 0.4, "triton": 3.0, "inductor": 6.0}
PROCESSES, EARLY = 14, 4
"""That compile, and those of them that are started at once."""
PROCESS_S, CHILD_S = 6.0, 8.0
"""Until a process compiles, and until the first race begins."""
CEILINGS_S, NOISE_S, WAIT_S = 1.0, 0.2, 0.1

Recorded = Mapping[str, Result]


class Clock:
    """The processor's time of this process, and what was waited for beside it."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._waited_s

    def wait(self, seconds: float) -> None:
        self._waited_s += max(0.0, seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have every module of the package read this clock in place of `time.monotonic`."""
        with ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("autotuner.") and getattr(module, "monotonic", None) is time.monotonic:
                    stack.enter_context(patch.object(module, "monotonic", self))
            yield


class RecordedLayer:
    """A layer with what is recorded of it, and estimates of what is not.

    Launch parameters that no search tried take the mean of the nearest ones that are recorded of their cell. Other
    calls take what half of the recorded calls like them take, by the roofline.

    Attributes:
        estimated: keys of calls that were asked for and are estimated.
    """

    def __init__(self, model: Model, environment: Environment, found: Recorded, ceilings: Roofline) -> None:
        self.model, self.environment, self.ceilings = model, environment, ceilings
        space = build_space(
            training_graph(model.graph()), space_file(environment.device_type), vendor=environment.vendor
        )
        self._cells = {cell.key: cell for cell in space.cells}
        self._tried: dict[str, list[tuple[Attributes, float]]] = defaultdict(list)
        tried = []
        for call, measurement in found.values():
            key = without_params(call).key
            if key in self._cells and measurement.median_us is not None:
                self._tried[key].append((call.candidate.params, measurement.median_us))
                tried.append(call)
        self._space = space.with_calls(tried)
        self.recorded = {key: found[key][1] for key in self._space.calls if key in found}
        traits = traits_of(self._space.calls)
        known = {key: m.median_us for key, m in self.recorded.items() if m.median_us is not None}
        lowered = ceilings.lowered((traits[key].work, us) for key, us in known.items())
        optimistic = {key: lowered.optimistic_us(own.work) for key, own in traits.items()}
        self._learned_us = learned_costs(traits, optimistic, known).median_us
        self.estimated: set[str] = set()

    @property
    def best_us(self) -> float:
        """The fastest plan of what is recorded, and of estimates of the other calls."""
        known = {key: self.measurement(call) for key, call in self._space.calls.items()}
        return solved(formulate(self._space, saving=False), known, "exact")[1].total_us

    def is_of_a_cell(self, call: Call) -> bool:
        return without_params(call).key in self._cells

    def measurement(self, call: Call) -> Measurement:
        if call.key in self.recorded:
            return self.recorded[call.key]
        self.estimated.add(call.key)
        key = without_params(call).key
        us = self._near_us(self._cells[key], call.candidate.params) if key in self._tried else None
        if us is None:
            us = self._learned_us.get(call.key)
        return (
            Measurement("error", message="nothing is recorded of it") if us is None else Measurement("ok", us, us, us)
        )

    def _near_us(self, cell: Cell, params: Attributes) -> float:
        """Return the mean of the tried launch parameters with the fewest steps from some, each in its list."""
        lists = dict(cell.lists)

        def steps(other: Attributes) -> int:
            pairs = zip(params, other, strict=True)
            return sum(abs(lists[name].index(one) - lists[name].index(its)) for (name, one), (_, its) in pairs)

        apart = [(steps(other), us) for other, us in self._tried[cell.key]]
        return mean(us for far, us in apart if far == min(apart)[0])


class TimedReplay(Replay):
    """A measurer of a recorded layer, by a clock."""

    def __init__(self, layer: RecordedLayer, clock: Clock) -> None:
        super().__init__(layer.environment, layer.recorded, layer.ceilings)
        self._layer, self._clock = layer, clock
        self._queue: deque[Call] = deque()
        self._asked_at = self._clock()
        self._free_at = [self._asked_at + PROCESS_S] * EARLY
        self._begins_at = self._asked_at + CHILD_S
        self._busy: list[tuple[float, str, Call]] = []
        self.asked: dict[str, Call] = {}

    @property
    def compiles_beside(self) -> bool:
        return True

    def compile_beside(self, calls: Sequence[Call]) -> None:
        self._begin()
        under_way = {key for _, key, _ in self._busy}
        self._queue, self._asked_at = deque(call for call in calls if call.key not in under_way), self._clock()
        more = min(len(self._queue), PROCESSES) - len(self._free_at)
        self._free_at += [self._asked_at + PROCESS_S] * max(0, more)
        self._begin()

    def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
        self._begin()
        found = []
        while self._busy and self._busy[0][0] <= self._clock():
            found.append((heapq.heappop(self._busy)[2], None))
        return found

    def _begin(self) -> None:
        """Give calls to the processes that are free by now, from when they were."""
        while self._queue and min(self._free_at) <= self._clock():
            call = self._queue.popleft()
            begins_at = max(heapq.heappop(self._free_at), self._asked_at)
            ends_at = begins_at + COMPILE_S[_library(call)]
            heapq.heappush(self._free_at, ends_at)
            heapq.heappush(self._busy, (ends_at, call.key, call))

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        compiled = [call for call in calls if KERNELS[call.candidate.kernel].compiles]
        self.compile_beside(compiled)
        left = len(compiled)
        while left:
            checkpoint()
            found = self.take_compiled()
            left -= len(found)
            yield from found
            self._clock.wait(0.0 if found else WAIT_S)

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        for race in races:
            checkpoint()
            if not race:
                self._clock.wait(WAIT_S)
                continue
            self._spend(self._begins_at - self._clock())
            elements = sum(prod(tensor.extents) for tensor in race[0].subgraph.tensors)
            self._spend(SETUP_S + ELEMENT_S * elements)
            for call in {call.key: call for call in race}.values():
                is_random = any(
                    word in call.candidate.kernel for word in ("dropout", "bernoulli", "random", "threefry")
                )
                self._clock.wait(RANDOM_S if is_random else CALL_S[_library(call)])
                checkpoint()
                self.asked[call.key] = call
                yield call, self._layer.measurement(call)

    def _spend(self, seconds: float) -> None:
        """Wait, and ask now and then whether that is to go on, as whoever waits for the measuring process does."""
        ends_at = self._clock() + seconds
        while (left_s := ends_at - self._clock()) > 0:
            self._clock.wait(min(left_s, POLL_S))
            checkpoint()

    def noise_floor(self) -> float:
        self._clock.wait(NOISE_S)
        return 0.003

    def ceilings(self, dtypes: Collection[str]) -> Roofline:
        self._spend(max(0.0, self._begins_at - self._clock()) + CEILINGS_S)
        return super().ceilings(dtypes)

    def counts(self) -> Mapping[str, int]:
        """Return how many calls were asked for: of sampled cells, others, and of both those that are estimated."""
        of_cells = Counter(map(self._layer.is_of_a_cell, self.asked.values()))
        return {
            "cells": of_cells[True], "others": of_cells[False],
            "estimated": len(self.asked.keys() & self._layer.estimated),
        }  # fmt: skip


def _library(call: Call) -> str:
    return call.candidate.kernel.split("_")[0]
