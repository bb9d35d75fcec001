"""Race runner: looks up, compiles, races and stores the calls of a space."""

import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import inf

from autotuner.checkpoint import OverError, until
from autotuner.database import Database
from autotuner.ir.records import Call, Measurement
from autotuner.space import Space
from autotuner.tuner.batches import CALLS_MAX
from autotuner.tuner.compiling import Compilation
from autotuner.tuner.doubts import distrusted, outliers
from autotuner.tuner.progress import MeasurerProtocol, Progress, Result, SharingMeasurer
from autotuner.tuner.races import Competitors, races
from autotuner.tuner.state import TuningState

RIVAL_FACTOR = 1.05
"""A call that takes at most this much of a chosen one is raced against it: devices of one type differ by less."""

FINALISTS_MAX = 4
"""Calls of one final at most: the chosen one and those nearest to it."""


@dataclass(frozen=True)
class Known:
    """Measurements of a space at the end of a run.

    Args:
        measurements: by call key, failures included.
        fresh: keys of those measured in this run.
        counts: for people, by name.
    """

    measurements: Mapping[str, Measurement]
    fresh: frozenset[str]
    counts: Mapping[str, int]

    @property
    def complete(self) -> bool:
        """True if no call could make a difference that is unknown, or doubtful and not measured again."""
        return self.counts["unknown"] == self.counts["unneeded"] and not self.counts["stale"]


