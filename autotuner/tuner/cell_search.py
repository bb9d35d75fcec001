"""Search of one sampled cell: Optuna proposes launch parameters where there are too many combinations to try all."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autotuner.ir.records import Attributes, Call, Measurement, Scalar
from autotuner.space import Cell
from autotuner.tuner.progress import Result
from autotuner.tuner.twins import TRIALS

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

STARTUP_TRIALS = 6
"""Trials before the sampler trusts them, those to start with included; until then it draws at random."""

SAMPLES_MIN = 3
"""Of a candidate that stays in its race, unless the measuring policy says another number."""

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class CellSearch:
    """Search of one cell: proposals of a sampler that learns from the times of the earlier ones.

    After the first trials, every other proposal is a neighbour of the fastest so far: one step in one list. No
    combination is proposed twice, and none that the kernel refuses: the nearest free one takes its place.

    Args:
        known: what is known of the cell's calls already; it counts towards the trials.
        samples_min: of a candidate that stays in its race; one with fewer samples was dropped.
        starts: launch parameters to begin with, those of a twin: then there are fewer trials.
    """

    def __init__(
        self, cell: Cell, known: Sequence[Result] = (), samples_min: int = SAMPLES_MIN,
        starts: Sequence[Attributes] = (),
    ) -> None:  # fmt: skip
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
        self._drawn = np.random.default_rng(int(cell.key[:8], 16))
        self._remember(known)
        self._starts = [self._rows[params] for params in starts or cell.starts if self._free[self._rows[params]]]
        self._trials_max = min(TRIALS, cell.trials) if starts else cell.trials

    @property
    def left(self) -> int:
        """The number of proposals that are left at most."""
        return max(0, min(self._trials_max - len(self.tried), int(self._free.sum())))

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
        elif (beside := self._beside_the_best()) is not None:
            row, trial = beside, self._ask(beside)
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

    def _beside_the_best(self) -> int | None:
        """Return a free neighbour of the fastest so far, every other time; None where it is the sampler's turn."""
        if self.best is None or len(self.tried) < STARTUP_TRIALS or len(self.tried) % 2:
            return None
        rows = self._lists.neighbours(self._rows[self.best[0].candidate.params], self._free)
        return int(self._drawn.choice(rows)) if len(rows) else None

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

    def nearest(self, places: Mapping[str, Any], free: Flags) -> int:
        """Return the free combination with the fewest steps from here."""
        distance = self._steps(np.array([places[name] for name in self._names], np.int64))
        distance[~free] = np.iinfo(np.int64).max
        return int(distance.argmin())

    def neighbours(self, row: int, free: Flags) -> Numbers:
        """Return the free combinations that are one step away."""
        return np.flatnonzero((self._steps(self._places[row]) == 1) & free)

    def _steps(self, places: Numbers) -> Numbers:
        """Return the steps from here to each combination; another value of no order is one step."""
        steps = np.abs(self._places - places)
        steps[:, ~self._ordered] = np.minimum(steps[:, ~self._ordered], 1)
        return np.asarray(steps.sum(1), np.int64)


def _is_ordered(values: Sequence[Scalar]) -> bool:
    """Tell whether a list is of numbers that rise or fall."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(values) and numbers in (sorted(numbers), sorted(numbers, reverse=True))
