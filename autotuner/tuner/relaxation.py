"""The relaxed problem that the tuner solves again as timings arrive, and the bounds that follow from it.

Tuning is a lazy shortest path: a call that is not measured enters with an optimistic cost, so the cheapest plan at
these costs is a bound, and its calls are measured next. It ends when that plan is measured throughout.

Source:
    Dellin and Srinivasa, A unifying formalism for shortest path problems with expensive edge evaluations (2016).
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, inf
from typing import TypeVar

from autotuner.checkpoint import checkpoint
from autotuner.errors import InfeasibleError, ProblemError
from autotuner.ir.records import Call, Measurement
from autotuner.measure.roofline import Roofline, Work, work_of
from autotuner.solve import exact, least_through, min_marginals
from autotuner.solve.problem import Problem
from autotuner.solve.problem.formulate import formulate, solve_in_order
from autotuner.solve.problem.offered import Place, state_of
from autotuner.solve.problem.states import Variable
from autotuner.space import Space
from autotuner.tuner.progress import ROUNDING, gap

T = TypeVar("T", bound=Hashable)
Least = Mapping[str, Mapping[str, float]]
"""Lower bounds of the total through each state of each variable."""

NEAR = 1.01
"""Up to this factor above the bound, the exact totals through all states take the time of a solution or two, and rule
out more than bounds do. A few per cent above it, an encoder layer is too large for that."""

BATCH_GROWTH = 0.1
"""Between two solutions, at most this share of what is measured already is measured only to keep the device busy; a
proven gap below `WIDE` makes it less."""

WIDE = 0.1

Costs = Mapping[str, float]
"""Microseconds by call key; a call that is not there cannot be used."""

COVERAGE = 0.9
"""The share of calls that take at least as long as learned from ratios of similar calls to their optimistic cost."""

NEARLY = 0.01
"""The estimated gap from which on the plan behind the proven bound is measured as well."""

ALIKE = 0.9
"""A call is expected to take at least this share of the fastest measured one of its kernel with the same work."""

Groups = Mapping[str, Sequence[Hashable]]
"""By call key: the groups of similar calls that a call belongs to, the closest first."""


@dataclass(frozen=True)
class Bounds:
    """The best measured plan and lower bounds, of a problem with measured and optimistic costs; in microseconds.

    Args:
        best_us: the best plan of measured calls alone; None where there is none.
        bound_us: proven: no plan takes less, however long the calls take that are not measured.
        estimated_us: by learned costs, no plan takes less; None without learned costs.
        wanted: keys of calls that could still matter: those of the plan behind `bound_us` and of the cheapest plan by
            learned costs, then all others, the most promising first. Empty when enough is proven.
        first: how many of `wanted` are of those two plans; of the second one alone while the estimated gap is wide.
    """

    best_us: float | None
    bound_us: float
    estimated_us: float | None
    wanted: tuple[str, ...]
    first: int

    def more(self, known: int) -> float:
        """Return how many calls are worth measuring before the next solution, of which `known` are measured already.

        All that is wanted depends on the next results: so few at first, and few when little is left to prove.
        """
        return BATCH_GROWTH * known * min(1.0, (self.proven_gap or WIDE) / WIDE)

    @property
    def proven_gap(self) -> float | None:
        """The share by which the best plan may be longer than the optimum; None where that is not known."""
        return gap(self.best_us, self.bound_us)

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
    """

    total_us: float
    bound_us: float
    keys: frozenset[str]
    through_us: Callable[[float], Costs]