class RaceRunner:
    """Runs races of the calls of one space; results are shared with other processes through the database.

    What other runs have stored is looked up when a device is free for a race. Two runs at once may both measure a call
    that neither has stored yet: the database keeps the first result. A measurer of a fleet knows what other runs have
    in hand, and leaves it to them. Where several devices measure, a race is led by the fastest known call of the same
    computation: it is timed again, so that slow calls are dropped early on each device. Leaving it as a context manager
    stores all results.

    Args:
        retry: measure failed calls again.
        unconfirmed: keys of calls that were measured once, earlier in this run.
    """

    def __init__(
        self,
        space: Space,
        database: Database,
        measurer: MeasurerProtocol,
        state: TuningState,
        *,
        retry: bool = False,
        unconfirmed: Iterable[str] = (),
    ) -> None:
        self.space, self._database, self._measurer, self.state = space, database, measurer, state
        self._retry = retry
        self._environment = measurer.environment.key
        self.before: dict[str, Measurement] = {}
        self.known = self._stored(list(space.calls))
        self.missing = {key: call for key, call in space.calls.items() if key not in self.known}
        self.fresh: set[str] = set()
        self.under_way: set[str] = set()
        """Keys of calls that were sent and have no result yet."""
        self.unconfirmed = set(unconfirmed)
        self._of_this_run = set(unconfirmed)
        self._repeats: Counter[str] = Counter()
        """By key, how often a call was measured again because the speed of the device changed."""
        self._new: list[Result] = []
        self._newer: dict[str, Result] = {}
        """By key, results that replace what is stored."""
        self._stored_at = time.monotonic()
        self.asked: set[str] = set()
        self.compilation = Compilation(measurer, state, self._fail)
        self.total = self.done = 0
        self.measuring_s = 0.0
        self.is_news = True
        self._stale = 0
        self.opening_until_s: float | None = None
        """While a first plan is measured: until the job has spent so much, whatever its limits are."""
        state.reused = len(self.known) - state.measured  # what cell searches have measured is known as well

    def __enter__(self) -> "RaceRunner":
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.flush()
        finally:
            self.compilation.give_up()

    def distrust(self, chosen: Collection[str] | None) -> None:
        """Treat doubtful measurements as missing until they are measured again, or until `fall_back`.

        Args:
            chosen: keys that are doubtful in the latest answer as a whole; None where that is settled.
        """
        doubtful = distrusted(self.space.calls, self.known, chosen) - self.fresh - self.unconfirmed
        self.before = {key: measurement for key, measurement in self.known.items() if key in doubtful}
        self.known = {key: measurement for key, measurement in self.known.items() if key not in doubtful}
        self.missing |= {key: self.space.calls[key] for key in doubtful}
        self.state.reused -= len(doubtful)

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
        began_s = self.state.spent_s
        limit, opening_until_s = self.state.within("measure"), self.opening_until_s
        if opening_until_s is not None:
            limit = until(lambda: self.state.spent_s > opening_until_s)
        with suppress(OverError), limit:
            for _ in self.results(self._needed(races), shared=True):
                self.state.tell(Progress("measure", self.done, self.total))
        self.measuring_s += self.state.spent_s - began_s
        if self._is_time_to_store():
            self.flush()

    def results(
        self, races: Iterable[tuple[Sequence[Call], Sequence[Call]]], *, shared: bool = False
    ) -> Iterator[Result]:
        """Measure races, take the results and yield them.

        Args:
            races: of each, what leads it and is known already, and what is to be known. What leads is renewed where it
                works once more, and keeps its earlier timing otherwise.
            shared: leave to other runs what they have in hand, where the measurer knows: it becomes known, and is not
                yielded.
        """
        measurer, sent = self._measurer, self._sent(races)
        if shared and isinstance(measurer, SharingMeasurer):
            found = measurer.measure_shared(sent, self)
        else:
            found = measurer.measure(sent)
        for call, measurement in found:
            if call.key in self.under_way:
                self.under_way.discard(call.key)
                self.learn(call, measurement)
                self.done += 1
            elif measurement.status == "ok":
                self.renew(call, measurement)
            yield call, measurement

    def _sent(self, races: Iterable[tuple[Sequence[Call], Sequence[Call]]]) -> Iterator[Sequence[Call]]:
        """Yield races as devices take them, and note which calls are under way."""
        self.under_way.clear()
        for leading, calls in races:
            self.under_way.update(call.key for call in calls)
            yield [*leading, *calls]

    def _needed(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Sequence[Call], Sequence[Call]]]:
        """Yield what is left of races when it is their turn, and what leads them, until the state says enough.

        Empty races are passed on: nothing is compiled yet.
        """
        for race in races:
            if self.opening_until_s is None and self.state.enough(under_way=len(self.under_way)):
                return
            calls = self.look_up(race)
            self.asked.update(call.key for call in race)
            if calls or not race:
                yield self._leading(calls), calls

    def look_up(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls that are not known; results that other runs have stored by now become known."""
        found = self._stored([call.key for call in calls if call.key not in self.known])
        found = {key: measurement for key, measurement in found.items() if key not in self.under_way}
        self.known |= found
        self.is_news |= bool(found)
        self.state.reused += len(found)
        self.done += len(found)
        return [call for call in calls if call.key not in self.known]

    def look_up_again(self, calls: Sequence[Call]) -> None:
        """Look up calls that are under way; those that other runs have stored by now become known."""
        asked = [call.key for call in calls if call.key in self.under_way]
        self.under_way.difference_update(asked)
        self.look_up([self.missing[key] for key in asked if key in self.missing])
        self.under_way.update(key for key in asked if key not in self.known)

    def compile(self, calls: Iterable[Call], *, wait: bool = False) -> None:
        """Compile calls, ahead of timing or beside it. A failure is a measurement; what is left out is not timed.

        Args:
            wait: until they are compiled; otherwise `ripe` waits for what is compiled beside timing.
        """
        unknown = [call for call in calls if call.key not in self.known]
        if self.compilation.is_beside and not wait:
            self.compilation.beside(unknown)
        else:
            self._leave_out(self.compilation.ahead(unknown))

    def ripe(self, races: Iterable[Sequence[Call]]) -> Iterator[Sequence[Call]]:
        """Yield what is to be measured of races as they are compiled, and empty races while all are still to be."""
        for race in self.compilation.in_turn(races):
            if self.state.is_over("compile"):
                self._leave_out(self.compilation.give_up())
            left = [call for call in race if call.key in self.missing]
            if left or not race:
                yield left

    def _fail(self, call: Call, problem: Measurement) -> None:
        """Take in that a call cannot be compiled; beside timing, it was counted among those to be measured."""
        self.learn(call, problem)
        self.done += self.compilation.is_beside

    def _leave_out(self, keys: Iterable[str]) -> None:
        """Measure some calls no more: they stay unknown."""
        for key in keys:
            del self.missing[key]

    def solve(self) -> None:
        """Solve the relaxed problem again if there are new results."""
        if self.is_news:
            self.state.solve(self.known, now=True)
            self.is_news = False

    def fall_back(self) -> None:
        """Restore doubtful measurements that were not measured again, and count them if they could matter."""
        stale = {key: measurement for key, measurement in self.before.items() if key not in self.known}
        if stale:
            bounds = self.state.bounds
            self._stale = 0 if bounds is not None and bounds.proven_gap == 0 else len(stale)
            self.known |= stale
            self.is_news = True
            self.solve()

    def sample_outliers(self) -> None:
        """Race calls again that took far longer in this run than their siblings."""
        wanted = outliers(self.space.calls, self.known) & self.unconfirmed
        self.unconfirmed -= wanted
        if not wanted:
            return
        with suppress(OverError), self.state.within("measure"):
            for _ in self._again(takewhile(lambda _: not self.state.enough(), races(self.space, wanted))):
                self.is_news = True

    def drifted(self, keys: Iterable[str]) -> set[str]:
        """Return which calls were timed in this run while the speed of the device changed, and may be timed again."""
        rounds = self.state.policy.drift_rounds
        return {
            key for key in keys
            if key in self._of_this_run and "drifted" in self.known[key].marks and self._repeats[key] < rounds
        }  # fmt: skip

    def sample_drifted(self) -> None:
        """Race calls again that were timed while the speed of the device changed, until it was steady, or some rounds.

        No race begins once the state says enough.
        """
        while wanted := self.drifted(self.known):
            if self.state.enough():
                return
            self._repeats.update(wanted)
            with suppress(OverError), self.state.within("measure"):
                for _ in self._again(takewhile(lambda _: not self.state.enough(), races(self.space, wanted))):
                    self.is_news = True

    def confirm(self, calls: Sequence[Call]) -> None:
        """Measure calls once more, and store the results of those that work.

        Where several devices measure, what competes is compared on one: a call races against those of its computation
        that took about as long, wherever that was measured.
        """
        self._repeats.update(call.key for call in calls if call.key in self.drifted([call.key]))
        finals = [[call] for call in calls] if self._measurer.devices == 1 else self._finals(calls)
        total = sum(map(len, finals))
        with closing(self._again(finals)) as results:
            for done, _ in enumerate(results, start=1):
                self.state.tell(Progress("confirm", done, total))

    def _again(self, races: Iterable[Sequence[Call]]) -> Generator[Result, None, None]:
        """Measure known calls once more, take the results of those that work, and yield all."""
        try:
            for call, measurement in self._measurer.measure(races):
                if measurement.status == "ok":
                    self.renew(call, measurement)
                yield call, measurement
        finally:
            self.flush()

    def _finals(self, calls: Sequence[Call]) -> list[list[Call]]:
        """Return a race for each call, with its rivals; a rival races once, and counts as confirmed."""
        chosen = {call.key for call in calls}
        finals = []
        for call in calls:
            us = self.known[call.key].median_us or 0.0
            times = {key: self.known[key].median_us or inf for key in self._alike(call) & self.unconfirmed - chosen}
            near = [key for key, rival_us in times.items() if rival_us <= RIVAL_FACTOR * us]
            rivals = sorted(near, key=lambda key: (abs(times[key] - us), key))[: FINALISTS_MAX - 1]
            self.unconfirmed -= set(rivals)
            finals.append([call, *(self.space.calls[key] for key in rivals)])
        return finals

    def _leading(self, calls: Sequence[Call]) -> list[Call]:
        """Return the incumbent of a race that several devices share: the fastest known call of its computation."""
        if self._measurer.devices == 1 or len(calls) <= CALLS_MAX:
            return []
        times = {key: self.known[key].median_us or inf for key in self._alike(calls[0])}
        return [self.space.calls[key] for key in sorted(times, key=lambda key: (times[key], key))[:1]]

    def _alike(self, call: Call) -> set[str]:
        """Return the keys of known calls that work and compute the same thing as a call."""
        return {key for key in self._competitors.of(call) & self.known.keys() if self.known[key].status == "ok"}

    @cached_property
    def _competitors(self) -> Competitors:
        return Competitors(self.space)

    def renew(self, call: Call, measurement: Measurement) -> None:
        """Take a newer timing of a call; it is stored in place of the older one later."""
        self.known[call.key] = measurement
        self._newer[call.key] = (call, measurement)

    def learn(self, call: Call, measurement: Measurement) -> None:
        """Take a new result; it is stored with others later."""
        before = self.before.get(call.key)
        if before is not None and before.status == "ok" and measurement.status != "ok":
            measurement = before  # what worked is not lost to one failure
        self.known[call.key] = measurement
        self.fresh.add(call.key)
        self.unconfirmed.add(call.key)
        self._of_this_run.add(call.key)
        self.is_news = True
        if call.key in self.before:
            self._newer[call.key] = (call, measurement)
        else:
            self._new.append((call, measurement))
        self.state.measured += 1
        self.state.failed += measurement.status != "ok"
        if self._is_time_to_store():
            self.flush()

    def _is_time_to_store(self) -> bool:
        policy, waiting = self.state.policy, len(self._new) + len(self._newer)
        return waiting >= policy.store_after_results or time.monotonic() - self._stored_at > policy.store_after_s

    def flush(self) -> None:
        """Store the results that are not stored yet."""
        if self._new:
            self._database.store(self._environment, self._new)
        if self._newer:
            self._database.store(self._environment, list(self._newer.values()), replace=True)
        self._new, self._newer, self._stored_at = [], {}, time.monotonic()

    def _stored(self, keys: Sequence[str]) -> dict[str, Measurement]:
        found = self._database.find(self._environment, keys)
        known = {key: m for key, m in found.items() if m.status == "ok" or not self._retry}
        return {key: m for key, m in known.items() if m != self.before.get(key)}

    def result(self) -> Known:
        calls, known, bounds = self.space.calls, self.known, self.state.bounds
        unknown = len(calls) - len(known)
        is_settled = self.state.is_solved and (bounds is None or bounds.proven_gap == 0)
        counts = {
            "choices": len(self.space.choices) + len(self.space.conversions),
            "calls": len(calls),
            "measured": len(self.fresh),
            "reused": len(known) - len(self.fresh),
            "unknown": unknown,
            "unneeded": unknown if is_settled else 0,
            "stale": self._stale,
            "failed": sum(1 for measurement in known.values() if measurement.status != "ok"),
        }
        statuses = Counter(measurement.status for measurement in known.values())
        counts |= {f"status_{status}": count for status, count in sorted(statuses.items())}
        return Known(known, frozenset(self.fresh), counts)
