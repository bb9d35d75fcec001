"""Budget of a whole training step: each region's way of running, found in the first steps by what these need.

The first step compiles, and makes the optimizer's state; each region runs the leanest way it has. The second one does
so again, and at each beginning and end of a region's forward and backward it is noted how much was allocated at most
since the last one. What a step needs beside its regions is measured like this, moment by moment, and nothing of it is
guessed. Then the fastest ways are taken that leave room for it at each moment, and a third step is measured in which
they run. Where that needs more than it should, faster ways are given up, and the next step is measured; where it needs
less, faster ones are tried (`budget_room`).
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch

from autotuner.errors import BudgetError
from autotuner.plan.phrases import binary
from autotuner.runtime.arena_memory import Memories, apart
from autotuner.runtime.budget_room import BudgetRoom
from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.devices.protocol import MemoryMeter
from autotuner.runtime.fallbacks import warn
from autotuner.runtime.kept_steps import KeptStepLog, make_room
from autotuner.runtime.model_memory import StaticBytes
from autotuner.runtime.scratch import Scratch, sharing
from autotuner.runtime.step_laps import OUTSIDE, HasWays, RunsSo, StepLog
from autotuner.runtime.step_needs import FrontPoint, StepNeeds, told_too_small

POINTS = 16
"""Budgets that a front looks at."""


class _Stage(Enum):
    FIRST = "compiles"
    LEAN = "is measured, all regions as lean as they can"
    CHOSEN = "is measured, all regions as chosen"
    SETTLED = "is as it stays"


class _Current(threading.local):
    budget: "StepBudget | None" = None


_CURRENT = _Current()


def current_budget() -> "StepBudget | None":
    """Return the budget of the training step that this thread runs, None for none."""
    return _CURRENT.budget


class StepBudget:
    """Ways of the regions in training steps of one shape, under a budget.

    Attributes:
        budget_bytes: that a step may need, everything in it.
        is_settled: whether the ways stay as they are.
        needs: what a step needs, once that is known.
        repeats: how often the last step drew the same numbers twice.
    """

    def __init__(
        self, budget_bytes: int, runtime: DeviceRuntime, static: Callable[[], StaticBytes], *, keeps: bool = False
    ) -> None:
        """Decide nothing yet.

        Args:
            budget_bytes: for the peak of the device's memory.
            runtime: of the device.
            static: says what is there between steps.
            keeps: whether regions keep their memory, and the kernels that are built on it, from step to step.
        """
        self.budget_bytes = budget_bytes
        self._runtime, self._static, self._keeps = runtime, static, keeps
        self._kept: Scratch | None = None
        self._scratch, self._memories = Scratch(), Memories()
        self._stage = _Stage.FIRST
        self._room = BudgetRoom(budget_bytes)
        self._ways: dict[HasWays, RunsSo] = {}
        self._fitting: dict[HasWays, RunsSo] | None = None
        self._log: StepLog | None = None
        self._meter: MemoryMeter | None = None
        self._lean: StepLog | None = None
        self._begun: WeakKeyDictionary[Any, HasWays] = WeakKeyDictionary()
        self._scratch_bytes = self._base_bytes = self._lean_bytes = self._keeping_bytes = 0
        self._is_built = self._is_checked = False
        self.repeats = 0
        self.needs: StepNeeds | None = None

    @property
    def is_settled(self) -> bool:
        return self._stage is _Stage.SETTLED

    @property
    def device(self) -> torch.device:
        return self._runtime.device

    @property
    def standing_bytes(self) -> int:
        """Bytes that regions keep, between two steps."""
        log = self._lean
        if self._kept is None or self._log is not None or not isinstance(log, KeptStepLog):
            return 0
        return log.standing_bytes({region: self.way_of(region) for region in log.order})

    def give_up(self) -> None:
        """Let what regions keep go, between two steps; the next one takes memory anew."""
        self._give_up(self._lean.order if self._lean is not None else ())

    def _give_up(self, regions: Iterable[HasWays]) -> None:
        self._scratch, self._kept, self._is_built = Scratch(), None, False
        for region in regions:
            region.let_go()

    def way_of(self, region: HasWays) -> RunsSo:
        """Return the way that a region runs in the step that is under way."""
        return self._ways.get(region, region.leanest)

    @contextmanager
    def step(self, *, captured: bool = False) -> Iterator[None]:
        """Run a step's forward, backward and update inside; behind it, the ways of the next one are known.

        Args:
            captured: whether it is captured, and decides nothing.

        Raises:
            BudgetError: no way of each region leaves enough room.
        """
        self.begin(captured=captured)
        try:
            with self.under_way():
                yield
        except BaseException:
            self.abandon()
            raise
        if captured:
            self.abandon()
        else:
            self.end()

    def begin(self, *, captured: bool = False, standing_bytes: int = 0) -> None:
        """Begin a step, which runs inside of `under_way`, in as many parts as it has.

        Args:
            standing_bytes: of what is there beside parameters and the optimizer's state.
        """
        measured = self._stage in (_Stage.LEAN, _Stage.CHOSEN) and not captured
        if self._keeps:
            make_room(self, 0 if self.needs is None else self.budget_bytes - self.needs.predicted_bytes)
        self._base_bytes = self._static().kept + standing_bytes if measured else 0
        self._meter = None
        for region in self._lean.order if self._lean is not None else ():
            region.replay(self._keeps and self._is_built)  # a step before has built them
        with suppress(RuntimeError):  # torch's profiler counts on a CPU now: a later step is measured
            self._meter = self._runtime.meter() if measured else None
        self._log, self.repeats = KeptStepLog() if self._keeps else StepLog(), 0
        if not self._keeps or self._stage is _Stage.FIRST:
            self._scratch = Scratch(is_of_one_step=not captured)
        elif self._kept is None:
            self._scratch = self._kept = Scratch()
        if self._scratch_bytes:
            try:
                self._scratch.memory(self._scratch_bytes, self._runtime.device)
            except torch.OutOfMemoryError:
                self.abandon()
                raise

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Run a part of a step that has begun."""
        before, _CURRENT.budget = _CURRENT.budget, self
        try:
            with sharing(self._scratch), apart(self._memories):
                yield
        finally:
            _CURRENT.budget = before

    def end(self) -> None:
        """End a step that has begun; from now on the ways of the next one are known.

        Raises:
            BudgetError: no way of each region leaves enough room.
        """
        is_missed = self._meter is None and self._stage in (_Stage.LEAN, _Stage.CHOSEN)
        log, reserved_bytes = self._ended()
        self._is_built |= self._stage is _Stage.SETTLED
        if is_missed:  # what it has built would not be counted in the next one
            self._give_up(log.order)
        else:
            self._go_on(log, reserved_bytes)

    def abandon(self) -> None:
        """End a step from which nothing follows: it has failed, or was captured."""
        was_built = self._is_built
        self._ended()
        self._is_built = was_built

    def _ended(self) -> tuple[StepLog, int]:
        """Return what a step did, and how much the allocator has held."""
        log, self._log = self._log, None
        assert log is not None
        for region in log.order:
            region.replay(False)  # outside of steps, nothing is captured that no budget counts
        reserved_bytes = 0
        if self._meter is not None:
            log.note(None, OUTSIDE, self._begun)
            peaks, reserved_bytes = self._meter.stop()
            log.count(peaks, 0 if self._meter.counts_all else self._base_bytes)
            if not self._is_built:
                log.count_what_is_kept()
            # Where all is counted that is allocated, a step that finds its memory in place is measured, too.
            self._is_checked = self._is_built or not (self._keeps and self._meter.counts_all)
            self._is_built, self._meter = True, None
        self._begun.clear()
        if self._kept is None:
            self._scratch = Scratch()  # that of the step goes with it
        return log, reserved_bytes

    @contextmanager
    def inside(self, region: HasWays, phase: str) -> Iterator[None]:
        """Run a region's forward or backward inside."""
        log = self._log
        if log is None:
            yield
            return
        log.order.setdefault(region, len(log.order))
        if self._meter is not None:
            log.note(None, OUTSIDE, self._begun)
            self._meter.lap()
        yield
        if self._meter is not None:
            log.note(region, phase, self._begun)
            self._meter.lap()

    def began(self, held: Any, region: HasWays) -> None:
        """Note that a forward has run, and holds something for its backward."""
        self._begun[held] = region
        if self._log is not None:
            self._log.most[region] = max(self._log.most[region], sum(each is region for each in self._begun.values()))
            self.repeats += region.draws and self.way_of(region).repeats

    def ended(self, held: Any) -> None:
        """Note that its backward has run."""
        self._begun.pop(held, None)

    def chooses_again(self, reserved_bytes: int) -> bool:
        """Take what a captured step has reserved, and say whether the next ones run in other ways."""
        assert self.needs is not None
        self.needs = replace(self.needs, reserved_bytes=reserved_bytes)
        return self._is_tightened(reserved_bytes) or self._is_loosened(reserved_bytes)

    def ran_out(self) -> bool:
        """Take that a step found no memory; choose again, and say whether there was a leaner choice."""
        most_bytes = self._room.lacked_bytes()
        return bool(self._ways) and self._is_tightened(most_bytes)

    def front(self, points: int = POINTS) -> tuple[FrontPoint, ...]:
        """Return what a step would take under other budgets, from the least on; each is faster than the one before.

        Args:
            points: budgets that are looked at beside the least, evenly up to what the fastest ways need.
        """
        log = self._lean
        if log is None or not log.order:
            return ()
        least, most = log.peak_bytes, log.predicted_bytes({region: region.fastest for region in log.order})
        found = [{region: region.leanest for region in log.order}]
        for number in range(points + 1):
            limit = least + (most - least) * number / points
            ways = log.fastest(limit)
            if ways is not None:
                found.append(ways)
        front: list[FrontPoint] = []
        looked = [(log.predicted_bytes(ways), sum(way.time_us for way in ways.values()), ways) for ways in found]
        for predicted_bytes, time_us, ways in sorted(looked, key=lambda each: each[:2]):
            if not front or time_us < front[-1].time_us:
                repeating = sum(way.repeats for way in ways.values())
                front.append(FrontPoint(self._room.least_budget(predicted_bytes), time_us, repeating))
        return tuple(front)

    def _go_on(self, log: StepLog, reserved_bytes: int) -> None:
        self._scratch_bytes = max([self._scratch_bytes, *(region.scratch_bytes for region in log.order)])
        if self._stage is _Stage.FIRST:
            self._stage = _Stage.LEAN
        elif self._stage is _Stage.LEAN:
            self._lean = log
            self._room.begin(log.peak_bytes, reserved_bytes)
            self._lean_bytes = self._least_bytes()
            self._choose()
        elif self._stage is _Stage.CHOSEN:
            assert self.needs is not None
            self.needs = replace(self.needs, measured_bytes=log.peak_bytes, reserved_bytes=reserved_bytes)
            most_bytes = max(log.peak_bytes, reserved_bytes)
            if self._is_tightened(most_bytes) or not self._is_checked:
                return
            if not (self._keeps and self._is_loosened(most_bytes)):  # a captured step will need more
                self._stage = _Stage.SETTLED

    def _is_tightened(self, most_bytes: int) -> bool:
        """Choose again, with as much less room as a step was above the budget; say whether it was above and that helps.

        A choice that did fit comes back. After some tries, all run as lean as they can; where that is above, a warning.
        """
        assert self.needs is not None
        if most_bytes <= self.budget_bytes:
            return False
        if not self._ways:
            warn(
                f"a training step needs {binary(most_bytes, up=True)}, and memory_budget is "
                f"{binary(self.budget_bytes)}: each region runs as lean as it can; give it more, or a smaller batch"
            )
            return False
        if self._fitting is not None:
            self._room.end_growth()
            chosen, self._fitting = self._fitting, None
            self._run_so(chosen)
            return True
        self._room.shrink(most_bytes)
        if self._room.has_tries and self._is_possible():
            self._choose()
        else:
            self._run_so({})
        return True

    def _is_loosened(self, most_bytes: int) -> bool:
        """Choose again where a step leaves room for faster ways; say whether there are any."""
        assert self.needs is not None
        if self._lean is None or not self._room.grow(most_bytes):
            return False
        ways = self._lean.fastest(self._room.predicted_bytes)
        if ways is None or sum(way.time_us for way in ways.values()) >= self.needs.time_us:
            return False
        self._fitting, self._room.tries = self._ways, self._room.tries + 1
        self._run_so(ways)
        return True

    def _least_bytes(self) -> int:
        """Return the least budget, with all regions as lean as they can."""
        assert self._lean is not None
        return self._room.least_budget(self._lean.peak_bytes)

    def _is_possible(self) -> bool:
        assert self._lean is not None
        return self._room.may_hold(self._lean.peak_bytes)

    def _choose(self) -> None:
        """Take the fastest ways that leave enough room.

        Raises:
            BudgetError: none do.
        """
        assert self._lean is not None
        log = self._lean
        if not log.order:
            warn(
                f"memory_budget decides nothing: no region of this model runs tuned, and a step needs "
                f"{binary(log.peak_bytes)}; autotuner.summary(model) says why"
            )
        if not self._is_possible() and self._keeps:
            self._keep_nothing()
            return
        if not self._is_possible():
            raise BudgetError(
                told_too_small(self.budget_bytes, self._least_bytes(), log, self._static()), self._least_bytes()
            )
        self._room.tries += 1
        # It is None where nothing fits by the room of moments that were counted to the safe side.
        self._run_so(log.fastest(self._room.predicted_bytes) or {})

    def _keep_nothing(self) -> None:
        """Have regions take their memory anew in each step, and build their kernels on it; measure that from anew."""
        self._keeping_bytes = self._least_bytes()
        self._keeps, self._stage, self._fitting = False, _Stage.LEAN, None
        self.give_up()

    def _run_so(self, chosen: dict[HasWays, RunsSo]) -> None:
        """Run the next step so, other regions as lean as they can, and measure it."""
        assert self._lean is not None
        self._ways, self._stage = chosen, _Stage.CHOSEN
        if self._keeps:
            self.give_up()
        ways = {region: self.way_of(region) for region in self._lean.order}
        inexact = tuple(Counter(numerics for way in ways.values() for numerics in way.inexact).items())
        self.needs = StepNeeds(
            self.budget_bytes, self._lean_bytes, self._lean.predicted_bytes(ways), 0, 0, len(ways),
            sum(way.repeats for way in ways.values()), sum(region.fastest.time_us for region in ways),
            sum(way.time_us for way in ways.values()), inexact, self._keeping_bytes,
        )  # fmt: skip
