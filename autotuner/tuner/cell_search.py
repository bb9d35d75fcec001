"""Search of sampled cells: Optuna proposes launch parameters where there are too many combinations to try all."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from autotuner.checkpoint import OverError, checkpoint
from autotuner.database import Database, Filter
from autotuner.ir.records import Attributes, Call, Measurement, Scalar
from autotuner.kernels import KERNELS
from autotuner.space import Cell, Space, without_params
from autotuner.tuner.progress import MeasurerProtocol, Progress, Result
from autotuner.tuner.runner import Known, RaceRunner
from autotuner.tuner.state import TuningState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

BATCH = 4
"""Proposals that race at once: more of them know less of each other, fewer leave cores idle that compile."""

STARTUP_TRIALS = 6
"""Trials before the sampler trusts them, those to start with included; until then it draws at random."""

GIVEN_UP = ((8, 1.5), (4, 2.0))
"""Numbers of trials, and the factor by which the best of so many may be behind another cell of the same computation."""

SAMPLES_MIN = 3
"""Of a candidate that stays in its race, unless the measuring policy says another number."""


@dataclass(frozen=True)
class Searched:
    """A space with everything that was tried of its sampled cells, and the keys of what was measured for that now."""

    space: Space
    fresh: frozenset[str]

    def counted(self, known: Known) -> Known:
        """Return what is known after measuring the space, the search's own measurements counted as measured as well."""
        fresh = known.fresh | (self.fresh & known.measurements.keys())
        counts = {"measured": len(fresh), "reused": len(known.measurements) - len(fresh)}
        counts |= cell_counts(self.space, known.measurements)
        return replace(known, fresh=fresh, counts={**known.counts, **counts})


def search_cells(space: Space, database: Database, measurer: MeasurerProtocol, state: TuningState) -> Searched:
    """Search the sampled cells of a space and add what was tried to its choices.

    What the database knows of a cell in this environment counts towards its trials. Proposals race in batches, together
    with the best of their cell so far. Cells whose kernel compiles take turns, so that one round of proposals compiles
    on all cores; the others follow one after another. A cell that is far behind another one of the same computation is
    searched no further, unless everything is to be measured. It ends early where the job's limits say so; what is not
    tried stays unknown.
    """
    if not space.cells:
        return Searched(space, frozenset())
    searches: list[CellSearch] = []
    runner = RaceRunner(replace(space, choices=(), conversions=()), database, measurer, state)
    with suppress(OverError), state.within("search"), runner:
        known = _known_by_cell(space, database, measurer.environment.key)
        for cell in space.cells:
            searches.append(CellSearch(cell, known[cell.key], _samples_min(measurer)))
        state.reused = sum(len(search.tried) for search in searches)
        Rounds(searches, runner, measurer).run()
    tried = [call for search in searches for call in search.tried.values()]
    state.space = space.with_calls(tried)
    return Searched(state.space, frozenset(runner.fresh))


def with_known_calls(space: Space, database: Database, environment_key: str) -> Space:
    """Return a space with everything that the database knows of its sampled cells in an environment."""
    known = _known_by_cell(space, database, environment_key)
    return space.with_calls(call for results in known.values() for call, _ in results)


def cell_counts(space: Space, known: Iterable[str]) -> dict[str, int]:
    """Return how many cells of a space are enumerated and sampled, and how much of the sampled ones was tried.

    Args:
        known: keys of calls with a measurement, failures included.
    """
    cells = {cell.key: cell for cell in space.cells}
    tried = dict.fromkeys(cells, 0)
    bare = {key: without_params(call).key for key, call in space.calls.items()}
    for key in known:
        if bare.get(key) in tried:
            tried[bare[key]] += 1
    return {
        "cells_enumerated": len(set(bare.values()) - cells.keys()),
        "cells_sampled": len(cells),
        "sampled_combinations": sum(len(cell.combinations) for cell in cells.values()),
        "sampled_tried": sum(tried.values()),
    }


def _known_by_cell(space: Space, database: Database, environment_key: str) -> Mapping[str, list[Result]]:
    """Return what the database knows of each sampled cell, by its key; values that are in no list are left out."""
    cells = {cell.key: cell for cell in space.cells}
    found: dict[str, list[Result]] = defaultdict(list)
    for signature, kernel in dict.fromkeys((c.call.subgraph.signature, c.kernel) for c in cells.values()):
        checkpoint()
        for row in database.measurements(Filter(environment_key, signature=signature, kernel=kernel)):
            cell = cells.get(without_params(row.call).key)
            params = row.call.candidate.params
            if cell is not None and _is_listed(cell, params) and cell.admits(params):
                found[cell.key].append((row.call, row.measurement))
    return found


def _is_listed(cell: Cell, params: Attributes) -> bool:
    if [name for name, _ in params] != [name for name, _ in cell.lists]:
        return False
    return all(
        any(value == one and type(value) is type(one) for one in values)
        for (_, value), (_, values) in zip(params, cell.lists, strict=True)
    )


def _samples_min(measurer: MeasurerProtocol) -> int:
    return int(dict(measurer.environment.policy).get("samples_min", SAMPLES_MIN))


