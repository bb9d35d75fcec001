"""Which calls of a space are measured, in which races, and when results are stored."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from autotuner.database import Database, this_process
from autotuner.kernels import KERNELS
from autotuner.records import Call, Measurement
from autotuner.space import Space
from autotuner.tuner.answer import is_declared, solved
from autotuner.tuner.asked import Asked, Progress, Result
from autotuner.tuner.standing import Standing

STORE_AFTER_RESULTS = 32
STORE_AFTER_S = 1.0
WAIT_FOR_OTHERS_S = 0.2
CONFIRM_ROUNDS = 4


@dataclass(frozen=True)
class Known:
    """What is known of a space after measuring.

    Args:
        measurements: by call key, failures included.
        fresh: keys of what was measured now.
        counts: for people, by name.
    """

    measurements: Mapping[str, Measurement]
    fresh: frozenset[str]
    counts: Mapping[str, int]

    @property
    def complete(self) -> bool:
        return self.counts["unknown"] == 0


def measure_missing(
    space: Space, database: Database, measurer: Asked, standing: Standing, *, retry: bool = False
) -> Known:
    """Measure the calls of a space that the database lacks, storing as results come.

    What another walk measures at the moment is waited for, and not measured a second time.
    """
    walk = _Measuring(space, database, measurer, standing, retry)
    try:
        walk.compile()
        walk.run()
    finally:
        walk.flush()
        database.release_calls(walk.owner)
    return walk.result()


class _Measuring:
    """One walk through the races of a space."""

    def __init__(self, space: Space, database: Database, measurer: Asked, standing: Standing, retry: bool) -> None:
        self.owner = f"{this_process()}#{uuid4().hex[:8]}"
        self._space, self._database, self._measurer, self._standing = space, database, measurer, standing
        self._retry = retry
        self._environment = measurer.environment.key
        self._known = self._stored(list(space.calls))
        self._missing = {key: call for key, call in space.calls.items() if key not in self._known}
        self._fresh: set[str] = set()
        self._new: list[Result] = []
        self._stored_at = time.monotonic()
        standing.reused = len(self._known)

    def compile(self) -> None:
        """Compile ahead of timing; what does not compile is measured with that, what was left out is not timed."""
        compiled = {key: call for key, call in self._missing.items() if KERNELS[call.candidate.kernel].compiles}
        left = set(compiled)
        prepared = self._measurer.prepare(list(compiled.values()))
        for done, (call, problem) in enumerate(prepared, start=1):
            left.discard(call.key)
            if problem is not None:
                self._learn(call, problem)
            self._standing.tell(Progress("compile", done, len(compiled)))
            if self._standing.enough("compile"):
                break
        for key in left:
            del self._missing[key]

    def run(self) -> None:
        """Measure race after race until all is known, or it is enough."""
        keys = {key for key in self._missing if key not in self._known}
        openers = list(_openers(self._space, keys))
        races = list(_races(self._space, keys - {race[0].key for race in openers}))
        self._total, self._done = len(keys), 0
        self._standing.tell(Progress("measure", 0, self._total))
        waiting: list[list[Call]] = []
        for number, race in enumerate(openers + races):
            if number == len(openers):
                self._standing.look(self._known, now=bool(openers))
            if self._standing.enough():
                return
            waiting += self._race(race)
        while waiting and not self._standing.enough():
            time.sleep(WAIT_FOR_OTHERS_S)
            waiting = [left for race in waiting for left in self._race(race)]
            self._standing.tell(Progress("measure", self._done, self._total))

    def _race(self, race: Sequence[Call]) -> list[list[Call]]:
        """Measure what nobody else measures, and return what somebody else does."""
        mine = self._database.claim_calls(self._environment, self.owner, [call.key for call in race])
        found = self._stored(list(mine))
        self._known |= found
        self._standing.reused += len(found)
        self._done += len(found)
        calls = [call for call in race if call.key in mine and call.key not in found]
        results = self._measurer.measure([calls]) if calls else iter(())
        for call, measurement in results:
            self._learn(call, measurement)
            self._done += 1
            self._standing.tell(Progress("measure", self._done, self._total))
        if self._is_time_to_store():
            self.flush()
            self._database.release_calls(self.owner)
        self._standing.look(self._known)
        others = [call for call in race if call.key not in mine]
        return [others] if others else []

    def _learn(self, call: Call, measurement: Measurement) -> None:
        self._known[call.key] = measurement
        self._fresh.add(call.key)
        self._new.append((call, measurement))
        self._standing.measured += 1
        self._standing.failed += measurement.status != "ok"
        if self._is_time_to_store():
            self.flush()

    def _is_time_to_store(self) -> bool:
        return len(self._new) >= STORE_AFTER_RESULTS or time.monotonic() - self._stored_at > STORE_AFTER_S

    def flush(self) -> None:
        if self._new:
            self._database.store(self._environment, self._new)
        self._new, self._stored_at = [], time.monotonic()

    def _stored(self, keys: Sequence[str]) -> dict[str, Measurement]:
        found = self._database.find(self._environment, keys)
        return {key: m for key, m in found.items() if m.status == "ok" or not self._retry}

    def result(self) -> Known:
        calls, known = self._space.calls, self._known
        counts = {
            "choices": len(self._space.choices) + len(self._space.conversions),
            "calls": len(calls),
            "measured": len(self._fresh),
            "reused": len(known) - len(self._fresh),
            "unknown": len(calls) - len(known),
            "failed": sum(1 for measurement in known.values() if measurement.status != "ok"),
        }
        statuses = Counter(measurement.status for measurement in known.values())
        counts |= {f"status_{status}": count for status, count in sorted(statuses.items())}
        return Known(known, frozenset(self._fresh), counts)


def confirm_chosen(
    space: Space, known: Known, database: Database, measurer: Asked, standing: Standing
) -> dict[str, Measurement]:
    """Measure what would be chosen once more, and solve again, until nothing new is chosen.

    The least of many noisy timings is too low on average; a second timing of the same call is not. Only calls that were
    measured in this walk are confirmed. A call that fails the second time keeps its first measurement.
    """
    found = dict(known.measurements)
    left = set(known.fresh)
    for _ in range(CONFIRM_ROUNDS):
        problem, solution = solved(space, found, "exact")
        chosen = [choice.call for choice in problem.chosen(solution)]
        chosen += [conversion.call for conversion in problem.converted(solution)]
        calls = {call.key: call for call in chosen if call.key in left}
        if not calls:
            break
        left -= calls.keys()
        again = []
        for done, (call, measurement) in enumerate(measurer.measure([[call] for call in calls.values()]), start=1):
            if measurement.status == "ok":
                again.append((call, measurement))
            standing.tell(Progress("confirm", done, len(calls)))
        database.store(measurer.environment.key, again, replace=True)
        found |= {call.key: measurement for call, measurement in again}
    return found


def _openers(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield one call for each operator alone, in declared layouts: with them there is a plan, soon after the start."""
    opened: set[tuple[str, ...]] = set()
    yielded: set[str] = set()
    for choice in space.choices:
        operators = choice.cover.operators
        if len(operators) == 1 and operators not in opened and is_declared(space.graph, choice):
            opened.add(operators)
            if choice.call.key in keys - yielded:
                yielded.add(choice.call.key)
                yield [choice.call]


def _races(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield calls that compute the same thing, declared layouts first, so that the incumbent is good early."""
    races: dict[object, dict[str, Call]] = defaultdict(dict)
    for choice in space.choices:
        if choice.call.key in keys:
            kinds = (choice.call.subgraph.kinds, choice.cover.operators)
            races[kinds].setdefault(choice.call.key, choice.call)
    for conversion in space.conversions:
        if conversion.call.key in keys:
            races["conversion", space.graph.shape(conversion.tensor)].setdefault(conversion.call.key, conversion.call)
    seen: set[str] = set()
    for race in races.values():
        fresh = [call for key, call in race.items() if key not in seen]
        seen |= race.keys()
        if fresh:
            yield fresh
