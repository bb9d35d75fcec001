"""Which calls of a space are measured, in which races, and when results are stored."""

import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from uuid import uuid4

from autotuner.checkpoint import OverError
from autotuner.database import Database, this_process
from autotuner.errors import InfeasibleError, MeasureError, stacklevel
from autotuner.ir.records import Call, Measurement, digest
from autotuner.kernels import KERNELS
from autotuner.measure.roofline import Roofline, work_of
from autotuner.settings import Limits
from autotuner.solve.default import is_declared
from autotuner.space import Space
from autotuner.tuner.answer import must_be_computable, solved
from autotuner.tuner.asked import Asked, Progress, Result
from autotuner.tuner.doubts import distrusted, outliers
from autotuner.tuner.races import openers, races
from autotuner.tuner.standing import Standing

STORE_AFTER_RESULTS = 32
STORE_AFTER_S = 1.0
WAIT_FOR_OTHERS_S = 0.2
CONFIRM_ROUNDS = 4

FEW = 400
"""Below so many missing calls, ceilings take about as long to measure as they spare: all are measured."""
SPARED_SHARE = 0.35
"""Of all calls, about as many can be left unmeasured where the best plan is to be proven (a small layer on a CPU)."""
LOOKS = 30
"""How often it takes to look for what matters until then."""
TOGETHER = 3.0
"""A call alone takes so many times as long to set up and time as one that races others for the same work."""
OPENING_S = 600.0
"""Until there is a plan, measuring goes on for as long as this, whatever the limits of a job say."""
CONVERTED_PRICE, COMPILED_PRICE = 1e3, 1e6
"""To open with what needs no conversion, and no compiler; see `_opening`."""
DECIDED = "looks for what matters in"
"""With a digest of a space's calls, the fact whether it does, 1 or 0."""


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
        """Whether nothing that is unknown, or doubtful and was not measured again, could make a difference."""
        return self.counts["unknown"] == self.counts["unneeded"] and not self.counts["stale"]


def measure_missing(
    space: Space,
    database: Database,
    measurer: Asked,
    standing: Standing,
    *,
    retry: bool = False,
    remeasure: bool = False,
    exhaustive: bool = False,
    unconfirmed: Iterable[str] = (),
    doubted: Collection[str] | None = None,
    budget_bytes: int | None = None,
) -> Known:
    """Measure the calls of a space that could make a difference and that the database lacks, storing as results come.

    What would be chosen is measured once more in the end: the least of many noisy timings is too low on average, a
    second timing of the same call is not. What another walk measures at the moment is waited for, and not measured a
    second time. What makes the latest answer doubtful, or took far longer than its siblings, is measured again; what
    then cannot be measured keeps what was known.

    Args:
        retry: measure once more what has failed.
        remeasure: measure once more whatever is known.
        exhaustive: measure everything.
        unconfirmed: keys of calls that were measured before in this walk, once.
        doubted: keys of what is doubtful of the latest answer as a whole; None where that is not doubtful.
        budget_bytes: of what would be chosen.

    Raises:
        InfeasibleError: there is no plan of what is measured; the message says whether the limits are why.
    """
    walk = _Measuring(space, database, measurer, standing, retry, unconfirmed, budget_bytes)
    walk.distrust(space.calls if remeasure else doubted)
    try:
        walk.run(exhaustive)
    except InfeasibleError as error:
        if walk.result().complete:
            raise
        raise InfeasibleError(
            f"the limits of the job were reached before there was a plan: {error}; what was measured is kept, so ask "
            "again with higher limits"
        ) from None
    finally:
        walk.flush()
        database.release_calls(walk.owner)
    return walk.result()


