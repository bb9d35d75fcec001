"""Races calls in the measuring process: operands, verification, samples, and what came of each as a measurement."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import monotonic

import torch

from autotuner.ir.device import vendor_of
from autotuner.ir.records import Call, Mark, Measurement
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.measure.failure import RefusalError, WrongError, failure
from autotuner.measure.microbenchmarks import measure_roofline
from autotuner.measure.operands import Buffers, Values, boundary_bytes
from autotuner.measure.race import Race, Runner, interval
from autotuner.measure.roofline import Roofline
from autotuner.measure.timer import Canary, Run, Sampler, Timer
from autotuner.measure.verification import References, fault

CANARY_S = 2.0
DRIFT_SHARE = 0.10
NOISE_RACES = 5

Emit = Callable[[int, Measurement], None]
Begin = Callable[[int, bool], None]


@dataclass
class Contestant:
    """A call in a race. `sampler` is None before its first look and after its operand sets had to make room.

    `workspace_bytes` is what a verified call allocates at most while it runs. `contended` and `drifted` count looks and
    samples that were taken while others used the device, and while it changed.
    """

    call: Call
    kernel: Kernel
    verified: bool = False
    workspace_bytes: int = 0
    sampler: Sampler | None = None
    contended: int = 0
    drifted: int = 0

    def measurement(self, runner: Runner) -> Measurement:
        """Return what came of it. A mark is for half of its looks and samples, or more."""
        kept_us = tuple(runner.kept_us)
        half = len(runner.looks_us + runner.samples_us) / 2
        found: tuple[tuple[Mark, bool], ...] = (
            ("eliminated", runner.out), ("contended", self.contended >= half), ("drifted", self.drifted >= half),
        )  # fmt: skip
        marks = tuple(mark for mark, holds in found if holds)
        return Measurement("ok", runner.time_us, *interval(kept_us), kept_us, self.workspace_bytes, marks=marks)


class Bench:
    """Races calls, and keeps values, operand sets and references of the current subgraphs between races.

    Args:
        held_bytes: what operand sets may take before they make room for each other.
        canary_s: after so many seconds of a race, the canary is timed.
    """

    def __init__(self, timer: Timer, held_bytes: int, canary_s: float = CANARY_S) -> None:
        self._timer, self._policy, self._held_bytes, self._canary_s = timer, timer.policy, held_bytes, canary_s
        self._values: dict[tuple[str, str], Values] = {}
        self._buffers, self._references = Buffers(timer.device), References()
        self._canary = Canary(timer)
        self._canary_at = monotonic()

    def race(self, calls: Sequence[Call], begin: Begin, emit: Emit, *, contended: bool = False) -> None:
        """Race calls and emit a measurement for each: a failure at once, timings when no drift was seen behind them.

        Args:
            begin: told which call is worked on, and whether the work is the bench's own (a float64 reference).
            emit: told the place of a call and what came of it.
            contended: whether others are known to use the device.
        """
        signatures = {call.subgraph.signature for call in calls}
        if {signature for signature, _ in self._values} - signatures:
            self._forget()
        contestants: list[Contestant | None] = [None] * len(calls)
        race = Race(
            len(calls),
            samples_min=self._policy.samples_min,
            samples_max=self._policy.samples_max,
            limit_us=self._policy.race_s * 1e6,
        )
        window, taken_again = race.copy(), False
        while True:
            index = race.next()
            if index is None or monotonic() - self._canary_at > self._canary_s:
                begin(-1, True)
                self._canary_at = monotonic()
                if self._canary.drifted(DRIFT_SHARE):
                    if not taken_again:
                        race, taken_again = race.back_to(window), True
                        continue
                    for survivor, taken in zip(contestants, race.taken_since(window), strict=True):
                        if survivor is not None:
                            survivor.drifted += taken
                window = race.copy()
                if index is None:
                    break
            begin(index, False)
            try:
                contestant = contestants[index] or self._admitted(calls[index], index, begin)
                contestants[index] = contestant
                if contestant.sampler is None:
                    self._seat(contestant, contestants)
                assert contestant.sampler is not None
                if race.is_look(index):
                    race.add(index, contestant.sampler.look())
                    contestant.contended += contended or contestant.sampler.is_contended
                else:
                    self._sample(race, contestants, contended)
                for place, runner in enumerate(race.runners):
                    dropped = contestants[place]
                    if runner.out and dropped is not None:
                        dropped.sampler = None
            except Exception as error:
                self.recover(error)
                race.fail(index)
                contestants[index] = None
                emit(index, failure(error))
        for index, runner in enumerate(race.runners):
            survivor = contestants[index]
            if survivor is not None:
                emit(index, survivor.measurement(runner))

    def noise_floor(self) -> float:
        """Race two identical calls a few times and return the median of their relative differences."""
        differences = []
        for _ in range(NOISE_RACES):
            pair = [self._timer.lone(self._canary.run) for _ in range(2)]
            race = Race(2, samples_min=self._policy.samples_min, samples_max=self._policy.samples_max, limit_us=1e6)
            while turns := race.turns():
                for index, sample in zip(turns, self._timer.samples([pair[turn] for turn in turns]), strict=False):
                    race.add(index, *sample)
            one, other = (median(runner.kept_us) for runner in race.runners)
            differences.append(abs(one - other) / min(one, other))
        return median(differences)

    def ceilings(self, dtypes: Iterable[str]) -> Roofline:
        """Measure what this device can do at best, products of matrices of some element types included."""
        self._forget()
        return measure_roofline(self._timer, self._held_bytes, dtypes)

    def contended(self, compilers: int = 0) -> str | None:
        """Say in a sentence who else uses the device, or None where nobody is known to.

        Args:
            compilers: processes that compile for the same tuning, and rest.
        """
        return self._timer.contended(compilers)

    def recover(self, error: BaseException) -> None:
        """Make the device usable after a call has failed.

        Raises:
            ContextLostError: it cannot be.
        """
        self._timer.recover(error)

    def build(self, call: Call) -> None:
        """Build a call's kernel once, so that what it compiles is in the compiler's cache.

        Raises:
            RefusalError: the kernel refuses the call.
        """
        self._forget()
        kernel = self._kernel(call)
        values = self._values_of(call, kernel)
        for inputs, outputs in self._buffers.sets(call, values, 1):
            kernel.builder()(call, inputs, outputs)
        self._forget()
        self._timer.release()

    def _sample(self, race: Race, contestants: Sequence[Contestant | None], contended: bool) -> None:
        """Take samples of the next contestants of this round, as many as the device takes together."""
        seated: dict[int, tuple[Contestant, Sampler]] = {}
        for turn in race.turns():
            contestant = contestants[turn]
            if contestant is None or contestant.sampler is None:  # it is seated when it is its turn alone
                break
            seated[turn] = (contestant, contestant.sampler)
        samples = self._timer.samples([sampler for _, sampler in seated.values()])
        for (turn, (contestant, sampler)), sample in zip(seated.items(), samples, strict=False):
            race.add(turn, *sample)
            contestant.contended += contended or sampler.is_contended

    def _admitted(self, call: Call, index: int, begin: Begin) -> Contestant:
        """Return a call that may race, or raise what keeps it out."""
        kernel = self._kernel(call)
        begin(index, True)
        if self._references.held_bytes > self._held_bytes:
            self._references.clear()
            self._values.clear()
        values = self._values_of(call, kernel)
        self._references.prepare(call, kernel, values)
        begin(index, False)
        return Contestant(call, kernel)

    def _kernel(self, call: Call) -> Kernel:
        kernel = KERNELS[call.candidate.kernel]
        vendor = vendor_of(self._timer.device.type, torch.version.hip)
        reason = kernel.refuses_vendor(vendor) or kernel.refuses(call.subgraph, call.candidate)
        if reason:
            raise RefusalError(reason)
        return kernel

    def _values_of(self, call: Call, kernel: Kernel) -> Values:
        key = (call.subgraph.signature, kernel.consistent)
        if key not in self._values:
            self._values[key] = Values(call.subgraph, kernel.consistent, self._timer.device)
        return self._values[key]

    def _seat(self, contestant: Contestant, contestants: Sequence[Contestant | None]) -> None:
        """Build a contestant on its operand sets, after verifying it if that was not done; make room if need be."""
        call, kernel = contestant.call, contestant.kernel
        values = self._values_of(call, kernel)
        set_bytes = boundary_bytes(call)
        sets = min(self._policy.sets, ceil((self._policy.rotate_bytes + 1) / max(1, set_bytes)))
        if self._buffers.held_bytes + sets * set_bytes > self._held_bytes:
            for other in contestants:
                if other is not None:
                    other.sampler = None
            self._buffers.clear()
        runs: list[Run] = []
        for inputs, outputs in self._buffers.sets(call, values, sets):
            run = kernel.builder()(call, inputs, outputs)
            if not contestant.verified:
                reason = fault(call, kernel, run, values, self._references, inputs, outputs)
                if reason:
                    self._buffers.clear()
                    raise WrongError(reason)
                contestant.workspace_bytes = self._timer.allocated_bytes(run)
                contestant.verified = True
            runs.append(run)
        contestant.sampler = self._timer.sampler(runs)

    def _forget(self) -> None:
        self._values.clear()
        self._references.clear()
        self._buffers.clear()
