"""What a walk solves again and again while it measures: the problem of a space, at whatever its calls cost by then."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol, TypeVar

from autotuner.checkpoint import checkpoint
from autotuner.errors import ProblemError
from autotuner.solve import exact, least_through, min_marginals
from autotuner.solve.problem import Factor, Problem, Row
from autotuner.solve.problem.formulate import Lies, formulate
from autotuner.solve.problem.offered import Place, state_of
from autotuner.space import Space
from autotuner.tuner.answer import in_order

OPERATOR = "operator "
TENSORS = ("tensor", "saved")

T = TypeVar("T", bound=Hashable)
Least = Mapping[str, Mapping[str, float]]
"""What the best total through each state of each variable is at least."""

NEAR = 1.01
"""Up to so many times the bound, the totals through all states can be had in the time of a solution or two; they rule
out more than bounds do. A few per cent above it, an encoder layer is too large for that."""

Costs = Mapping[str, float]
"""Microseconds by call key; a call that is not there cannot be used."""


@dataclass(frozen=True)
class Solved:
    """The cheapest plan at some costs.

    Args:
        total_us: what it takes.
        bound_us: no plan takes less at these costs.
        keys: of the calls that it executes.
        through_us: asked with a total, what plans with each call at these costs take at least, by key; what is above
            that total need not be told apart.
    """

    total_us: float
    bound_us: float
    keys: frozenset[str]
    through_us: Callable[[float], Costs]


class Puzzle(Protocol):
    """What is solved at given costs; `SpacePuzzle` is one."""

    def solved(self, costs_us: Costs) -> Solved:
        """Return the cheapest plan at these costs.

        Raises:
            InfeasibleError: there is none.
        """


class SpacePuzzle:
    """The plans of a space: its problem is built once, and priced anew each time.

    Raises:
        InfeasibleError: some operator has no choice at all.
    """

    def __init__(self, space: Space) -> None:
        self._whole = formulate(space, dict.fromkeys(space.calls, 0.0))
        self._factors = tuple(replace(f, held_bytes={}) for f in self._whole.problem.factors)
        self._choices: dict[str, list[str]] = defaultdict(list)
        self._shares: dict[str, int] = {}
        for choice in space.choices:
            state = state_of(choice)
            self._choices[state].append(choice.call.key)
            self._shares[state] = len(choice.cover.operators)
        self._conversions: dict[Place, list[str]] = defaultdict(list)
        for conversion in space.conversions:
            place = (conversion.tensor, conversion.source, conversion.target)
            self._conversions[place].append(conversion.call.key)
        self._lies = {
            (kind, tensor): {state: [(tensor, lies.form, target) for target in lies.targets]
                             for (state,) in factor.table for lies in [Lies.parse(state)]}
            for factor in self._factors if len(factor.variables) == 1
            for kind, _, tensor in [factor.variables[0].partition(" ")] if kind in TENSORS
        }  # fmt: skip

    def solved(self, costs_us: Costs) -> Solved:
        """Return the cheapest plan at these costs.

        Raises:
            InfeasibleError: there is none.
        """
        prices = _Prices(_cheapest(self._choices, costs_us), _cheapest(self._conversions, costs_us))
        priced = Problem(tuple(self._priced(factor, prices) for factor in self._factors))
        formulation, solution = in_order(replace(self._whole, problem=priced), lambda each: exact(each.problem))
        used = {prices.choices[state][1] for name, state in solution.states.items() if name.startswith(OPERATOR)}
        for (kind, tensor), lies in self._lies.items():
            used.update(prices.conversions[place][1] for place in lies[solution.states[f"{kind} {tensor}"]])

        def through_us(most_us: float) -> Costs:
            least = _least(formulation.problem, solution.lower_bound_us, most_us)
            return self._through_us(least, prices, costs_us)

        return Solved(solution.total_us, solution.lower_bound_us, frozenset(used), through_us)

    def _priced(self, factor: Factor, prices: "_Prices") -> Factor:
        """Return a factor at these prices: without the states that need a call without a cost."""
        checkpoint()
        if len(factor.variables) > 1:
            return factor
        kind, _, name = factor.variables[0].partition(" ")
        table: dict[Row, float] = {}
        if kind == "operator":
            table = {
                (state,): prices.choices[state][0] / self._shares[state]
                for (state,) in factor.table
                if state in prices.choices
            }
        elif kind in TENSORS:
            lies = self._lies[kind, name]
            table = {
                (state,): cost + sum(prices.conversions[place][0] for place in lies[state])
                for (state,), cost in factor.table.items()
                if all(place in prices.conversions for place in lies[state])
            }
        else:
            return factor
        return replace(factor, table=table)

    def _through_us(self, least: Least, prices: "_Prices", costs_us: Costs) -> Costs:
        """Return what plans through each call take at least.

        A call that loses to another of the same cover and forms takes the other's place, for what it costs more. One
        that stands in several places counts where it is best.
        """
        found: dict[str, float] = dict.fromkeys(costs_us, inf)
        for state, keys in self._choices.items():
            if state in prices.choices:
                names = state.partition("|")[0].split("+")
                through = max(least[OPERATOR + name].get(state, inf) for name in names)
                _improve(found, keys, through - prices.choices[state][0], costs_us)
        converted: dict[Place, float] = {}
        for (kind, tensor), lies in self._lies.items():
            for state, us in least[f"{kind} {tensor}"].items():
                for place in lies[state]:
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


def _improve(found: dict[str, float], keys: list[str], rest_us: float, costs_us: Costs) -> None:
    for key in keys:
        if key in costs_us:
            found[key] = min(found[key], rest_us + costs_us[key])


class ProblemPuzzle:
    """The assignments of a plain problem, in which each row with a cost of a factor of one variable is a call.

    `calls` has what they cost, by key: the variable and its state.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.calls = {
            f"{factor.variables[0]}: {row[0]}": cost
            for factor in problem.factors
            if len(factor.variables) == 1
            for row, cost in factor.table.items()
            if cost > 0
        }

    def solved(self, costs_us: Costs) -> Solved:
        """Return the cheapest assignment at these costs.

        Raises:
            InfeasibleError: there is none.
        """
        problem = Problem(tuple(self._priced(factor, costs_us) for factor in self._problem.factors))
        solution = exact(problem)
        used = {f"{name}: {state}" for name, state in solution.states.items()}

        def through_us(most_us: float) -> Costs:
            least = _least(problem, solution.lower_bound_us, most_us)
            found = {f"{name}: {state}": us for name, states in least.items() for state, us in states.items()}
            return {key: found[key] for key in costs_us}

        return Solved(solution.total_us, solution.lower_bound_us, frozenset(used & self.calls.keys()), through_us)

    def _priced(self, factor: Factor, costs_us: Costs) -> Factor:
        if len(factor.variables) > 1:
            return factor
        (name,) = factor.variables
        rows: dict[Row, float] = {
            (state,): costs_us.get(f"{name}: {state}", cost)
            for (state,), cost in factor.table.items()
            if cost == 0 or f"{name}: {state}" in costs_us
        }
        return replace(factor, table=rows, held_bytes={})


def _least(problem: Problem, bound_us: float, most_us: float) -> Least:
    """Return what the best total through each state is at least; near the optimum, what it is."""
    if most_us <= NEAR * bound_us:
        try:
            return min_marginals(problem, most_us=most_us)
        except ProblemError:
            pass
    return least_through(problem)