class CellSearch:
    """Search of one cell: proposals of a sampler that learns from the times of the earlier ones.

    No combination is proposed twice, and none that the kernel refuses: the nearest free one takes its place.

    Args:
        known: what is known of the cell's calls already; it counts towards the trials.
        samples_min: of a candidate that stays in its race; one with fewer samples was dropped.
    """

    def __init__(self, cell: Cell, known: Sequence[Result] = (), samples_min: int = SAMPLES_MIN) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.tried: dict[str, Call] = {}
        """Calls by key, in the order in which they became known or were proposed."""
        self.best: Result | None = None
        """The incumbent: the fastest of its latest race, or of what was known before."""
        self.study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=int(cell.key[:8], 16), n_startup_trials=STARTUP_TRIALS)
        )
        self.cell, self._samples_min = cell, samples_min
        self._lists = _Lists(cell)
        self._free = np.ones(len(cell.combinations), np.bool_)
        self._rows = {params: row for row, params in enumerate(cell.combinations)}
        self._trials: dict[str, Trial] = {}
        self._remember(known)
        self._starts = [self._rows[params] for params in cell.starts if self._free[self._rows[params]]]

    @property
    def left(self) -> int:
        """The number of proposals that are left at most."""
        return max(0, min(self.cell.trials - len(self.tried), int(self._free.sum())))

    def propose(self, count: int) -> list[Call]:
        """Return up to so many calls that were neither proposed before nor known; none when the search is over."""
        return [self._propose() for _ in range(min(count, self.left))]

    def tell(self, race: Sequence[Result]) -> None:
        """Take the results of one race: of proposals, and of the incumbent once more."""
        from optuna.trial import TrialState

        least_us = _least_us(race)
        for call, measurement in race:
            trial = self._trials.pop(call.key, None)
            if trial is None:
                continue
            if measurement.median_us is None:
                self.study.tell(trial, state=TrialState.FAIL)
            elif self._was_dropped(measurement, least_us):
                trial.report(measurement.median_us, len(measurement.samples_us))
                self.study.tell(trial, state=TrialState.PRUNED)
            else:
                self.study.tell(trial, measurement.median_us)
        self._crown(race)

    def _remember(self, known: Sequence[Result]) -> None:
        from optuna.trial import TrialState, create_trial

        least_us = _least_us(known)
        for call, measurement in known:
            row = self._rows[call.candidate.params]
            self.tried[call.key] = call
            self._free[row] = False
            state, value, steps = TrialState.COMPLETE, measurement.median_us, {}
            if value is None:
                state = TrialState.FAIL
            elif self._was_dropped(measurement, least_us):
                state, steps = TrialState.PRUNED, {len(measurement.samples_us): value}
            self.study.add_trial(
                create_trial(
                    state=state, value=value, intermediate_values=steps, params=self._lists.places(row),
                    distributions=self._lists.distributions,
                )
            )  # fmt: skip
        self._crown(known)

    def _propose(self) -> Call:
        if self._starts:
            row = self._starts.pop(0)
            trial = self._ask(row)
        else:
            trial = self._ask()
            wanted = self._lists.row(trial.params)
            row = self._lists.nearest(trial.params, self._free)
            if row != wanted:
                self._give_up(trial)
                trial = self._ask(row)
        self._free[row] = False
        call = self.cell.called(self.cell.combinations[row])
        self.tried[call.key], self._trials[call.key] = call, trial
        return call

    def _ask(self, row: int | None = None) -> "Trial":
        """Return what the sampler wants to try, or a trial of one combination."""
        if row is not None:
            self.study.enqueue_trial(self._lists.places(row))
        return self.study.ask(self._lists.distributions)

    def _give_up(self, trial: "Trial") -> None:
        from optuna.trial import TrialState

        self.study.tell(trial, state=TrialState.FAIL)

    def _was_dropped(self, measurement: Measurement, least_us: float) -> bool:
        """Tell whether a race dropped a call early; a measurement without samples says nothing of that."""
        assert measurement.median_us is not None
        return 0 < len(measurement.samples_us) < self._samples_min and measurement.median_us > least_us

    def _crown(self, results: Sequence[Result]) -> None:
        """Take the fastest as the incumbent; the one so far counts as in these results, where it has a time there."""
        latest = {call.key: (call, m) for call, m in results if m.median_us is not None}
        if self.best is not None:
            latest.setdefault(self.best[0].key, self.best)
        ranked = [(m.median_us, call.candidate.params, key) for key, (call, m) in latest.items()]
        if ranked:
            self.best = latest[min(ranked)[2]]


def _least_us(results: Sequence[Result]) -> float:
    return min((m.median_us for _, m in results if m.median_us is not None), default=0.0)


