"""What is cheapest where a held byte has a price: one plan, and a bound for all of them."""

from dataclasses import dataclass
from math import inf

import numpy as np

from autotuner.solve.elimination import Elimination
from autotuner.solve.exact import cheapest, with_margin
from autotuner.solve.labelled import Encoded, Labelled
from autotuner.solve.limits import Limits
from autotuner.solve.problem import Problem
from autotuner.solve.tables import Table


@dataclass(frozen=True)
class Plan:
    """An assignment, its time and the bytes that it holds.

    Args:
        codes: states by number, of the variables of what was solved and of all that were eliminated before.
    """

    codes: dict[int, int]
    states: dict[str, str]
    time_us: float
    held_bytes: int


@dataclass(frozen=True)
class Priced:
    """The cheapest plan at a price, and a bound on time and price together."""

    plan: Plan
    bound_us: float


def plan_of(problem: Problem, encoded: Encoded, codes: dict[int, int]) -> Plan:
    """Return the plan with these states."""
    states = encoded.states(codes)
    return Plan(codes, states, problem.cost_us(states), problem.held_bytes(states))


def priced(problem: Problem, encoded: Encoded, given: Labelled, limits: Limits, reached_us: float = inf) -> Priced:
    """Return the plan with the least time and price together, found as by `exact`.

    Args:
        reached_us: time and price that some assignment is known to have.

    Raises:
        InfeasibleError: there is no assignment, or none that costs so little.
    """
    tables = []
    for labels in given.tables.values():
        rows, table = labels.cheapest(given.state_counts), labels.table
        tables.append((rows, Table(table.name, table.variables, table.columns[:, rows], table.costs[rows])))
    found = cheapest(
        Elimination(given.names, given.state_counts, [table for _, table in tables], limits), reached_us=reached_us
    )
    chosen = found.plan.codes()
    codes = dict(chosen)
    for labels, (rows, table) in zip(given.tables.values(), tables, strict=True):
        match = np.ones(table.rows, np.bool_)
        for variable, column in zip(table.variables, table.columns, strict=True):
            match &= column == chosen[variable]
        codes |= labels.codes(int(rows[np.argmax(match)]))
    bound = found.plan.constant if found.bound_us is None else found.bound_us
    return Priced(plan_of(problem, encoded, codes), with_margin(bound, -1))
