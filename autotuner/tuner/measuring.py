"""Measuring strategies: a first plan, every call, or only the calls that could matter."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf

from autotuner.checkpoint import OverError
from autotuner.database import Database
from autotuner.errors import InfeasibleError, MeasureError, stacklevel
from autotuner.ir.records import Call, Measurement, digest
from autotuner.kernels import KERNELS
from autotuner.measure.roofline import Roofline
from autotuner.settings import Limits
from autotuner.solve.baselines import is_declared
from autotuner.space import Space
from autotuner.tuner.bounds import WIDE
from autotuner.tuner.compiling import Compilation
from autotuner.tuner.finals import Finals
from autotuner.tuner.ledger import Known, Ledger
from autotuner.tuner.likely import with_ceilings
from autotuner.tuner.progress import MeasurerProtocol
from autotuner.tuner.races import openers, races
from autotuner.tuner.runner import RaceRunner
from autotuner.tuner.searching import NO_RACES, CellSearches, begun, known_by_cell
from autotuner.tuner.solving import must_be_computable, solved
from autotuner.tuner.state import TuningState

CONVERTED_PRICE, COMPILED_PRICE = 1e3, 1e6
"""Prices that keep conversions and kernels that need a compiler out of the first plan; see `_opening`."""
LONG_RACE = 9
"""Calls of a race that is handed over early where several devices measure."""

DECIDED = "looks for what matters in"
"""With a digest of a space's calls, and the devices where there are several, the name of the fact whether a run
measures lazily, 1 or 0."""


def measure_missing(
    space: Space,
    database: Database,
    measurer: MeasurerProtocol,
    state: TuningState,
    *,
    unconfirmed: Iterable[str] = (),
    doubted: Collection[str] | None = None,
    compilation: Compilation | None = None,
) -> Known:
    """Measure the calls of a space that could make a difference and that the database lacks, storing as results come.

    The chosen calls are measured once more in the end: the least of many noisy timings is too low on average, a second
    timing of the same call is not. Doubtful calls of the latest answer, and those that took far longer than their
    siblings, are measured again; where that fails, the earlier measurement stays. Sampled cells are searched as far as
    they are of plans that are expected to be best, or all of them where everything is measured; what is tried is in the
    state's space in the end.

    Args:
        unconfirmed: keys of calls that were measured once, earlier in this run.
        doubted: keys that are doubtful in the latest answer as a whole; None where that is not doubtful.
        compilation: that has begun, see `autotuner.tuner.likely`.

    Raises:
        InfeasibleError: there is no plan of what is measured; the message says whether the limits are why.
    """
    environment_key = measurer.environment.key
    known = known_by_cell(space, database, environment_key)
    state.space = space = begun(space, known, state)
    ledger = Ledger(space, database, environment_key, state, retry=state.options.retry, unconfirmed=unconfirmed)
    ledger.distrust(space.calls if state.options.remeasure else doubted)
    with RaceRunner(ledger, measurer, compilation=compilation) as runner:
        try:
            _Strategy(runner, database, measurer, CellSearches(runner, measurer, known)).run()
        except InfeasibleError as error:
            if ledger.result().complete:
                raise
            raise InfeasibleError(
                f"the limits of the job were reached before there was a plan: {error}; what was measured is kept, so "
                "ask again with higher limits"
            ) from None
    state.prove(ledger.known)
    return ledger.result()


def open_plan(
    space: Space, database: Database, measurer: MeasurerProtocol, state: TuningState, until_s: float = inf
) -> frozenset[str]:
    """Measure the calls of a first plan, beyond the limits if need be, and return the keys of what was measured.

    The plan is that of the framework: each operator alone, tensors as declared, kernels that need no compiler. Where a
    part of it fails, another plan takes its place, until one works, there is none, or the time is up. Then the call in
    hand is given up. With a plan, a job that has reached its limits has an answer.

    Args:
        until_s: in seconds that the job has spent; the policy has a limit of its own.
    """
    ledger = Ledger(space, database, measurer.environment.key, state)
    ledger.distrust(None)
    until_s = min(until_s, state.spent_s + state.policy.opening_s)
    with RaceRunner(ledger, measurer, until_s=until_s) as runner:
        asked: set[str] = set()
        while state.spent_s < until_s:
            known = {**ledger.before, **ledger.known}
            left = [key for key in _opening(space, state, known) if key not in known and key not in asked]
            asked.update(left)
            runner.expect(len(left))
            runner.race([space.calls[key]] for key in left if state.spent_s < until_s)
            if not left:
                break
    return ledger.result().fresh


def _opening(space: Space, state: TuningState, known: Mapping[str, Measurement]) -> frozenset[str]:
    """Return the keys of the simplest plan of what works or is not measured yet; empty where there is none."""
    plain = {c.call.key for c in space.choices if len(c.cover.operators) == 1 and is_declared(space.graph, c)}
    prices = {
        key: (1.0 if key in plain else CONVERTED_PRICE)
        * (COMPILED_PRICE if KERNELS[call.candidate.kernel].compiles and key not in known else 1.0)
        for key, call in space.calls.items() if key not in known or known[key].status == "ok"
    }  # fmt: skip
    first = {key: price for key, price in prices.items() if key in plain and price < COMPILED_PRICE}
    for costs in (first, prices):
        try:
            return state.problem().solve(costs).keys
        except InfeasibleError:
            continue
    return frozenset()


class _Strategy:
    """Decides which calls are raced, and in which order."""

    def __init__(
        self, runner: RaceRunner, database: Database, measurer: MeasurerProtocol, searches: CellSearches
    ) -> None:
        self._runner, self._database, self._measurer, self._searches = runner, database, measurer, searches
        self._ledger, self._finals, self._state = runner.ledger, Finals(runner.ledger, measurer), runner.ledger.state
        self._environment = measurer.environment.key
        self._decided: bool | None = None

    @property
    def _space(self) -> Space:
        return self._ledger.space

    def run(self) -> None:
        """Measure until enough is known, confirm the chosen calls, and go on where that changes what matters."""
        ledger, finals, state = self._ledger, self._finals, self._state
        known = Roofline.from_facts(self._database.facts(self._environment))
        if not state.is_exhaustive:
            self._narrow()  # before anything says that enough is known
        lazy = not state.is_exhaustive and self._lazy(has_ceilings=bool(known.moved.rungs))
        if lazy:
            state.searched_us = self._searches.expected_us
            if not state.enough():
                state.ceilings = self._with_ceilings(known)
                ledger.is_news = True
        else:
            self._searches.search_all()
            self._everything()
        while True:
            if lazy:
                self._what_matters()
            finals.sample_outliers()
            finals.sample_drifted()
            self._solve()
            ledger.fall_back()
            self._solve()
            if not self._confirm():
                break
            state.rival_rounds = min(state.rival_rounds, state.policy.twins_rounds - 1)  # once more, if that changed it
        is_large = len(self._space.calls) >= state.policy.few_calls
        if not lazy and is_large and self._measurer.devices == 1 and ledger.result().complete:
            try:  # for later runs: this answer needs none, and several devices do not wait for one
                self._with_ceilings(known)
            except MeasureError as error:
                warnings.warn(f"ceilings were not measured: {error}", stacklevel=stacklevel())

    def _lazy(self, *, has_ceilings: bool) -> bool:
        """Decide whether only what matters is measured: where less is enough, or where that takes less time.

        Measures each operator alone, which is needed in any case, to see how long a call takes, and solves once. The
        decision is stored, so that a resumed run keeps the mode of the first.
        """
        runner, ledger, state = self._runner, self._ledger, self._state
        if not ledger.missing or (len(ledger.missing) < state.policy.few_calls and not has_ceilings):
            return False
        options = state.options
        if options.gap is not None or options.estimated_gap is not None or options.limits != Limits():
            return True
        state.look_for_twins(ledger.missing.keys())
        if state.ends_by_twins:
            return True
        devices = self._measurer.devices
        always = self._space.calls.keys() - self._searches.begun_with.keys()  # whatever is known of sampled cells
        name = f"{DECIDED} {digest(sorted(always))}" + (f" on {devices} devices" if devices > 1 else "")
        decided = self._database.fact(self._environment, name)
        if decided is not None:
            return bool(decided)
        alone = list(openers(self._space, set(ledger.missing)))
        ahead = self._uncompiled(alone) if devices > 1 else []
        runner.total = sum(map(len, (*alone, *ahead)))
        runner.compile((race[0] for race in alone), wait=True)
        if ahead and runner.compilation.is_beside:
            runner.compile(ledger.missing.values())
        began_s = state.spent_s
        self._decided = None
        runner.race(self._deciding(alone, ahead, began_s))
        if not ledger.fresh:
            return has_ceilings
        lazy = self._pays(began_s) if self._decided is None else self._decided
        self._database.set_fact(self._environment, name, lazy)
        return lazy

    def _deciding(
        self, alone: Sequence[list[Call]], ahead: Sequence[list[Call]], began_s: float
    ) -> Iterator[list[Call]]:
        """Yield each operator alone, and what several devices may measure until it is decided what else matters."""
        waiting = {race[0].key for race in alone}
        yield from ([call for call in race if call.key in self._ledger.missing] for race in alone)
        for race in ahead:
            if self._decided is None and waiting.isdisjoint(self._ledger.under_way):
                self._decided = self._pays(began_s)
            if self._decided:
                return
            yield race

    def _uncompiled(self, alone: Sequence[list[Call]]) -> list[list[Call]]:
        """Return races of all that needs no compiler, without what is measured alone."""
        ledger, first = self._ledger, {race[0].key for race in alone}
        plain = {key for key, call in ledger.missing.items() if not KERNELS[call.candidate.kernel].compiles}
        return self._shared(races(self._space, plain - first - ledger.known.keys()))

    def _shared(self, races: Iterable[list[Call]]) -> list[list[Call]]:
        """Return races as several devices take them.

        Long races go first, so that short ones leave no device at rest in the end. Among them each graph has an order
        of its own: jobs that begin together and have calls in common then find each other's results.
        """
        own = self._space.graph.key
        return sorted(races, key=lambda race: (len(race) < LONG_RACE, digest([own, race[0].key])))

    def _pays(self, began_s: float) -> bool:
        """Solve, and say whether to measure only what matters, by the pace since measuring began."""
        ledger, state, devices = self._ledger, self._state, self._measurer.devices
        measuring_s = state.spent_s - began_s
        self._solve()
        left = len(ledger.open_keys())
        alone_s = devices * measuring_s / max(1, len(ledger.fresh))
        return state.policy.lazy_pays(left, alone_s, state.solve_s, devices)

    def _with_ceilings(self, known: Roofline) -> Roofline:
        return with_ceilings(self._space, self._database, self._measurer, self._state, known)

    def _everything(self) -> None:
        """Measure race after race until all is known, or the state says enough."""
        runner, ledger, state = self._runner, self._ledger, self._state
        keys = ledger.open_keys()
        first = list(openers(self._space, keys))
        others = list(races(self._space, keys - {race[0].key for race in first}))
        if self._measurer.devices > 1:
            others = self._shared(others)
        ends_early = state.options.gap, state.options.estimated_gap, state.options.limits.measurements
        if ends_early == (None, None, None):
            state.expect({"measure": len(keys), "confirm": len(self._space.graph.operators)})
        runner.compile(call for race in (*first, *others) for call in race)
        runner.expect(sum(map(ledger.is_open, keys)))
        runner.race(self._solving_between(first, others))

    def _solving_between(self, first: Sequence[list[Call]], others: Sequence[list[Call]]) -> Iterator[Sequence[Call]]:
        """Yield races, and solve when a plan is known, and now and then, before the next one is handed over."""
        ledger, opening = self._ledger, {race[0].key for race in first}
        for race in self._runner.ripe((*first, *others)):
            if opening and not any(map(ledger.is_open, opening)):
                opening = set()
                self._solve()
            yield race
            self._state.solve(ledger.known)

    def _what_matters(self) -> None:
        """Measure the best plan at optimistic costs, and what else could matter, batch after batch."""
        runner, ledger, state = self._runner, self._ledger, self._state
        state.expect(None)  # with each solution, less may matter
        first = list(openers(self._space, ledger.open_keys(), self._opened()))
        if state.ends_by_twins:  # nothing else would have it measured
            doubtful = ledger.before.keys() & ledger.open_keys() - {race[0].key for race in first}
            first += races(self._space, doubtful)
        runner.total = ledger.done + sum(map(len, first))
        runner.measure(first)
        ahead = False
        while True:
            self._solve()
            if state.bounds is None or state.enough():
                return
            cells = self._searches.wanted(state.bounds.wanted)
            wanted = [
                key for key in state.bounds.wanted
                if key in cells or (key in ledger.missing and key not in runner.asked)
            ]  # fmt: skip
            if not wanted:
                return
            if not ahead:  # a compiler takes seconds to start, so all that could matter is compiled at once
                runner.compile([ledger.missing[key] for key in wanted if key not in cells])
                wanted, ahead = [key for key in wanted if key in cells or ledger.is_open(key)], True
            runner.expect(len(wanted))
            pace_s = runner.measuring_s / max(1, len(ledger.fresh))
            batch = set(state.batch(wanted, len(ledger.known), pace_s, self._measurer.devices))
            estimated = state.bounds.estimated_gap
            others = list(races(self._space, batch - cells.keys()))
            runner.compile(call for race in others for call in race)
            meanwhile = runner.needed(runner.ripe(others)) if self._measurer.devices == 1 else NO_RACES
            self._searches.search(dict.fromkeys(cells[key] for key in cells if key in batch), meanwhile)
            runner.measure(others)
            state.rival_rounds += state.ends_by_twins and estimated is not None and estimated <= WIDE

    def _opened(self) -> frozenset[str] | None:
        """Return the keys of what is measured and works, where a run with limits has a plan of it; None otherwise."""
        if self._state.options.limits == Limits():
            return None
        known = self._ledger.known
        if not self._state.has_plan(known):
            return None
        return frozenset(key for key, measurement in known.items() if measurement.median_us is not None)

    def _narrow(self) -> None:
        """Measure conversions to inexact formats and back, if any: no fastest plan has them, and leaner ones may."""
        runner, ledger = self._runner, self._ledger
        keys = {key for key in self._space.narrow_calls if ledger.is_open(key)}
        if keys:
            runner.expect(len(keys))
            runner.measure(list(races(self._space, keys)))

    def _confirm(self) -> bool:
        """Measure the chosen calls once more, and solve again, until nothing new is chosen.

        Only what was measured in this run is confirmed, a few times more where the speed of the device changed. A call
        that fails the second time keeps its first measurement.
        It ends where the job's time is over.

        Returns:
            True if anything was measured.

        Raises:
            InfeasibleError: there is no plan.
        """
        ledger, finals, state = self._ledger, self._finals, self._state
        confirmed = False
        must_be_computable(self._space, ledger.known)
        budget_bytes = state.options.budget_bytes
        with suppress(OverError), state.within("confirm"):
            unpriced = state.space_problem()
            for _ in range(state.policy.confirm_rounds):
                problem, solution = solved(unpriced, ledger.known, "exact", budget_bytes)
                calls = finals.unconfirmed(problem.calls(solution))
                if not calls:
                    break
                state.expect({})
                finals.confirm(calls)
                ledger.is_news = confirmed = True
        return confirmed

    def _solve(self) -> None:
        """Solve the relaxed problem again if there are new results."""
        if self._ledger.is_news:
            self._state.solve(self._ledger.known, now=True)
            self._ledger.is_news = False
