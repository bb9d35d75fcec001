"""Compact integer program: one 0/1 column for states that stand or fall together, rows by kinds of states; HiGHS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import heeding
from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent
from autotuner.solve.pairs import Pairs, pairs
from autotuner.solve.tables import Costs, CostTable, Integers

# Two encoder layers have about so many variables; up to these, elimination is quicker.
LONG = 400
# HiGHS's bounds are no more exact than this share of them.
TOLERANCE = 1e-6
# With so many states per variable at most, HiGHS is quicker than elimination: a block of Flux has 18 to 20.
FEW_STATES = 24.0
# HiGHS needs so many bytes for each entry of a program.
BYTES = 600.0
# Writing a program needs so many bytes for each row of a table.
WRITTEN_BYTES = 100.0


@dataclass(frozen=True, eq=False)
class IntegerProgram:
    """Minimise `costs @ x + constant` where `lowest <= A @ x <= highest`; each x is 0 or 1.

    One x for each state of each variable; states of two variables that always come together share one. The first rows
    say that a variable has one state; the last one, if there is a budget, what is held. A has `A[rows[i], places[i]] =
    values[i]`.

    Args:
        variables: in order of the first rows.
        column_of: place in x of each state, -1 for those that are ruled out; states of all variables in order.
        first: place in `column_of` of each variable's first state.
    """

    costs: Costs
    constant: float
    rows: Integers
    places: Integers
    values: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    variables: tuple[int, ...]
    column_of: Integers
    first: Integers

    @property
    def needed_bytes(self) -> float:
        """Bytes of memory that HiGHS needs for it, about."""
        return BYTES * len(self.values)

    @cached_property
    def matrix(self) -> Any:
        """A, as an array of scipy's in columns."""
        from scipy.sparse import coo_array  # type: ignore[import-untyped]

        shape = (len(self.lowest), len(self.costs))
        return coo_array((self.values, (self.rows, self.places)), shape=shape).tocsc()

    def codes(self, x: NDArray[np.float64]) -> dict[int, int]:
        """Return the state of each variable whose x is largest."""
        found = {}
        for v in self.variables:
            columns = self.column_of[self.first[v] : self.first[v + 1]]
            found[v] = int(np.argmax(np.where(columns >= 0, x[columns], -1.0)))
        return found


