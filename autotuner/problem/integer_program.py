"""A problem as a mixed integer program, on arrays: what benchmarks give to solvers of such programs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotuner.problem.factors import Problem

Integers = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class IntegerProgram:
    """Minimise `costs @ x + constant` where `A @ x = right`, `0 <= x <= upper`, the first `state_count` of x whole.

    One x for each state of each variable, then one for each row of each factor over several variables. The states of a
    variable add up to 1; of a factor, the rows that hold a state add up to that state's x. So rows are whole where
    states are. A is given by its entries: `A[equations[i], places[i]] = values[i]`.

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


def integer_program(problem: Problem) -> IntegerProgram:
    """Return a problem as a program whose relaxation is the tightest that its factors one by one give.

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
    entries = [(np.full(len(places), number), places, 1.0) for number, places in enumerate(known.values())]
    right = [np.ones(len(states))]
    equation = len(states)
    for factor, columns in zip(problem.factors, columns_of, strict=True):
        prices = np.fromiter(factor.table.values(), np.float64, len(factor.table))
        if not factor.variables:
            constant += float(prices.sum())
        elif len(factor.variables) == 1:
            (name,) = factor.variables
            places = _integers(states[name][row[0]] for row in factor.table)
            costs[0][places] += prices
            upper[np.setdiff1d(known[name], places)] = 0.0
        else:
            rows = np.arange(count, count + len(prices))
            for name, column in zip(factor.variables, columns or [()] * len(factor.variables), strict=True):
                rank = {state: equation + place for place, state in enumerate(states[name])}
                entries.append((_integers(rank[state] for state in column), rows, 1.0))
                entries.append((np.arange(equation, equation + len(rank)), known[name], -1.0))
                right.append(np.zeros(len(rank)))
                equation += len(rank)
            costs.append(prices)
            count += len(prices)
    return IntegerProgram(
        states,
        constant,
        np.concatenate(costs),
        np.concatenate((upper, np.ones(count - len(upper)))),
        np.concatenate([entry[0] for entry in entries]),
        np.concatenate([entry[1] for entry in entries]),
        np.concatenate([np.full(len(entry[1]), entry[2]) for entry in entries]),
        np.concatenate(right),
    )


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


def _valued(codes: Mapping[str, int], x: Reals) -> Callable[[str], float]:
    return lambda state: float(x[codes[state]])