def bounds(
    solve: Callable[[Costs], CheapestPlan],
    measured_us: Costs,
    optimistic_us: Costs,
    expected_us: Costs | None = None,
    enough: float = 0.0,
) -> Bounds:
    """Solve at measured, optimistic and learned costs, and return the bounds.

    Args:
        solve: returns the cheapest plan at some costs.
        measured_us: of calls that are measured and work.
        optimistic_us: of calls that are not measured: lower bounds.
        expected_us: of the same calls, by learned costs.
        enough: the proven gap at which nothing matters any more.

    Raises:
        InfeasibleError: there is no plan, whatever will be measured.
    """
    lower = solve({**optimistic_us, **measured_us})
    best_us: float | None
    if lower.keys <= measured_us.keys():
        best_us = lower.total_us
    else:
        try:
            best_us = solve(measured_us).total_us
        except InfeasibleError:
            best_us = None
    if not optimistic_us:
        return Bounds(best_us, lower.bound_us, lower.bound_us, (), 0)
    expected = None if expected_us is None else solve({**expected_us, **measured_us})
    reached = inf if best_us is None else best_us / (1 + enough) * (1 - ROUNDING)
    estimated_us = None if expected is None else max(expected.bound_us, lower.bound_us)
    if lower.bound_us >= reached:
        return Bounds(best_us, lower.bound_us, estimated_us, (), 0)
    first = dict.fromkeys(sorted(lower.keys - measured_us.keys()))
    if expected is not None:
        promising = dict.fromkeys(sorted(expected.keys - measured_us.keys()))
        # As long as a better plan is expected, its calls come alone: they lead to it with the fewest measurements.
        distance = gap(best_us, estimated_us)
        first = promising if promising and (distance is None or distance > NEARLY) else first | promising
    through_us = lower.through_us(reached)
    rest = sorted((us, key) for key in optimistic_us if key not in first and (us := through_us.get(key, inf)) < reached)
    return Bounds(best_us, lower.bound_us, estimated_us, (*first, *(key for _, key in rest)), len(first))


