"""Linear programming bound: costs moved between tables by the dual of the linear relaxation, window by window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import checkpoint
from autotuner.solve.arc_consistency import Consistent, Domain
from autotuner.solve.tables import Codes, Costs, CostTable, Integers, keys
from autotuner.solve.variable_splitting import alike, marks
from scripts.bench.solvers.path_decomposition import PathBlock

# A cost that rounding left of 0 is smaller than this.
ROUNDING = 1e-11
# The time of the dual simplex method grows faster than a program, so a window of blocks has so many states; half as
# many where the time would not do.
WINDOW_STATES = 10_000
# In the last blocks of a window, this share of them, no costs are moved: they say what comes after the others.
AHEAD = 1 / 3
# Where time is limited, a window may take this share of what is left.
WINDOW_TIME = 0.5


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """Minimise `costs @ x` where `A @ x = right` and x is 0 or more.

    One x for each state of each variable, then one for each row of each table of kinds. The states of a variable add up
    to 1. In a table, the rows of a kind of states add up to those states. A has `A[equations[i], places[i]] =
    values[i]`.

    Args:
        linked: of each table.
    """

    costs: Costs
    equations: Integers
    places: Integers
    values: NDArray[np.float64]
    right: NDArray[np.float64]
    linked: tuple["LinkedTable", ...]


@dataclass(frozen=True, eq=False, slots=True)
class LinkedTable:
    """A table's part in a linear program.

    Args:
        place: of the table.
        kinds: per variable of the table, the kind of each of its states; -1 for those that have no row.
        equations: per variable, that of its first kind.
    """

    place: int
    kinds: tuple[Codes, ...]
    equations: tuple[int, ...]


def linear_program(
    tables: Mapping[int, CostTable],
    domains: Mapping[int, Domain],
    states_us: Mapping[int, Costs],
    state_counts: Sequence[int],
) -> LinearProgram:
    """Return the linear relaxation of a problem: the local polytope, of kinds of states in place of states.

    Args:
        tables: over two variables or more each, by place.
        domains: of each variable, whether a state is possible: where it is, some row of each of its tables has it.
        states_us: of each variable, costs of its states.

    Source:
        Wainwright and Jordan, Graphical models, exponential families, and variational inference (2008), section 4.
    """
    *starts, count = accumulate((state_counts[v] for v in domains), initial=0)
    first = dict(zip(domains, starts, strict=True))
    entries: list[tuple[Integers, Integers, float]] = []
    costs, linked = [states_us[v] for v in domains], list[LinkedTable]()
    for equation, (v, domain) in enumerate(domains.items()):
        states = np.flatnonzero(domain)
        entries.append((np.full(len(states), equation, np.int64), first[v] + states, 1.0))
    equation, column = len(domains), count
    for place, table in tables.items():
        checkpoint()
        found = kinds(table, state_counts)
        kinds_of_rows = np.stack([of[states] for of, states in zip(found, table.columns, strict=True)])
        counts = [int(of.max()) + 1 for of in found]
        key, _ = keys(kinds_of_rows, counts, table.rows)
        _, chosen = np.unique(key, return_index=True)
        rows = column + np.arange(len(chosen))
        first_equations = []
        for v, of, states_of, kind_count in zip(table.variables, found, kinds_of_rows, counts, strict=True):
            states = np.flatnonzero(of >= 0)
            entries.append((equation + of[states].astype(np.int64), first[v] + states, 1.0))
            entries.append((equation + states_of[chosen].astype(np.int64), rows, -1.0))
            first_equations.append(equation)
            equation += kind_count
        costs.append(table.costs[chosen])
        linked.append(LinkedTable(place, tuple(found), tuple(first_equations)))
        column += len(chosen)
    right = np.zeros(equation)
    right[: len(domains)] = 1.0
    return LinearProgram(
        np.concatenate(costs),
        np.concatenate([equations for equations, _, _ in entries]).astype(np.int64),
        np.concatenate([places for _, places, _ in entries]).astype(np.int64),
        np.concatenate([np.full(len(places), value) for _, places, value in entries]),
        right,
        tuple(linked),
    )


def kinds(table: CostTable, state_counts: Sequence[int]) -> list[Codes]:
    """Return, per variable of a table, the kind of each of its states, -1 for those without a row.

    Of a table of two variables, states with the same rows at the same costs are most likely of one kind, and others
    never are but for a chance of 1 in 2**64; of other tables, each state is a kind of its own.
    """
    if len(table.variables) == 2:
        return [
            alike(side, table.columns[side], marks(table.columns[1 - side], table.costs), state_counts[v]).of
            for side, v in enumerate(table.variables)
        ]
    found = []
    for v, column in zip(table.variables, table.columns, strict=True):
        of = np.full(state_counts[v], -1, np.int32)
        states = np.unique(column)
        of[states] = np.arange(len(states))
        found.append(of)
    return found


def optimal_prices(program: LinearProgram, time_limit_s: float = inf) -> NDArray[np.float64] | None:
    """Return what one more of each equation's right side would cost; None where that was not found in time."""
    from scipy.optimize import linprog  # type: ignore[import-untyped]
    from scipy.sparse import coo_array  # type: ignore[import-untyped]

    shape = (len(program.right), len(program.costs))
    matrix = coo_array((program.values, (program.equations, program.places)), shape=shape).tocsc()
    options = {} if time_limit_s == inf else {"time_limit": max(0.0, time_limit_s)}
    found = linprog(program.costs, A_eq=matrix, b_eq=program.right, method="highs-ds", options=options)
    return None if found.status else np.asarray(found.eqlin.marginals)