class _Lists:
    """The lists of a cell as Optuna sees them: a parameter is its value's place in the list.

    Numbers that rise or fall have an order, and places keep geometric lists even; all else is categorical.
    """

    def __init__(self, cell: Cell) -> None:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        free = [(number, name, values) for number, (name, values) in enumerate(cell.lists) if len(values) > 1]
        self._names = [name for _, name, _ in free]
        self._ordered = np.array([_is_ordered(values) for _, _, values in free], np.bool_)
        self._places = np.array(
            [[values.index(params[number][1]) for number, _, values in free] for params in cell.combinations], np.int64
        ).reshape(len(cell.combinations), len(free))
        self._numbers = {tuple(places): row for row, places in enumerate(self._places.tolist())}
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1) if ordered else CategoricalDistribution(range(len(values)))
            for (_, name, values), ordered in zip(free, self._ordered, strict=True)
        }

    def places(self, row: int) -> dict[str, int]:
        """Return an admitted combination, given by its number, as places in the lists."""
        return dict(zip(self._names, self._places[row].tolist(), strict=True))

    def row(self, places: Mapping[str, Any]) -> int | None:
        """Return the number of a combination, or None where it is not admitted."""
        return self._numbers.get(tuple(places[name] for name in self._names))

    def nearest(self, places: Mapping[str, Any], free: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
        """Return the free combination with the fewest steps from here; another value of no order is one step."""
        steps = np.abs(self._places - np.array([places[name] for name in self._names], np.int64))
        steps[:, ~self._ordered] = np.minimum(steps[:, ~self._ordered], 1)
        distance = steps.sum(1)
        distance[~free] = np.iinfo(np.int64).max
        return int(distance.argmin())


def _is_ordered(values: Sequence[Scalar]) -> bool:
    """Tell whether a list is of numbers that rise or fall."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(values) and numbers in (sorted(numbers), sorted(numbers, reverse=True))


class Rounds:
    """Rounds of several searches: proposals of all are compiled together, then race cell by cell."""

    def __init__(self, searches: Sequence[CellSearch], runner: RaceRunner, measurer: MeasurerProtocol) -> None:
        self._searches, self._runner, self._measurer, self._state = searches, runner, measurer, runner.state
        self._done, self._total = 0, sum(search.left for search in searches)
        self._given_up: set[str] = set()
        self._least_us: dict[str, float] = {}
        """Of every computation that is searched, by its signature: the best so far."""
        for search in searches:
            self._note(search)

    def run(self) -> None:
        """Search all cells, or until the state says enough."""
        compiling = [search for search in self._searches if KERNELS[search.cell.kernel].compiles]
        others = [[search] for search in self._searches if not KERNELS[search.cell.kernel].compiles]
        self._tell()
        for together in ([compiling] if compiling else []) + others:
            while (active := [search for search in together if self._goes_on(search)]) and not self._enough():
                self._round(active)

    def _round(self, active: Sequence[CellSearch]) -> None:
        proposed = [(search, search.propose(BATCH)) for search in active]
        mine, _ = self._runner.claim([call for _, calls in proposed for call in calls])
        compiled = [call for call in mine if KERNELS[call.candidate.kernel].compiles]
        for call, problem in self._measurer.prepare(compiled) if compiled else ():
            if problem is not None:
                self._runner.learn(call, problem)
        claimed = {call.key for call in mine}
        for search, calls in proposed:
            if self._enough():
                break
            search.tell(self._raced(calls, claimed, search.best))
            self._done += len(calls)
            self._note(search)
            self._tell()
        self._runner.share()

    def _raced(self, proposed: Sequence[Call], claimed: Container[str], best: Result | None) -> list[Result]:
        """Race proposals against the incumbent and return the results; what another process measures is left to it."""
        runner = self._runner
        left = {call.key: call for call in proposed if call.key in claimed and call.key not in runner.known}
        incumbent = [] if best is None or not left else [best[0]]
        again: list[Result] = []
        try:
            for call, measurement in self._measurer.measure([[*incumbent, *left.values()]]) if left else ():
                if call.key in left:
                    runner.learn(call, measurement)
                elif measurement.status == "ok":
                    again.append((call, measurement))
        finally:
            runner.renew(again)  # the older timing was the incumbent's by luck, too
        return [(call, runner.known[call.key]) for call in proposed if call.key in runner.known] + again

    def _goes_on(self, search: CellSearch) -> bool:
        """Tell whether a cell is worth more trials: by its best so far, and by the best of the same computation."""
        if not search.left or search.cell.key in self._given_up:
            return False
        if search.best is None or self._state.options.exhaustive:
            return True
        us, tried = search.best[1].median_us, len(search.tried)
        factor = next((factor for trials, factor in GIVEN_UP if tried >= trials), inf)
        if us is not None and us > factor * self._least_us.get(search.cell.call.subgraph.signature, inf):
            self._given_up.add(search.cell.key)
            self._total -= search.left
            return False
        return True

    def _note(self, search: CellSearch) -> None:
        us = None if search.best is None else search.best[1].median_us
        if us is not None:
            signature = search.cell.call.subgraph.signature
            self._least_us[signature] = min(us, self._least_us.get(signature, inf))

    def _enough(self) -> bool:
        return self._state.enough("search")

    def _tell(self) -> None:
        self._state.tell(Progress("search", self._done, self._total))
