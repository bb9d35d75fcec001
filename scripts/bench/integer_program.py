"""A problem as a mixed integer program, on arrays: what benchmarks give to solvers of such programs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from autotuner.solve.problem import Problem

Integers = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class IntegerProgram:
    """Minimise `costs @ x + constant` where `A @ x = right`, `0 <= x <= upper`, the first `state_count` of x whole.

    One x for each state of each variable, then one for each row of each factor over several variables. The states of a
    variable add up to 1; of a factor, the rows that hold a state add up to that state's x. So rows are whole where
    states are. A is given by its entries: `A[equations[i], places[i]] = values[i]`.

    With a budget, one more x is what is left of it, in units of the largest count of bytes that divides all others.

    Args:
        states: place of each state in x, by variable.
    """

    states: Mapping[str, Mapping[str, int]]
    constant: float
    costs: Reals
    upper: Reals
    equations: Integers
    places: Integers
    values: Reals
    right: Reals

    @property
    def state_count(self) -> int:
        return sum(len(codes) for codes in self.states.values())

    def chosen(self, x: Reals) -> dict[str, str]:
        """Return the state of each variable whose x is largest."""
        return {name: max(codes, key=_valued(codes, x)) for name, codes in self.states.items()}


def integer_program(problem: Problem, budget_bytes: int | None = None) -> IntegerProgram:
    """Return a problem as a program whose relaxation is the tightest that its factors one by one give.

    Args:
        budget_bytes: for what the chosen rows hold.

    Cost:
        Python's, per row of each factor.
    """
    states: dict[str, dict[str, int]] = {name: {} for name in problem.variables}
    count = 0
    columns_of = [list(zip(*factor.table, strict=True)) for factor in problem.factors]
    for factor, columns in zip(problem.factors, columns_of, strict=True):
        for name, column in zip(factor.variables, columns, strict=False):
            for state in dict.fromkeys(column):
                if state not in states[name]:
                    states[name][state] = count
                    count += 1
    upper, costs, constant = np.ones(count), [np.zeros(count)], 0.0
    known = {name: _integers(codes.values()) for name, codes in states.items()}
    entries: list[tuple[Integers, Integers, float | Reals]] = [
        (np.full(len(places), number), places, 1.0) for number, places in enumerate(known.values())
    ]
    right = [np.ones(len(states))]
    equation = len(states)
    places_of: list[Integers] = []
    for factor, columns in zip(problem.factors, columns_of, strict=True):
        prices = np.fromiter(factor.table.values(), np.float64, len(factor.table))
        if not factor.variables:
            constant += float(prices.sum())
            places_of.append(_integers([]))
        elif len(factor.variables) == 1:
            (name,) = factor.variables
            places = _integers(states[name][row[0]] for row in factor.table)
            costs[0][places] += prices
            upper[np.setdiff1d(known[name], places)] = 0.0
            places_of.append(places)
        else:
            rows = np.arange(count, count + len(prices))
            for name, column in zip(factor.variables, columns or [()] * len(factor.variables), strict=True):
                rank = {state: equation + place for place, state in enumerate(states[name])}
                entries.append((_integers(rank[state] for state in column), rows, 1.0))
                entries.append((np.arange(equation, equation + len(rank)), known[name], -1.0))
                right.append(np.zeros(len(rank)))
                equation += len(rank)
            costs.append(prices)
            places_of.append(rows)
            count += len(prices)
    upper = np.concatenate((upper, np.ones(count - len(upper))))
    if budget_bytes is not None:
        _add_budget(problem, budget_bytes, places_of, count, equation, entries, right)
        costs.append(np.zeros(1))
        upper = np.concatenate((upper, [np.inf]))
    return IntegerProgram(
        states,
        constant,
        np.concatenate(costs),
        upper,
        np.concatenate([entry[0] for entry in entries]),
        np.concatenate([entry[1] for entry in entries]),
        np.concatenate([np.broadcast_to(entry[2], len(entry[1])) for entry in entries]),
        np.concatenate(right),
    )


def _add_budget(
    problem: Problem,
    budget_bytes: int,
    places_of: list[Integers],
    left: int,
    equation: int,
    entries: list[tuple[Integers, Integers, float | Reals]],
    right: list[Reals],
) -> None:
    """Add the equation of a budget to `entries` and `right`; `left` is the place of what is left of the budget."""
    unit = gcd(*(count for factor in problem.factors for count in factor.held_bytes.values())) or 1
    entries.append((_integers([equation]), _integers([left]), 1.0))
    spare = float(budget_bytes // unit)
    for factor, places in zip(problem.factors, places_of, strict=True):
        held = np.array([factor.held_bytes.get(row, 0) // unit for row in factor.table], np.float64)
        if not factor.variables:
            spare -= float(held.sum())
        elif held.any():
            entries.append((np.full(len(places), equation), places, held))
    right.append(np.array([spare]))


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


def _valued(codes: Mapping[str, int], x: Reals) -> Callable[[str], float]:
    return lambda state: float(x[codes[state]])
