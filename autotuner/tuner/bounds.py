"""Bounds of a problem of which a part is measured, and the calls that are worth measuring next.

Tuning is a lazy shortest path: a call that is not measured enters with an optimistic cost, so the cheapest plan at
these costs is a bound, and its calls are measured next. It ends when that plan is measured throughout.

Source:
    Dellin and Srinivasa, A unifying formalism for shortest path problems with expensive edge evaluations (2016).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from autotuner.errors import InfeasibleError
from autotuner.tuner.costliest import PlannedCall
from autotuner.tuner.learned import Costs, Learned
from autotuner.tuner.progress import ROUNDING, gap

BATCH_GROWTH = 0.1
"""Between two looks, about this share of what is measured already is measured: all that is wanted depends on the next
results, and a plan looked for as if they were known is sometimes the wrong one."""

AHEAD = 0.1
"""Calls that could rule a plan out are expected to raise it by this share at least. Fewer would leave many plans, each
a little longer than the one before: on a recorded layer, half of a run's solving."""

NEARLY = 0.01
"""The estimated gap from which on the plan behind the proven bound is measured as well."""

WIDE = 0.05
"""As long as the estimated gap is wider, the plan that is expected to be best is measured alone."""

RIVALS = 64
"""So many calls of plans that are expected to be better are measured between two solutions."""


@dataclass(frozen=True)
class Bounds:
    """The best measured plan and lower bounds, of a problem with measured and optimistic costs; in microseconds.

    Args:
        best_us: the best plan of measured calls alone; None where there is none.
        bound_us: proven: no plan takes less, however long the calls take that are not measured.
        estimated_us: by learned costs, no plan takes less; None without learned costs.
        wanted: keys of calls that could still matter: the `first` of them are measured next, then all others, the most
            promising first. Empty when enough is proven.
        first: of the cheapest plan by learned costs, all; of the plan behind `bound_us`, as many as could rule it out,
            none while the estimated gap is wide.
        following: returns the first ones and, up to about so many in all, those of the plans that come next if the
            calls before them take what is expected.
        costliest: the calls of the best plan that take longest.
        is_proven: `bound_us` was proven at these costs; otherwise it was at earlier ones.
    """

    best_us: float | None
    bound_us: float
    estimated_us: float | None
    wanted: tuple[str, ...]
    first: int
    following: Callable[[int], Sequence[str]] = lambda _: ()
    costliest: tuple[PlannedCall, ...] = ()
    is_proven: bool = True

    def more(self, known: int) -> float:
        """Return how many calls are worth measuring before the next solution, of which `known` are measured already."""
        return BATCH_GROWTH * known

    @property
    def proven_gap(self) -> float | None:
        """The share by which the best plan may be longer than the optimum; None where that is not known."""
        return gap(self.best_us, self.bound_us) if self.is_proven else None

    @property
    def estimated_gap(self) -> float | None:
        return gap(self.best_us, self.estimated_us)


@dataclass(frozen=True)
class CheapestPlan:
    """The cheapest plan at some costs.

    Args:
        total_us: its cost.
        bound_us: no plan takes less at these costs.
        keys: of the calls that it executes.
        through_us: returns, by key, a lower bound of all plans with that call at these costs. A bound above its
            argument, a total, need not be tight.
        costliest: its calls that take longest.
    """

    total_us: float
    bound_us: float
    keys: frozenset[str]
    through_us: Callable[[float], Costs]
    costliest: tuple[PlannedCall, ...] = ()


@dataclass(frozen=True)
class RivalsWanted:
    """Wishes of a run that ends when the closest rivals of its best plan are measured.

    Args:
        least_gap: the share by which plans are expected to be better, at least, whose calls are wanted.
        bound_us: proven before, at other costs: it is proven again only where no better plan is expected. None where
            nothing was proven yet.
        is_last: nothing will be measured any more, so no rivals are looked for.
    """

    least_gap: float
    bound_us: float | None = None
    is_last: bool = False