@dataclass(eq=False)
class MovedCosts:
    """A problem whose costs are moved by prices, whatever these are: rounding apart, no total changes.

    Attributes:
        tables: those over several variables, by their places in `left`; of the ones that were moved, the least cost
            is 0.
        states_us: costs of each variable's states.
        constant: what every assignment costs beside.
    """

    left: Consistent
    state_counts: Sequence[int]
    tables: dict[int, CostTable] = field(default_factory=dict)
    states_us: dict[int, Costs] = field(default_factory=dict)
    constant: float = 0.0

    def __post_init__(self) -> None:
        self.states_us = {v: np.zeros(self.state_counts[v]) for v in self.left.domains}
        for place, table in self.left.tables.items():
            if len(table.variables) > 1:
                self.tables[place] = table
            elif table.variables:
                np.add.at(self.states_us[table.variables[0]], table.columns[0], table.costs)
            else:
                self.constant += float(table.costs.sum())

    def program(self, places: Sequence[int]) -> LinearProgram:
        """Return the linear relaxation of some tables, and of the costs of their variables' states."""
        tables = {place: self.tables[place] for place in places}
        variables = dict.fromkeys(v for table in tables.values() for v in table.variables)
        domains = {v: self.left.domains[v] for v in variables}
        return linear_program(tables, domains, self.states_us, self.state_counts)

    def move(self, linked: LinkedTable, prices: NDArray[np.float64]) -> None:
        """Move costs of states into one table."""
        table = self.tables[linked.place]
        costs = table.costs.copy()
        for v, of, equation, column in zip(table.variables, linked.kinds, linked.equations, table.columns, strict=True):
            states = np.flatnonzero(of >= 0)
            price = prices[equation : equation + int(of.max()) + 1]
            self.states_us[v][states] -= price[of[states]]
            costs += price[of[column]]
        least = float(costs.min())
        self.constant += least
        costs -= least
        costs[costs < ROUNDING] = 0.0
        self.tables[linked.place] = table.costing(costs)

    def result(self) -> Consistent:
        """Return the problem as it is now: each variable has a table of its own, all with the same least cost."""
        own = {v: self.states_us[v][domain] for v, domain in self.left.domains.items()}
        constant = self.constant + sum(float(costs.min()) for costs in own.values())
        tables = dict(self.tables)
        for place, (v, costs) in enumerate(own.items(), start=max(self.left.tables, default=-1) + 1):
            columns = np.flatnonzero(self.left.domains[v])[None].astype(np.int32)
            tables[place] = CostTable(self.left.names[v], (v,), columns, costs - costs.min() + constant / len(own))
        readers: dict[int, list[int]] = {}
        for place, table in tables.items():
            for v in table.variables:
                readers.setdefault(v, []).append(place)
        return Consistent(self.left.names, tables, self.left.domains, readers)


def lifted(
    left: Consistent, state_counts: Sequence[int], blocks: Sequence[PathBlock], ends_at: float | None = None
) -> Consistent:
    """Return the same problem with costs moved so that the sum of each table's cheapest row is about as high as can be.

    A window of blocks is relaxed at once, and costs are moved in the first of them. What these share with later ones
    then has costs of states that say what is before, for the next window.

    Args:
        left: arc consistent, with a variable.
        blocks: of its tables, from one end to the other.
        ends_at: when to stop, on the monotonic clock; what was moved by then is kept.

    Cost:
        For each window, that of a linear program of a column per state and per row of a table of kinds; the dual
        simplex method.
    """
    moved = MovedCosts(left, state_counts)
    reached = list(accumulate((sum(state_counts[v] for v in block.variables) for block in blocks), initial=0))
    first, states = 0, WINDOW_STATES
    while first < len(blocks):
        last, end = window(reached, first, states)
        began = monotonic()
        seconds = inf if ends_at is None else ends_at - began
        places = [place for block in blocks[first:end] for place in block.tables if place in moved.tables]
        if not places:
            first = last
            continue
        program = moved.program(places)
        prices = optimal_prices(program, WINDOW_TIME * seconds) if seconds > 0 else None
        if prices is not None:
            now = {place for block in blocks[first:last] for place in block.tables}
            for linked in program.linked:
                if linked.place in now:
                    moved.move(linked, prices)
        elif last == first + 1:
            break
        per_block = (monotonic() - began) / (last - first)
        first = first if prices is None else last
        if prices is None or per_block * (len(blocks) - first) > seconds:
            states //= 2
    return moved.result()


def window(reached: Sequence[int], first: int, states: int) -> tuple[int, int]:
    """Return where a window of blocks from `first` on ends: its part in which costs are moved, and the whole.

    Args:
        reached: how many states the blocks before each one have.
    """
    count = len(reached) - 1
    end = next((place for place in range(first + 1, count) if reached[place] - reached[first] >= states), count)
    return (end if end == count else max(first + 1, end - round(AHEAD * (end - first)))), end
