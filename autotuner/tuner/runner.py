"""Race runner: looks up, compiles, races and stores the calls of a space."""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from autotuner.checkpoint import OverError
from autotuner.database import Database
from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.solve.baselines import is_declared
from autotuner.space import Space
from autotuner.tuner.doubts import distrusted, outliers
from autotuner.tuner.progress import MeasurerProtocol, Progress, Result
from autotuner.tuner.state import TuningState


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

    What other runs have stored is looked up before each race. Two runs at once may both measure a call that neither has
    stored yet: the database keeps the first result. Leaving it as a context manager stores all results.

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
        self.unconfirmed = set(unconfirmed)
        self._new: list[Result] = []
        self._stored_at = time.monotonic()
        self.asked: set[str] = set()
        self._prepared: set[str] = set()
        self.total = self.done = self._compiled = self._compiling = 0
        self.measuring_s = 0.0
        self.is_news = True
        self._stale = 0
        self.is_opening = False
        state.reused = len(self.known) - state.measured  # what cell searches have measured is known as well

    def __enter__(self) -> "RaceRunner":
        return self

    def __exit__(self, *_error: object) -> None:
        self.flush()

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
        self.compile(call for race in races for call in race)
        for race in races:
            if self.state.enough():
                return
            self.race([call for call in race if call.key in self.missing and call.key not in self.known])
            self.asked.update(call.key for call in race)

    def race(self, race: Sequence[Call]) -> None:
        """Measure the calls of a race that are not known by now.

        Where the time is over, the race is given up; its results so far are kept.
        """
        calls = self.look_up(race)
        began = time.monotonic()
        limit = nullcontext() if self.is_opening else self.state.within("measure")
        with suppress(OverError), limit:
            for call, measurement in self._measurer.measure([calls]) if calls else ():
                self.learn(call, measurement)
                self.done += 1
                self.state.tell(Progress("measure", self.done, self.total))
        self.measuring_s += time.monotonic() - began
        if self._is_time_to_store():
            self.flush()

    def look_up(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls that are not known; results that other runs have stored by now become known."""
        found = self._stored([call.key for call in calls if call.key not in self.known])
        self.known |= found
        self.is_news |= bool(found)
        self.state.reused += len(found)
        self.done += len(found)
        return [call for call in calls if call.key not in self.known]

    def compile(self, calls: Iterable[Call]) -> None:
        """Compile calls ahead of timing. A failure is a measurement; a call that was left out is not timed."""
        fresh = (call for call in calls if call.key not in self._prepared and call.key not in self.known)
        compiled = {call.key: call for call in fresh if KERNELS[call.candidate.kernel].compiles}
        self._prepared |= compiled.keys()
        left = set(compiled)
        self._compiling += len(compiled)
        if compiled and not self.state.enough("compile"):
            with suppress(OverError), self.state.within("compile"):
                for call, problem in self._measurer.prepare(list(compiled.values())):
                    left.discard(call.key)
                    if problem is not None:
                        self.learn(call, problem)
                    self._compiled += 1
                    self.state.tell(Progress("compile", self._compiled, self._compiling))
                    if self.state.enough("compile"):
                        break
        for key in left:
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
        self.flush()
        for race in races(self.space, wanted):
            if self.state.enough():
                return
            again = [(call, measured) for call, measured in self._measurer.measure([race]) if measured.status == "ok"]
            self.renew(again)
            self.is_news = True

    def confirm(self, calls: Sequence[Call]) -> None:
        """Measure calls once more, and store the results of those that work."""
        again: list[Result] = []
        self.flush()
        try:
            for done, (call, measurement) in enumerate(self._measurer.measure([[call] for call in calls]), start=1):
                if measurement.status == "ok":
                    again.append((call, measurement))
                self.state.tell(Progress("confirm", done, len(calls)))
        finally:
            self.renew(again)

    def renew(self, again: Sequence[Result]) -> None:
        """Store newer timings of calls in place of the older ones."""
        self._database.store(self._environment, again, replace=True)
        self.known |= {call.key: measurement for call, measurement in again}

    def learn(self, call: Call, measurement: Measurement) -> None:
        """Take a new result; it is stored with others later."""
        before = self.before.get(call.key)
        if before is not None and before.status == "ok" and measurement.status != "ok":
            measurement = before  # what worked is not lost to one failure
        self.known[call.key] = measurement
        self.fresh.add(call.key)
        self.unconfirmed.add(call.key)
        self.is_news = True
        self._new.append((call, measurement))
        self.state.measured += 1
        self.state.failed += measurement.status != "ok"
        if self._is_time_to_store():
            self.flush()

    def _is_time_to_store(self) -> bool:
        policy = self.state.policy
        return len(self._new) >= policy.store_after_results or time.monotonic() - self._stored_at > policy.store_after_s

    def flush(self) -> None:
        """Store the results that are not stored yet."""
        if self._new:
            newer = [(call, measurement) for call, measurement in self._new if call.key in self.before]
            self._database.store(self._environment, [each for each in self._new if each[0].key not in self.before])
            self._database.store(self._environment, newer, replace=True)
        self._new, self._stored_at = [], time.monotonic()

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


def openers(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield one call for each operator alone, in declared layouts: together they are a first plan."""
    opened: set[tuple[str, ...]] = set()
    yielded: set[str] = set()
    for choice in space.choices:
        operators = choice.cover.operators
        if len(operators) == 1 and operators not in opened and is_declared(space.graph, choice):
            opened.add(operators)
            if choice.call.key in keys - yielded:
                yielded.add(choice.call.key)
                yield [choice.call]


def races(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield calls that compute the same thing, declared layouts first, so that the incumbent is good early."""
    found: dict[object, dict[str, Call]] = defaultdict(dict)
    for choice in space.choices:
        if choice.call.key in keys:
            kinds = (choice.call.subgraph.kinds, choice.cover.operators)
            found[kinds].setdefault(choice.call.key, choice.call)
    for conversion in space.conversions:
        if conversion.call.key in keys:
            found["conversion", space.graph.shape(conversion.tensor)].setdefault(conversion.call.key, conversion.call)
    seen: set[str] = set()
    for race in found.values():
        fresh = [call for key, call in race.items() if key not in seen]
        seen |= race.keys()
        if fresh:
            yield fresh