def bounds(
    solve: Callable[[Costs], CheapestPlan],
    measured_us: Costs,
    optimistic_us: Costs,
    learned: Learned | None = None,
    enough: float = 0.0,
    rivals: RivalsWanted | None = None,
) -> Bounds:
    """Solve at measured, optimistic and learned costs, and return the bounds.

    Args:
        solve: returns the cheapest plan at some costs.
        measured_us: of calls that are measured and work.
        optimistic_us: of calls that are not measured: lower bounds.
        learned: costs of the same calls, and of cells whose searches may go on: no part of what is proven.
        enough: the proven gap at which nothing matters any more.
        rivals: wanted are calls of plans that are expected to be better, and none to prove anything; None where
            something is to be proven.

    Raises:
        InfeasibleError: there is no plan, whatever will be measured.
    """
    if rivals is not None and learned is not None:
        return _rivals_bounds(solve, measured_us, optimistic_us, learned, enough, rivals)
    lower = solve({**optimistic_us, **measured_us})
    best: CheapestPlan | None = lower
    if not lower.keys <= measured_us.keys():
        try:
            best = solve(measured_us)
        except InfeasibleError:
            best = None
    best_us, longest = (None, ()) if best is None else (best.total_us, best.costliest)
    if not optimistic_us and learned is None:
        return Bounds(best_us, lower.bound_us, lower.bound_us, (), 0, costliest=longest)
    expected = None if learned is None else solve({**learned.likely_us, **measured_us})
    reached = inf if best_us is None else best_us / (1 + enough) * (1 - ROUNDING)
    searched = () if expected is None else tuple(sorted(expected.keys - measured_us.keys() - optimistic_us.keys()))
    estimated_us = None if expected is None else expected.bound_us
    if estimated_us is not None and not searched:
        estimated_us = max(estimated_us, lower.bound_us)
    if lower.bound_us >= reached:
        return Bounds(
            best_us, lower.bound_us, estimated_us, searched, len(searched), lambda _: searched, costliest=longest
        )
    plans = _Plans(solve, measured_us, optimistic_us, learned, best_us, reached)
    first = plans.first(lower, expected)
    through_us = lower.through_us(reached)
    rest = sorted((us, key) for key in optimistic_us if key not in first and (us := through_us.get(key, inf)) < reached)
    wanted = (*first, *(key for _, key in rest))
    following = partial(plans.following, first, expected)
    return Bounds(best_us, lower.bound_us, estimated_us, wanted, len(first), following, longest)


def _rivals_bounds(
    solve: Callable[[Costs], CheapestPlan],
    measured_us: Costs,
    optimistic_us: Costs,
    learned: Learned,
    enough: float,
    wanted: RivalsWanted,
) -> Bounds:
    """Return bounds where rivals alone are wanted; learned costs are no less than optimistic ones.

    So the plan that is expected to be best costs no less than the proven bound, and is the best one where it is
    measured throughout: one solution is enough then.
    """
    expected = solve({**learned.likely_us, **measured_us})
    best: CheapestPlan | None = expected
    if not expected.keys <= measured_us.keys():
        try:
            best = solve(measured_us)
        except InfeasibleError:
            best = None
    best_us, longest = (None, ()) if best is None else (best.total_us, best.costliest)
    reached = inf if best_us is None else best_us / (1 + enough) * (1 - ROUNDING)
    if wanted.bound_us is None or expected.bound_us >= reached:
        bound_us, is_proven = solve({**optimistic_us, **measured_us}).bound_us, True
    else:
        bound_us, is_proven = min(wanted.bound_us, expected.bound_us), False
    plans = _Plans(solve, measured_us, optimistic_us, learned, best_us, reached)
    distance = gap(best_us, expected.bound_us)
    if distance is None or distance > WIDE:
        left = plans.left(expected)
        following = partial(plans.following, left, expected)
        return Bounds(best_us, bound_us, expected.bound_us, left, len(left), following, longest, is_proven)
    left = () if wanted.is_last else plans.rivals(expected, wanted.least_gap)
    return Bounds(best_us, bound_us, expected.bound_us, left, len(left), lambda _: left, longest, is_proven)


