"""Finals: calls that are known already and are measured once more."""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from itertools import takewhile
from math import inf

from autotuner.checkpoint import OverError
from autotuner.ir.records import Call
from autotuner.tuner.doubts import outliers
from autotuner.tuner.ledger import Ledger
from autotuner.tuner.progress import MeasurerProtocol, Progress, Result
from autotuner.tuner.races import races

RIVAL_FACTOR = 1.05
"""A call that takes at most this much of a chosen one is raced against it: devices of one type differ by less."""

FINALISTS_MAX = 4
"""Calls of one final at most: the chosen one and those nearest to it."""


class Finals:
    """Second measurements of calls that were chosen, took far longer than their siblings, or were timed while the speed
    of the device changed.

    A call that fails the second time keeps its first measurement.
    """

    def __init__(self, ledger: Ledger, measurer: MeasurerProtocol) -> None:
        self._ledger, self._measurer, self._state = ledger, measurer, ledger.state
        self._repeats: Counter[str] = Counter()
        """By key, how often a call was measured again because the speed of the device changed."""

    def sample_outliers(self) -> None:
        """Race calls again that took far longer in this run than their siblings."""
        ledger = self._ledger
        wanted = outliers(ledger.space.calls, ledger.known) & ledger.unconfirmed
        ledger.unconfirmed -= wanted
        if wanted:
            self._sample(wanted)

    def sample_drifted(self) -> None:
        """Race calls again that were timed while the speed of the device changed, until it was steady, or some rounds.

        No race begins once the state says enough.
        """
        while wanted := self.drifted(self._ledger.known):
            if self._state.enough(again=True):
                return
            self._repeats.update(wanted)
            self._sample(wanted)

    def drifted(self, keys: Iterable[str]) -> set[str]:
        """Return which calls were timed in this run while the speed of the device changed, and may be timed again."""
        ledger, rounds = self._ledger, self._state.policy.drift_rounds
        return {
            key for key in keys
            if key in ledger.of_this_run and "drifted" in ledger.known[key].marks and self._repeats[key] < rounds
        }  # fmt: skip

    def unconfirmed(self, chosen: Iterable[str]) -> list[Call]:
        """Return which of the chosen calls were measured once in this run, or while the device's speed changed."""
        keys = [key for key in dict.fromkeys(chosen) if key in self._ledger.known]
        wanted = self._ledger.unconfirmed | self.drifted(keys)
        return [self._ledger.space.calls[key] for key in keys if key in wanted]

    def confirm(self, calls: Sequence[Call]) -> None:
        """Measure calls once more, and store the results of those that work.

        Where several devices measure, what competes is compared on one: a call races against those of its computation
        that took about as long, wherever that was measured.
        """
        keys = [call.key for call in calls]
        self._ledger.unconfirmed.difference_update(keys)
        self._repeats.update(self.drifted(keys))
        finals = [[call] for call in calls] if self._measurer.devices == 1 else self._with_rivals(calls)
        total = sum(map(len, finals))
        with closing(self._again(finals)) as results:
            for done, _ in enumerate(results, start=1):
                self._state.tell(Progress("confirm", done, total))

    def _sample(self, wanted: set[str]) -> None:
        """Race known calls again while the state does not say enough."""
        with suppress(OverError), self._state.within("measure"):
            for _ in self._again(
                takewhile(lambda _: not self._state.enough(again=True), races(self._ledger.space, wanted))
            ):
                pass

    def _again(self, races: Iterable[Sequence[Call]]) -> Generator[Result, None, None]:
        """Measure known calls once more, take the results of those that work, and yield all."""
        try:
            for call, measurement in self._measurer.measure(races):
                self._ledger.renew(call, measurement)
                self._ledger.is_news = True
                yield call, measurement
        finally:
            self._ledger.flush()

    def _with_rivals(self, calls: Sequence[Call]) -> list[list[Call]]:
        """Return a race for each call, with its rivals; a rival races once, and counts as confirmed."""
        ledger, chosen = self._ledger, {call.key for call in calls}
        finals = []
        for call in calls:
            us = ledger.known[call.key].median_us or 0.0
            open_keys = ledger.alike(call) & ledger.unconfirmed - chosen
            times = {key: ledger.known[key].median_us or inf for key in open_keys}
            near = [key for key, rival_us in times.items() if rival_us <= RIVAL_FACTOR * us]
            rivals = sorted(near, key=lambda key: (abs(times[key] - us), key))[: FINALISTS_MAX - 1]
            ledger.unconfirmed -= set(rivals)
            finals.append([call, *(ledger.space.calls[key] for key in rivals)])
        return finals