class _Writer:
    """Columns and rows of a program, as they are written."""

    def __init__(self, left: Consistent, state_counts: Sequence[int]) -> None:
        self.counts = state_counts
        self.first = np.concatenate(([0], np.cumsum(state_counts))).astype(np.int64)
        self.pair_tables = [table for table in left.tables.values() if len(table.variables) == 2]
        self.pairs = pairs(self.pair_tables, self.first)
        self.column_of = _shared_columns(left, self.first, self.pairs)
        self.count = int(self.column_of.max(initial=-1)) + 1
        self.costs = [np.zeros(self.count)]
        self.constant = 0.0
        nothing = np.zeros(0, np.int64)
        self.entries: list[tuple[Integers, Integers, float | Costs]] = [(nothing, nothing, 0.0)]
        self.lowest: list[NDArray[np.float64]] = [np.zeros(0)]
        self.highest: list[NDArray[np.float64]] = [np.zeros(0)]
        self.row_count = 0
        self.held = 0.0
        self.holding: list[tuple[Integers, Costs]] = []

    def states(self, variable: int, states: NDArray[np.integer]) -> Integers:
        """Return the columns of a variable's states."""
        columns: Integers = self.column_of[self.first[variable] + states]
        return columns

    def rows(self, count: int, lowest: float | Costs, highest: float = 0.0) -> int:
        """Return the first of so many new rows."""
        self.lowest.append(np.full(count, lowest))
        self.highest.append(np.full(count, highest))
        self.row_count += count
        return self.row_count - count

    def add(self, rows: NDArray[np.integer], columns: Integers, value: float | Costs) -> None:
        self.entries.append((rows.astype(np.int64), columns, value))

    def table(self, table: CostTable, held: Costs | None) -> None:
        """Write what a table costs, and what it allows if that is no relation.

        Args:
            held: what each row holds, where there is a budget and some row holds anything.
        """
        if not table.variables:
            self.constant += float(table.costs.sum())
            self.held += 0.0 if held is None else float(held.sum())
        elif len(table.variables) == 1:
            columns = self.states(table.variables[0], table.columns[0])
            np.add.at(self.costs[0], columns, table.costs)
            self._hold(columns, held)
        elif held is None and _is_relation(table):
            self.constant += float(table.costs[0])
        else:
            self._hold(self._joint(table), held)

    def _hold(self, columns: Integers, held: Costs | None) -> None:
        if held is not None:
            self.holding.append((columns, held))

    def budget(self, most: float) -> None:
        """Write that no more may be held."""
        row = self.rows(1, -inf, most - self.held)
        for columns, held in self.holding:
            self.add(np.full(len(columns), row), columns, held)

    def relations(self, is_relation: NDArray[np.bool_]) -> None:
        """Write which states go together: one of a kind needs one of those that this kind goes with.

        Kinds of that variable are taken which has fewer. Where no two kinds share a partner, both sides are equal.

        Args:
            is_relation: of each table of two variables, whether it costs the same whatever the states.
        """
        found, of = self.pairs.kinds(is_relation), self.pairs.of
        for number in np.flatnonzero(is_relation & ~found.is_exact):
            self._joint(self.pair_tables[number])
        second = found.counts[:, 0] > found.counts[:, 1]
        own = np.where(second[of], self.pairs.slots[1], self.pairs.slots[0])
        partners = self.pairs.slots.sum(axis=0) - own
        columns = self.column_of[self.pairs.states]
        differs = np.bincount(of, columns[own] != columns[partners], minlength=len(second)) > 0
        written = is_relation & found.is_exact & differs
        is_first = np.zeros(len(columns), np.bool_)
        is_first[found.first] = True
        chosen = written[of] & is_first[own]
        own, partners = own[chosen], partners[chosen]
        is_shared = np.zeros(len(second), np.bool_)
        is_shared[of[chosen][np.bincount(partners, minlength=len(columns))[partners] > 1]] = True
        count = np.where(written, found.counts[np.arange(len(second)), second.astype(np.int64)], 0)
        start = self.rows(int(count.sum()), np.repeat(np.where(is_shared, -inf, 0.0), count))
        # Kinds are numbered through all tables; rows through those of the sides that are written.
        kind_sides = self.pairs.sides[found.first]
        is_written = written[kind_sides // 2] & (kind_sides % 2 == second[kind_sides // 2])
        row_of = start + np.cumsum(is_written) - 1
        slots = np.flatnonzero(found.of >= 0)
        slots = slots[is_written[found.of[slots]]]
        self.add(row_of[found.of[slots]], columns[slots], 1.0)
        self.add(row_of[found.of[own]], columns[partners], -1.0)

    def _joint(self, table: CostTable) -> Integers:
        """Write a column for each row of the table: those with a state add up to that state; return the columns."""
        columns = self.count + np.arange(table.rows)
        self.count += table.rows
        self.costs.append(table.costs)
        for v, states in zip(table.variables, table.columns, strict=True):
            row = self.rows(self.counts[v], 0.0)
            present = np.unique(states)
            self.add(row + present, self.states(v, present), 1.0)
            self.add(row + states, columns, -1.0)
        return columns

    def program(self, variables: tuple[int, ...]) -> IntegerProgram:
        """Return what is written."""
        return IntegerProgram(
            np.concatenate(self.costs),
            self.constant,
            np.concatenate([rows for rows, _, _ in self.entries]),
            np.concatenate([columns for _, columns, _ in self.entries]),
            np.concatenate([np.broadcast_to(value, len(rows)) for rows, _, value in self.entries]),
            np.concatenate(self.lowest),
            np.concatenate(self.highest),
            variables,
            self.column_of,
            self.first,
        )


@dataclass(frozen=True)
class Budget:
    """Bytes that may be held, and what each row of each table holds, by the table's place."""

    most_bytes: int
    held_bytes: Mapping[int, Integers]

    @cached_property
    def unit_bytes(self) -> int:
        """The largest count that divides all counts of held bytes: small numbers are what HiGHS is exact with."""
        return gcd(*(int(np.gcd.reduce(held)) for held in self.held_bytes.values())) or 1

    def held(self, place: int) -> Costs | None:
        """Return the units that each row of a table holds; None where no row holds any."""
        held = self.held_bytes.get(place)
        return None if held is None or not held.any() else (held // self.unit_bytes).astype(np.float64)


def integer_program(left: Consistent, state_counts: Sequence[int], budget: Budget | None = None) -> IntegerProgram:
    """Return what is left as a compact integer program; its whole points are the assignments within the budget.

    Args:
        left: arc consistent.

    Cost:
        Linear in rows of tables; columns are as many as states.
    """
    writer = _Writer(left, state_counts)
    start = writer.rows(len(left.domains), 1.0, 1.0)
    for row, (v, domain) in enumerate(left.domains.items(), start=start):
        states = np.flatnonzero(domain)
        writer.add(np.full(len(states), row), writer.states(v, states), 1.0)
    is_relation = []
    for place, table in left.tables.items():
        held = None if budget is None else budget.held(place)
        writer.table(table, held)
        if len(table.variables) == 2:
            is_relation.append(held is None and _is_relation(table))
    writer.relations(np.array(is_relation, np.bool_))
    if budget is not None:
        writer.budget(budget.most_bytes // budget.unit_bytes)
    return writer.program(tuple(left.domains))


def _is_relation(table: CostTable) -> bool:
    """Say whether a table of two variables costs the same whatever the states."""
    return len(table.variables) == 2 and bool(table.costs.min() == table.costs.max())


def _shared_columns(left: Consistent, first: Integers, tables: Pairs) -> Integers:
    """Return a column for each state that is left, the same one for states that tables allow only together."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

    is_alone = np.bincount(tables.slots.reshape(-1), minlength=len(tables.sides)) == 1
    together = tables.slots[:, is_alone[tables.slots].all(axis=0)]
    one, other = tables.states[together]
    count = int(first[-1])
    _, group = connected_components(coo_array((np.ones(len(one)), (one, other)), shape=(count, count)), directed=False)
    columns = np.full(count, -1, np.int64)
    here = np.zeros(count, np.bool_)
    for v, domain in left.domains.items():
        here[first[v] : first[v + 1]] = domain
    _, columns[here] = np.unique(group[here], return_inverse=True)
    return columns


def has_few_states(left: Consistent) -> bool:
    """Say whether variables have so few states on average that an integer program is the quickest way."""
    return sum(int(domain.sum()) for domain in left.domains.values()) <= FEW_STATES * len(left.domains)


@dataclass(frozen=True)
class ProgramPlan:
    """A plan of an integer program, None where none was found in time, and a bound that HiGHS's rounding cannot lift.

    `is_optimal` says that HiGHS proved the plan to cost the least, up to `TOLERANCE`.
    """

    codes: Mapping[int, int] | None
    bound_us: float
    is_optimal: bool


def solved(
    program: IntegerProgram,
    time_limit_s: float = inf,
    gap: float = 0.0,
    excluded: NDArray[np.bool_] | None = None,
) -> ProgramPlan:
    """Solve a program with HiGHS.

    Args:
        gap: the share by which the plan may lie above the bound.
        excluded: each x that must be 0; without it, all may be 1. The bound is one on assignments without those.

    Raises:
        InfeasibleError: there is no assignment.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]

    if not len(program.costs):
        return ProgramPlan({}, program.constant, is_optimal=True)
    # HiGHS measures a gap as a share of the total, and its bound is rounded down afterwards.
    options = {"mip_rel_gap": max(0.0, gap / (1 + gap) - 3 * TOLERANCE)}
    if time_limit_s < inf:
        options["time_limit"] = max(0.0, time_limit_s)
    found = heeding(
        lambda: milp(
            program.costs,
            integrality=np.ones(len(program.costs)),
            bounds=Bounds(0.0, 1.0 if excluded is None else np.where(excluded, 0.0, 1.0)),
            constraints=LinearConstraint(program.matrix, program.lowest, program.highest),
            options=options,
        )
    )
    if found.status == 2:
        raise InfeasibleError("no assignment satisfies every factor")
    codes = None if found.x is None else program.codes(found.x)
    dual_us = found.mip_dual_bound
    bound_us = program.constant + (float(dual_us) if dual_us is not None and np.isfinite(dual_us) else -inf)
    bound_us -= TOLERANCE * (1 + abs(bound_us)) if bound_us > -inf else 0.0
    return ProgramPlan(codes, bound_us, found.status == 0)
