"""Race runner: compiles the calls of a space, races them, and enters the results in the run's ledger."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf

from autotuner.checkpoint import OverError, until
from autotuner.ir.records import Call, Measurement
from autotuner.tuner.batches import CALLS_MAX
from autotuner.tuner.compiling import Compilation
from autotuner.tuner.ledger import Ledger
from autotuner.tuner.progress import MeasurerProtocol, Progress, Result, SharingMeasurer

Race = tuple[Sequence[Call], Sequence[Call]]
"""A race in two parts: the incumbent, which is known already, and calls that are to be known."""

NOT_YET: Race = ((), ())
"""A race of nothing: all others are still to be compiled."""


class RaceRunner:
    """Runs races of calls that are not known yet.

    What other runs have stored is looked up when a device is free for a race. A measurer of a fleet knows what other
    runs have in hand, and leaves it to them. Where several devices measure, a race is led by the fastest known call of
    the same computation: it is timed again, so that slow calls are dropped early on each device. Leaving the runner as
    a context manager stores all results.

    Args:
        until_s: races begin and go on until the job has spent so much, whatever its limits are; None for its limits.
        compilation: that has begun before; None for a new one.

    Attributes:
        total: calls that are to be known when `ledger.done` has come so far, for the progress.
        asked: keys of all calls of the races that had their turn.
        measuring_s: seconds spent racing.
    """

    def __init__(
        self, ledger: Ledger, measurer: MeasurerProtocol, *, until_s: float | None = None,
        compilation: Compilation | None = None,
    ) -> None:  # fmt: skip
        self.ledger, self._state, self._measurer, self._until_s = ledger, ledger.state, measurer, until_s
        self.compilation = compilation or Compilation(measurer, self._state)
        self.compilation.hand_over(self._fail)
        self.asked: set[str] = set()
        self.total = 0
        self.measuring_s = 0.0

    def __enter__(self) -> "RaceRunner":
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.ledger.flush()
        finally:
            self.compilation.give_up()

    def expect(self, count: int) -> None:
        """Say how many calls are to be measured from now on, and report it as progress."""
        self.total = self.ledger.done + count
        self._state.tell(Progress("measure", self.ledger.done, self.total))

    def compile(self, calls: Iterable[Call], *, wait: bool = False) -> None:
        """Compile calls, ahead of timing or beside it. A failure is a measurement; what is left out is not timed.

        Args:
            wait: until they are compiled; otherwise `ripe` waits for what is compiled beside timing.
        """
        unknown = [call for call in calls if call.key not in self.ledger.known]
        compiled = self.compilation.beside if self.compilation.is_beside and not wait else self.compilation.ahead
        self._leave_out(compiled(unknown))

    def ripe(self, races: Iterable[Sequence[Call]]) -> Iterator[Sequence[Call]]:
        """Yield what is to be measured of races as they are compiled, and empty races while all are still to be."""
        for race in self.compilation.in_turn(races):
            if self._state.is_over("compile_beside"):
                self._leave_out(self.compilation.give_up())
            left = [call for call in race if call.key in self.ledger.missing]
            if left or not race:
                yield left

    def measure(self, races: Sequence[Sequence[Call]]) -> None:
        """Compile and measure races."""
        if not races:
            return
        self.compile(call for race in races for call in race)
        self.race(self.ripe(races))

    def race(self, races: Iterable[Sequence[Call]]) -> None:
        """Measure the calls of races that are not known when a device is free for them.

        No race begins once the state says enough. Where the time is over, those under way are given up; their results
        so far are kept.
        """
        state, until_s = self._state, self._until_s
        began_s = state.spent_s
        limit = state.within("measure") if until_s is None else until(lambda: state.spent_s > until_s)
        with suppress(OverError), limit:
            for _ in self.results(self.needed(races), shared=True):
                state.tell(Progress("measure", self.ledger.done, self.total))
        self.measuring_s += state.spent_s - began_s
        self.ledger.flush(only_if_due=True)

    def results(self, races: Iterable[Race], *, shared: bool = False) -> Iterator[Result]:
        """Measure races, take the results and yield them.

        Args:
            races: of each, what leads it and is known already, and what is to be known. What leads is renewed where it
                works once more, and keeps its earlier timing otherwise.
            shared: leave to other runs what they have in hand, where the measurer knows: it becomes known, and is not
                yielded.
        """
        measurer, sent = self._measurer, self._sent(races)
        if shared and isinstance(measurer, SharingMeasurer):
            found = measurer.measure_shared(sent, self.ledger)
        else:
            found = measurer.measure(sent)
        for call, measurement in found:
            self.ledger.take(call, measurement)
            yield call, measurement

    def _sent(self, races: Iterable[Race]) -> Iterator[Sequence[Call]]:
        """Yield races as devices take them, and note which calls are under way."""
        under_way = self.ledger.under_way
        under_way.clear()
        for leading, calls in races:
            under_way.update(call.key for call in calls)
            yield [*leading, *calls]

    def needed(self, races: Iterable[Sequence[Call]]) -> Iterator[Race]:
        """Yield what is left of races when it is their turn, and what leads them, until the state says enough.

        Empty races are passed on: nothing is compiled yet.
        """
        for race in races:
            if self._until_s is None and self._state.enough(under_way=len(self.ledger.under_way)):
                return
            calls = self.ledger.look_up(race)
            self.asked.update(call.key for call in race)
            if calls or not race:
                yield self._leading(calls), calls

    def _leading(self, calls: Sequence[Call]) -> list[Call]:
        """Return the incumbent of a race that several devices share: the fastest known call of its computation."""
        if self._measurer.devices == 1 or len(calls) <= CALLS_MAX:
            return []
        ledger = self.ledger
        times = {key: ledger.known[key].median_us or inf for key in ledger.alike(calls[0])}
        return [ledger.space.calls[key] for key in sorted(times, key=lambda key: (times[key], key))[:1]]

    def _fail(self, call: Call, problem: Measurement) -> None:
        """Take in that a call cannot be compiled; beside timing, it was counted among those to be measured."""
        self.ledger.learn(call, problem)
        self.ledger.done += self.compilation.is_beside

    def _leave_out(self, keys: Iterable[str]) -> None:
        """Measure some calls no more: they stay unknown."""
        for key in keys:
            self.ledger.missing.pop(key, None)