def open_plan(space: Space, database: Database, measurer: Asked, standing: Standing) -> frozenset[str]:
    """Measure what one plan is made of, whatever the limits say, and return the keys of what was measured.

    The plan is that of the framework: each operator alone, tensors as declared, kernels that need no compiler; another
    one where a part of that does not work. Afterwards a job that has reached its limits has an answer.
    """
    walk = _Measuring(space, database, measurer, standing, False, (), None)
    walk.distrust(None)
    try:
        walk.open()
    finally:
        walk.flush()
        database.release_calls(walk.owner)
    return walk.result().fresh


class _Measuring:
    """One walk through the races of a space."""

    def __init__(
        self,
        space: Space,
        database: Database,
        measurer: Asked,
        standing: Standing,
        retry: bool,
        unconfirmed: Iterable[str],
        budget_bytes: int | None,
    ) -> None:
        self.owner = f"{this_process()}#{uuid4().hex[:8]}"
        self._space, self._database, self._measurer, self._standing = space, database, measurer, standing
        self._retry = retry
        self._environment = measurer.environment.key
        self._before: dict[str, Measurement] = {}
        self._known = self._stored(list(space.calls))
        self._missing = {key: call for key, call in space.calls.items() if key not in self._known}
        self._fresh: set[str] = set()
        self._unconfirmed = set(unconfirmed)
        self._budget_bytes = budget_bytes
        self._new: list[Result] = []
        self._stored_at = time.monotonic()
        self._asked: set[str] = set()
        self._prepared: set[str] = set()
        self._total = self._done = self._compiled = self._compiling = 0
        self._measuring_s = 0.0
        self._is_news = True
        self._stale = 0
        self._is_opening = False
        standing.reused = len(self._known) - standing.measured  # what the cells' search has measured is known as well

    def distrust(self, chosen: Collection[str] | None) -> None:
        """Take what is doubtful of what is known for missing, until it is measured again or nothing more will be."""
        doubtful = distrusted(self._space.calls, self._known, chosen) - self._fresh - self._unconfirmed
        self._before = {key: measurement for key, measurement in self._known.items() if key in doubtful}
        self._known = {key: measurement for key, measurement in self._known.items() if key not in doubtful}
        self._missing |= {key: self._space.calls[key] for key in doubtful}
        self._standing.reused -= len(doubtful)

    def open(self) -> None:
        """Measure one plan, and another where a part of it fails, until one works, there is none, or time is up.

        The limits of the job do not end this.
        """
        self._is_opening = True
        standing, until_s = self._standing, self._standing.spent_s + OPENING_S
        asked: set[str] = set()
        while standing.spent_s < until_s:
            known = {**self._before, **self._known}
            left = [key for key in self._opening(known) if key not in known and key not in asked]
            asked.update(left)
            self._total = self._done + len(left)
            standing.tell(Progress("measure", self._done, self._total))
            waiting = [[self._space.calls[key]] for key in left]
            while waiting and standing.spent_s < until_s:
                waiting = [others for race in waiting for others in self._race(race)]
                if waiting:
                    time.sleep(WAIT_FOR_OTHERS_S)
            if not left:
                return

    def _opening(self, known: Mapping[str, Measurement]) -> frozenset[str]:
        """Return the keys of the simplest plan of what works or is not measured yet; empty where there is none."""
        space = self._space
        plain = {c.call.key for c in space.choices if len(c.cover.operators) == 1 and is_declared(space.graph, c)}
        prices = {
            key: (1.0 if key in plain else CONVERTED_PRICE)
            * (COMPILED_PRICE if KERNELS[call.candidate.kernel].compiles and key not in known else 1.0)
            for key, call in space.calls.items() if key not in known or known[key].status == "ok"
        }  # fmt: skip
        first = {key: price for key, price in prices.items() if key in plain and price < COMPILED_PRICE}
        for costs in (first, prices):
            try:
                return self._standing.puzzle().solved(costs).keys
            except InfeasibleError:
                continue
        return frozenset()

    def run(self, exhaustive: bool) -> None:
        """Measure until enough is known, confirm what would be chosen, and go on where that changes what matters."""
        known = Roofline.from_facts(self._database.facts(self._environment))
        lazy = not exhaustive and self._lazy(has_ceilings=bool(known.moved.rungs))
        if lazy:
            if not self._standing.enough():
                self._standing.ceilings = self._with_ceilings(known)
                self._is_news = True
        else:
            self._everything()
        while True:
            if lazy:
                self._what_matters()
            self._sample_outliers()
            self._look()
            self._fall_back()
            if not self._confirm():
                break
        if not lazy and len(self._space.calls) >= FEW and self.result().complete:
            try:
                self._with_ceilings(known)
            except MeasureError as error:  # this answer needs none
                warnings.warn(f"ceilings were not measured: {error}", stacklevel=stacklevel())

    def _lazy(self, *, has_ceilings: bool) -> bool:
        """Say whether only what matters is to be measured: where less is enough, or where that takes less time.

        Measures each operator alone, which is part of everything, to see how long a call takes, and looks. What comes
        of it is kept, so that a walk goes on as it began.
        """
        standing = self._standing
        if not self._missing or (len(self._missing) < FEW and not has_ceilings):
            return False
        if standing.gap is not None or standing.estimated_gap is not None or standing.limits != Limits():
            return True
        name = f"{DECIDED} {digest(sorted(self._space.calls))}"
        decided = self._database.fact(self._environment, name)
        if decided is not None:
            return bool(decided)
        alone = list(openers(self._space, set(self._missing)))
        self._total = len(alone)
        self._measured(alone)
        if not self._fresh:
            return has_ceilings
        self._look()
        left = len(self._missing.keys() - self._known.keys())
        lazy = pays(left, self._measuring_s / len(self._fresh), standing.look_s)
        self._database.set_fact(self._environment, name, lazy)
        return lazy

    def _with_ceilings(self, known: Roofline) -> Roofline:
        """Return the ceilings that the database knows, and what it lacks, measured and stored."""
        lacking = known.lacking({dtype for call in self._space.calls.values() for dtype in work_of(call).flop})
        if known.moved.rungs and not lacking:
            return known
        self._standing.tell(Progress("ceilings", 0, 0))
        try:
            with self._standing.within("ceilings"):
                found = known.with_products(self._measurer.ceilings(lacking))
        except OverError:
            return known
        for name, us in found.to_facts().items():
            self._database.set_fact(self._environment, name, us)
        return found

    def _look(self) -> None:
        """Solve anew if anything was learned since."""
        if self._is_news:
            self._standing.look(self._known, now=True)
            self._is_news = False

    def _compile(self, calls: Iterable[Call]) -> None:
        """Compile ahead of timing; what does not compile is measured with that, what was left out is not timed."""
        fresh = (call for call in calls if call.key not in self._prepared and call.key not in self._known)
        compiled = {call.key: call for call in fresh if KERNELS[call.candidate.kernel].compiles}
        self._prepared |= compiled.keys()
        left = set(compiled)
        self._compiling += len(compiled)
        if compiled and not self._standing.enough("compile"):
            with suppress(OverError), self._standing.within("compile"):
                for call, problem in self._measurer.prepare(list(compiled.values())):
                    left.discard(call.key)
                    if problem is not None:
                        self._learn(call, problem)
                    self._compiled += 1
                    self._standing.tell(Progress("compile", self._compiled, self._compiling))
                    if self._standing.enough("compile"):
                        break
        for key in left:
            del self._missing[key]

    def _everything(self) -> None:
        """Measure race after race until all is known, or it is enough."""
        self._compile(self._missing.values())
        keys = {key for key in self._missing if key not in self._known}
        first = list(openers(self._space, keys))
        others = list(races(self._space, keys - {race[0].key for race in first}))
        self._total = self._done + len(keys)
        self._standing.tell(Progress("measure", self._done, self._total))
        waiting: list[list[Call]] = []
        for number, race in enumerate(first + others):
            if first and number == len(first):
                self._look()
            if self._standing.enough():
                return
            waiting += self._race(race)
            self._standing.look(self._known)
        self._wait_for(waiting)

    def _what_matters(self) -> None:
        """Measure what the best plan at optimistic costs is made of, and what else could matter, batch after batch."""
        standing = self._standing
        first = list(openers(self._space, set(self._missing) - self._known.keys()))
        self._total = self._done + len(first)
        self._measured(first)
        ahead = False
        while True:
            self._look()
            if standing.outlook is None or standing.enough():
                return
            wanted = [key for key in standing.outlook.wanted if key in self._missing and key not in self._asked]
            if not wanted:
                return
            if not ahead:  # a compiler takes seconds to start, so all that could matter is compiled at once
                self._compile([self._missing[key] for key in wanted])
                wanted, ahead = [key for key in wanted if key in self._missing and key not in self._known], True
            self._total = self._done + len(wanted)
            standing.tell(Progress("measure", self._done, self._total))
            pace_s = self._measuring_s / max(1, len(self._fresh))
            batch = set(standing.batch(wanted, len(self._known), pace_s))
            self._measured(list(races(self._space, batch)))

    def _measured(self, races: Sequence[Sequence[Call]]) -> None:
        """Compile and measure some races; what somebody else has in hand is waited for."""
        self._compile(call for race in races for call in race)
        waiting: list[list[Call]] = []
        for race in races:
            if self._standing.enough():
                return
            calls = [call for call in race if call.key in self._missing and call.key not in self._known]
            waiting += self._race(calls)
            self._asked.update(call.key for call in race)
        self._wait_for(waiting)

    def _wait_for(self, waiting: list[list[Call]]) -> None:
        while waiting and not self._standing.enough():
            time.sleep(WAIT_FOR_OTHERS_S)
            waiting = [left for race in waiting for left in self._race(race)]
            self._standing.tell(Progress("measure", self._done, self._total))

    def _race(self, race: Sequence[Call]) -> list[list[Call]]:
        """Measure what nobody else measures, and return what somebody else does.

        Where the time is over, the race is given up; what it has told is kept.
        """
        mine = self._database.claim_calls(self._environment, self.owner, [call.key for call in race])
        found = self._stored(list(mine))
        self._known |= found
        self._is_news |= bool(found)
        self._standing.reused += len(found)
        self._done += len(found)
        calls = [call for call in race if call.key in mine and call.key not in found]
        began = time.monotonic()
        limit = nullcontext() if self._is_opening else self._standing.within("measure")
        with suppress(OverError), limit:
            for call, measurement in self._measurer.measure([calls]) if calls else ():
                self._learn(call, measurement)
                self._done += 1
                self._standing.tell(Progress("measure", self._done, self._total))
        self._measuring_s += time.monotonic() - began
        if self._is_time_to_store():
            self.flush()
            self._database.release_calls(self.owner)
        others = [call for call in race if call.key not in mine]
        return [others] if others else []

    def _fall_back(self) -> None:
        """Take what is doubtful and was not measured again as it was known, and remember whether it could matter."""
        stale = {key: measurement for key, measurement in self._before.items() if key not in self._known}
        if stale:
            outlook = self._standing.outlook
            self._stale = 0 if outlook is not None and outlook.proven_gap == 0 else len(stale)
            self._known |= stale
            self._is_news = True
            self._look()

    def _sample_outliers(self) -> None:
        """Race once more what took far longer in this walk than its siblings did."""
        wanted = outliers(self._space.calls, self._known) & self._unconfirmed
        self._unconfirmed -= wanted
        self.flush()
        for race in races(self._space, wanted):
            if self._standing.enough():
                return
            again = [(call, measured) for call, measured in self._measurer.measure([race]) if measured.status == "ok"]
            self._database.store(self._environment, again, replace=True)
            self._known |= {call.key: measurement for call, measurement in again}
            self._is_news = True

    def _learn(self, call: Call, measurement: Measurement) -> None:
        before = self._before.get(call.key)
        if before is not None and before.status == "ok" and measurement.status != "ok":
            measurement = before  # what worked is not lost to one failure
        self._known[call.key] = measurement
        self._fresh.add(call.key)
        self._unconfirmed.add(call.key)
        self._is_news = True
        self._new.append((call, measurement))
        self._standing.measured += 1
        self._standing.failed += measurement.status != "ok"
        if self._is_time_to_store():
            self.flush()

    def _is_time_to_store(self) -> bool:
        return len(self._new) >= STORE_AFTER_RESULTS or time.monotonic() - self._stored_at > STORE_AFTER_S

    def flush(self) -> None:
        if self._new:
            newer = [(call, measurement) for call, measurement in self._new if call.key in self._before]
            self._database.store(self._environment, [each for each in self._new if each[0].key not in self._before])
            self._database.store(self._environment, newer, replace=True)
        self._new, self._stored_at = [], time.monotonic()

    def _stored(self, keys: Sequence[str]) -> dict[str, Measurement]:
        found = self._database.find(self._environment, keys)
        known = {key: m for key, m in found.items() if m.status == "ok" or not self._retry}
        return {key: m for key, m in known.items() if m != self._before.get(key)}

    def _confirm(self) -> bool:
        """Measure what would be chosen once more, and solve again, until nothing new is chosen.

        Only what was measured in this walk is confirmed. A call that fails the second time keeps its first measurement.
        It ends where the job's time is over.

        Returns:
            Whether anything was measured.

        Raises:
            InfeasibleError: there is no plan.
        """
        confirmed = False
        must_be_computable(self._space, self._known)
        with suppress(OverError), self._standing.within("confirm"):
            for _ in range(CONFIRM_ROUNDS):
                problem, solution = solved(self._space, self._known, "exact", self._budget_bytes)
                keys = dict.fromkeys(key for key in problem.calls(solution) if key in self._unconfirmed)
                if not keys:
                    break
                self._unconfirmed -= keys.keys()
                self._confirm_calls([self._space.calls[key] for key in keys])
                self._is_news = confirmed = True
        return confirmed

    def _confirm_calls(self, calls: Sequence[Call]) -> None:
        """Measure calls once more, and store what came of those that work."""
        again: list[Result] = []
        self.flush()
        try:
            for done, (call, measurement) in enumerate(self._measurer.measure([[call] for call in calls]), start=1):
                if measurement.status == "ok":
                    again.append((call, measurement))
                self._standing.tell(Progress("confirm", done, len(calls)))
        finally:
            self._database.store(self._environment, again, replace=True)
            self._known |= {call.key: measurement for call, measurement in again}

    def result(self) -> Known:
        calls, known, outlook = self._space.calls, self._known, self._standing.outlook
        unknown = len(calls) - len(known)
        is_settled = self._standing.has_looked and (outlook is None or outlook.proven_gap == 0)
        counts = {
            "choices": len(self._space.choices) + len(self._space.conversions),
            "calls": len(calls),
            "measured": len(self._fresh),
            "reused": len(known) - len(self._fresh),
            "unknown": unknown,
            "unneeded": unknown if is_settled else 0,
            "stale": self._stale,
            "failed": sum(1 for measurement in known.values() if measurement.status != "ok"),
        }
        statuses = Counter(measurement.status for measurement in known.values())
        counts |= {f"status_{status}": count for status, count in sorted(statuses.items())}
        return Known(known, frozenset(self._fresh), counts)


def pays(left: int, alone_s: float, look_s: float) -> bool:
    """Say whether it takes less time to look for what matters and measure that than to measure everything.

    Args:
        left: calls that are not measured.
        alone_s: what measuring one alone takes.
        look_s: what looking once takes.
    """
    return SPARED_SHARE * left * alone_s / TOGETHER > LOOKS * look_s
