"""The relaxed problem that the tuner solves again as timings arrive: a space, priced anew for each solution."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.ir.records import Measurement
from autotuner.measure.roofline import Roofline
from autotuner.solve import exact, least_through, min_marginals
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.problem.formulate import Formulation, formulate, solve_in_order
from autotuner.solve.problem.offered import Place, state_of
from autotuner.solve.problem.states import Variable
from autotuner.solve.tables import Encoder
from autotuner.space import Space, without_params
from autotuner.tuner.bounds import Bounds, CheapestPlan, RivalsWanted, bounds
from autotuner.tuner.costliest import PlannedCall, costliest, share
from autotuner.tuner.learned import NO_PRIORS, Costs, Learned, Priors, learned_costs, traits_of
from autotuner.tuner.twins import NO_TWINS, Twins

T = TypeVar("T", bound=Hashable)
Least = Mapping[str, Mapping[str, float]]
"""Lower bounds of the total through each state of each variable."""

NOTHING_SEARCHED: Mapping[str, tuple[float, float]] = {}

NEAR = 1.01
"""Up to this factor above the bound, the exact totals through all states take the time of a solution or two, and rule
out more than bounds do. A few per cent above it, an encoder layer is too large for that."""


class Relaxation:
    """A space with what its relaxed problem needs: the problem, and the traits and twins of calls.

    Attributes:
        twins_us: what calls are expected to take by their twins, by key.
    """

    def __init__(self, space: Space, twins: Twins = NO_TWINS, priors: Priors = NO_PRIORS) -> None:
        self.space = space
        self._twins, self._priors = twins, priors
        self._traits = traits_of(space.calls)
        self.twins_us = twins.expected_us(space.calls)

    def extend(self, space: Space) -> None:
        """Take the same space with more calls of its sampled cells."""
        new = {key: call for key, call in space.calls.items() if key not in self._traits}
        self._traits |= traits_of(new)
        self.twins_us |= self._twins.expected_us(new)
        if "problem" in self.__dict__:
            self.problem.extend(space, len(self.space.choices))
        self.space = space

    @cached_property
    def problem(self) -> "RelaxedProblem":
        """The problem of the space.

        Raises:
            InfeasibleError: some operator has no choice at all.
        """
        return RelaxedProblem(self.space)

    def bounds(
        self, known: Mapping[str, Measurement], ceilings: Roofline, enough: float, rivals: RivalsWanted | None = None,
        searched_us: Mapping[str, tuple[float, float]] = NOTHING_SEARCHED,
    ) -> Bounds | None:  # fmt: skip
        """Solve; return None where there is no plan, whatever will be measured. Arguments as of `bounds.bounds`.

        Args:
            searched_us: what sampled cells are expected to come to when their searches go on, by key: what nine in ten
                take at least, and what half of them do.
        """
        measured, optimistic = self._costs_us(known, ceilings)
        left = {key: us for key, us in optimistic.items() if key not in known}
        says_something = any(left.values()) or not self.twins_us.keys().isdisjoint(left) or searched_us
        learned = (
            learned_costs(self._traits, optimistic, measured, self.twins_us, self._priors) if says_something else None
        )
        if learned is not None and searched_us:
            likely, median = ({key: us[place] for key, us in searched_us.items()} for place in (0, 1))
            learned = Learned({**learned.likely_us, **likely}, {**learned.median_us, **median})
        try:
            return bounds(self.problem.solve, measured, left, learned, enough, rivals)
        except InfeasibleError:
            return None

    def bound_us(self, known: Mapping[str, Measurement], ceilings: Roofline) -> float:
        """Return what no plan takes less than, in microseconds.

        Raises:
            InfeasibleError: there is no plan, whatever will be measured.
        """
        measured, optimistic = self._costs_us(known, ceilings)
        return self.problem.solve({**optimistic, **measured}).bound_us

    def _costs_us(self, known: Mapping[str, Measurement], ceilings: Roofline) -> tuple[Costs, Costs]:
        """Return the times of what was measured and works, and optimistic costs of this and of what is not known."""
        traits = self._traits
        measured = {key: m.median_us for key, m in known.items() if m.median_us is not None and key in traits}
        lowered = ceilings.lowered((traits[key].work, us) for key, us in measured.items())
        optimistic = {
            key: lowered.optimistic_us(own.work) for key, own in traits.items() if key in measured or key not in known
        }
        return measured, optimistic


class RelaxedProblem:
    """The problem of a space, built once and priced anew for each solution.

    Raises:
        InfeasibleError: some operator has no choice at all.
    """

    def __init__(self, space: Space) -> None:
        self._whole = formulate(space).priced(dict.fromkeys(space.calls, 0.0))
        self._encoder = Encoder(self._whole.problem)
        self._calls = {**space.calls, **{cell.key: cell.call for cell in space.cells}}
        self._choices: dict[str, list[str]] = defaultdict(list)
        self._cells = {cell.key for cell in space.cells}
        self._sampled = {cell.kernel for cell in space.cells}
        self.extend(space, 0)
        self._conversions: dict[Place, list[str]] = defaultdict(list)
        for conversion in space.conversions:
            place = (conversion.tensor, conversion.source, conversion.target)
            self._conversions[place].append(conversion.call.key)
        self._tables = {str(table.variable): table.conversions for table in self._whole.structure.tables}

    def extend(self, space: Space, known: int) -> None:
        """Take the choices of a space, all but so many that are known, in the states of these.

        Where a cell's calls compute something, the cell's key stands as well, for what its search may find.
        """
        self._calls |= space.calls
        for choice in space.choices[known:]:
            keys = self._choices[state_of(choice)]
            keys.append(choice.call.key)
            if choice.candidate.kernel in self._sampled:
                cell = without_params(choice.call).key
                if cell in self._cells and cell not in keys:
                    keys.append(cell)

    def solve(self, costs_us: Costs) -> CheapestPlan:
        """Return the cheapest plan at these costs.

        Raises:
            InfeasibleError: there is none.
        """
        prices = _Prices(_cheapest(self._choices, costs_us), _cheapest(self._conversions, costs_us))
        priced = self._whole.structure.priced(_microseconds(prices.choices), _microseconds(prices.conversions))
        formulation, solution = solve_in_order(replace(self._whole, problem=priced), self._exact)
        chosen = [
            (choice.cover.operators, tuple((name, choice.by_tensor[name]) for name in choice.cover.outputs), price)
            for choice in formulation.chosen(solution)
            for price in (prices.choices[state_of(choice)],)
        ]
        chosen += [
            ((), ((place[0], place[2]),), prices.conversions[place])
            for variable, conversions in self._tables.items()
            for place in conversions[solution.states[variable]]
        ]
        total_us = solution.total_us
        longest = costliest(
            PlannedCall(operators, self._calls[key].candidate.kernel, outputs, us, share(us, total_us))
            for operators, outputs, (us, key) in chosen
        )

        def through_us(most_us: float) -> Costs:
            least = least_totals(formulation.problem, solution.lower_bound_us, most_us)
            return self._through_us(least, prices, costs_us)

        used = frozenset(key for _, _, (_, key) in chosen)
        return CheapestPlan(total_us, solution.lower_bound_us, used, through_us, longest)

    def _exact(self, formulation: Formulation) -> Solution:
        """Solve; where a circle of covers is forbidden, the problem has variables that the first one has not."""
        has_more = set(formulation.problem.variables) != set(self._whole.problem.variables)
        return exact(formulation.problem, encoder=None if has_more else self._encoder)

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