@dataclass(frozen=True)
class _Plans:
    """Choice of the calls of plans that are worth measuring, at the costs that are known so far.

    Args:
        best_us: the best plan of measured calls.
        reached_us: plans that take as long need not be ruled out.
    """

    solve: Callable[[Costs], CheapestPlan]
    measured_us: Costs
    optimistic_us: Costs
    learned: Learned | None
    best_us: float | None
    reached_us: float

    def rivals(self, expected: CheapestPlan, least_gap: float) -> tuple[str, ...]:
        """Return calls that are not measured of plans which are expected to take less, those of the best plans first.

        Args:
            least_gap: the share by which they take less, at least.
        """
        left = self.left(expected)
        most_us = (inf if self.best_us is None else self.best_us) / (1 + least_gap)
        if expected.bound_us >= most_us:
            return ()
        through_us = expected.through_us(most_us)
        ranked = sorted((through_us.get(key, inf), key) for key in self.optimistic_us if key not in left)
        return (*left, *(key for us, key in ranked if us < most_us))[:RIVALS]

    def first(self, lower: CheapestPlan, expected: CheapestPlan | None) -> tuple[str, ...]:
        """Return the calls of the two plans that are measured.

        As long as a better plan is expected, its calls come alone: they lead to it with the fewest measurements.
        """
        promising = () if expected is None else self.left(expected)
        if expected is not None and promising and self._is_promising(expected):
            return promising
        return tuple(dict.fromkeys((*self._ruling_out(lower), *promising)))

    def following(self, first: Sequence[str], expected: CheapestPlan | None, most: int) -> Sequence[str]:
        """Return the first calls and those of the plans that come next, about `most` in all.

        Solves again as if the calls so far had taken what is expected of them, until nothing new comes up.
        """
        if self.learned is None or expected is None:
            return first
        is_promising = self._is_promising(expected)
        costs_us = {**(self.learned.likely_us if is_promising else self.optimistic_us), **self.measured_us}
        keys = dict.fromkeys(first)
        while len(keys) < most:
            costs_us |= {key: self.learned.median_us[key] for key in keys}
            plan = self.solve(costs_us)
            if is_promising:
                new = self.left(plan, keys) if self._is_promising(plan) else ()
            else:
                new = self._ruling_out(plan, keys) if plan.bound_us < self.reached_us else ()
            if not new:
                break
            keys.update(dict.fromkeys(new))
        return tuple(keys)

    def _is_promising(self, plan: CheapestPlan) -> bool:
        distance = gap(self.best_us, plan.bound_us)
        return distance is None or distance > NEARLY

    def left(self, plan: CheapestPlan, taken: Collection[str] = ()) -> tuple[str, ...]:
        """Return the calls of a plan that are neither measured nor taken."""
        return tuple(sorted(key for key in plan.keys if key not in self.measured_us and key not in taken))

    def _ruling_out(self, plan: CheapestPlan, taken: Collection[str] = ()) -> tuple[str, ...]:
        """Return calls of a plan which, if they take what is expected, rule it out; the fewest, or else all.

        Args:
            taken: calls that are measured in any case; the plan costs what is expected of them.
        """
        left = self.left(plan, taken)
        if self.learned is None:
            return left
        raised = {key: self.learned.median_us[key] - self.optimistic_us[key] for key in left}
        missing_us = max(self.reached_us - plan.total_us, AHEAD * plan.total_us)
        if sum(raised.values()) < missing_us:
            return left
        chosen: list[str] = []
        for key in sorted(left, key=lambda key: (-raised[key], key)):
            if chosen and missing_us <= 0:
                break
            chosen.append(key)
            missing_us -= raised[key]
        return tuple(chosen)