class Relaxation:
    """A space with what its relaxed problem needs: the problem, roofline estimates and groups of similar calls."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._works: dict[str, Work] = {}
        for key, call in space.calls.items():
            checkpoint()
            self._works[key] = work_of(call)
        self._groups: Groups = groups_of(space.calls)

    @cached_property
    def problem(self) -> "RelaxedProblem":
        """The problem of the space.

        Raises:
            InfeasibleError: some operator has no choice at all.
        """
        return RelaxedProblem(self.space)

    def bounds(self, known: Mapping[str, Measurement], ceilings: Roofline, enough: float) -> Bounds | None:
        """Solve; return None where there is no plan, whatever will be measured."""
        calls = self._works
        measured = {key: m.median_us for key, m in known.items() if m.median_us is not None and key in calls}
        lowered = ceilings.lowered((calls[key], us) for key, us in measured.items())
        optimistic = {key: lowered.optimistic_us(work) for key, work in calls.items()}
        left = {key: us for key, us in optimistic.items() if key not in known}
        learned = None
        if any(left.values()):
            guessed = learned_us(self._groups, optimistic, measured)
            learned = {key: guessed[key] for key in left}
        try:
            return bounds(self.problem.solve, measured, left, learned, enough)
        except InfeasibleError:
            return None


class RelaxedProblem:
    """The problem of a space, built once and priced anew for each solution.

    Raises:
        InfeasibleError: some operator has no choice at all.
    """

    def __init__(self, space: Space) -> None:
        self._whole = formulate(space).priced(dict.fromkeys(space.calls, 0.0))
        self._choices: dict[str, list[str]] = defaultdict(list)
        for choice in space.choices:
            self._choices[state_of(choice)].append(choice.call.key)
        self._conversions: dict[Place, list[str]] = defaultdict(list)
        for conversion in space.conversions:
            place = (conversion.tensor, conversion.source, conversion.target)
            self._conversions[place].append(conversion.call.key)
        self._tables = {str(table.variable): table.conversions for table in self._whole.structure.tables}

    def solve(self, costs_us: Costs) -> CheapestPlan:
        """Return the cheapest plan at these costs.

        Raises:
            InfeasibleError: there is none.
        """
        prices = _Prices(_cheapest(self._choices, costs_us), _cheapest(self._conversions, costs_us))
        priced = self._whole.structure.priced(_microseconds(prices.choices), _microseconds(prices.conversions))
        formulation, solution = solve_in_order(replace(self._whole, problem=priced), lambda each: exact(each.problem))
        used = {prices.choices[state_of(choice)][1] for choice in formulation.chosen(solution)}
        for variable, conversions in self._tables.items():
            used.update(prices.conversions[place][1] for place in conversions[solution.states[variable]])

        def through_us(most_us: float) -> Costs:
            least = least_totals(formulation.problem, solution.lower_bound_us, most_us)
            return self._through_us(least, prices, costs_us)

        return CheapestPlan(solution.total_us, solution.lower_bound_us, frozenset(used), through_us)

    def _through_us(self, least: Least, prices: "_Prices", costs_us: Costs) -> Costs:
        """Return a lower bound of all plans through each call.

        A call that loses to another of the same cover and forms takes the other's place, for what it costs more. One
        that stands in several places counts where it is best.
        """
        found: dict[str, float] = dict.fromkeys(costs_us, inf)
        for state, keys in self._choices.items():
            if state in prices.choices:
                operators = (Variable("operator", name) for name in self._whole.choices[state].cover.operators)
                through = max(least[str(operator)].get(state, inf) for operator in operators)
                _improve(found, keys, through - prices.choices[state][0], costs_us)
        converted: dict[Place, float] = {}
        for variable, conversions in self._tables.items():
            for state, us in least[variable].items():
                for place in conversions[state]:
                    converted[place] = min(converted.get(place, inf), us)
        for place, keys in self._conversions.items():
            if place in prices.conversions:
                _improve(found, keys, converted.get(place, inf) - prices.conversions[place][0], costs_us)
        return found


@dataclass(frozen=True)
class _Prices:
    """The cheapest call for each state of an operator and for each conversion: what it costs, and its key."""

    choices: Mapping[str, tuple[float, str]]
    conversions: Mapping[Place, tuple[float, str]]


def _cheapest(calls: Mapping[T, list[str]], costs_us: Costs) -> dict[T, tuple[float, str]]:
    found = {what: min(((costs_us[key], key) for key in keys if key in costs_us), default=None)
             for what, keys in calls.items()}  # fmt: skip
    return {what: price for what, price in found.items() if price is not None}


def _microseconds(prices: Mapping[T, tuple[float, str]]) -> dict[T, float]:
    return {what: us for what, (us, _) in prices.items()}


def _improve(found: dict[str, float], keys: list[str], rest_us: float, costs_us: Costs) -> None:
    for key in keys:
        if key in costs_us:
            found[key] = min(found[key], rest_us + costs_us[key])


def least_totals(problem: Problem, bound_us: float, most_us: float) -> Least:
    """Return lower bounds of the best total through each state; near the optimum, the totals themselves."""
    if most_us <= NEAR * bound_us:
        try:
            return min_marginals(problem, most_us=most_us)
        except ProblemError:
            pass
    return least_through(problem)


def groups_of(calls: Mapping[str, Call]) -> Groups:
    """Return groups of calls: by kernel, kinds and amount of work; by kernel and kinds; and all."""
    found: dict[str, Sequence[Hashable]] = {}
    for key, call in calls.items():
        work: Work = work_of(call)
        alike = (call.candidate.kernel, call.subgraph.kinds)
        found[key] = ((*alike, work.moved_bytes, tuple(sorted(work.flop.items()))), alike, "every call")
    return found


def learned_us(
    groups: Groups, optimistic_us: Mapping[str, float], measured_us: Mapping[str, float], coverage: float = COVERAGE
) -> dict[str, float]:
    """Return learned costs of the calls that are not measured.

    A call takes its optimistic cost times a factor: the one that the stated share of the measured calls in its group
    exceeds. The closest group counts in which enough is measured for that (9 calls for 90 %); without one, its
    optimistic cost. Nor does a call take less than `ALIKE` of the fastest call in its closest group: one measured call
    says that much. It is an estimate: in recorded walks, up to 23 % of the calls that were left took less.

    Args:
        groups: of every call.
        optimistic_us: of every call; what costs nothing optimistically says nothing.
        measured_us: of those that are measured.

    Returns:
        Microseconds by key, never below the optimistic cost.

    Source:
        Split conformal prediction: Papadopoulos et al., Inductive confidence machines for regression (2002).
    """
    factors: dict[Hashable, list[float]] = defaultdict(list)
    fastest: dict[Hashable, float] = {}
    for key, us in measured_us.items():
        fastest[groups[key][0]] = min(us, fastest.get(groups[key][0], us))
        if optimistic_us.get(key, 0.0) > 0:
            for group in groups[key]:
                insort(factors[group], us / optimistic_us[key])
    told = {group: factor for group, seen in factors.items() if (factor := _exceeded(seen, coverage)) is not None}
    found: dict[str, float] = {}
    for key, us in optimistic_us.items():
        if key not in measured_us:
            learned = us * max(1.0, next((told[group] for group in groups[key] if group in told), 1.0))
            found[key] = max(learned, ALIKE * fastest.get(groups[key][0], 0.0))
    return found


def _exceeded(ordered: Sequence[float], coverage: float) -> float | None:
    """Return what the next one exceeds with this probability, or None where there are too few to say."""
    rank = floor((1 - coverage) * (len(ordered) + 1) + 1e-9)
    return ordered[rank - 1] if rank else None
