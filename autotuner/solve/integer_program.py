"""Compact integer program: one 0/1 column for states that stand or fall together, rows by kinds of states; HiGHS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import checkpoint, heeding
from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent
from autotuner.solve.tables import Codes, Costs, CostTable, Integers, keys
from autotuner.solve.variable_splitting import kinds

# HiGHS's bounds are no more exact than this share of them.
TOLERANCE = 1e-6
# With so many states per variable at most, as where tensors have four forms, HiGHS is quicker than messages.
FEW_STATES = 20.0
# HiGHS needs so many bytes for each entry of a program.
BYTES = 600.0


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
        self.column_of = _shared_columns(left, self.first)
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

    def rows(self, count: int, lowest: float, highest: float = 0.0) -> int:
        """Return the first of so many new rows."""
        self.lowest.append(np.full(count, lowest))
        self.highest.append(np.full(count, highest))
        self.row_count += count
        return self.row_count - count

    def add(self, rows: NDArray[np.integer], columns: Integers, value: float | Costs) -> None:
        self.entries.append((rows.astype(np.int64), columns, value))

    def table(self, table: CostTable, held: Costs | None) -> None:
        """Write what a table allows, and at which cost.

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
        elif len(table.variables) == 2 and held is None and table.costs.min() == table.costs.max():
            self.constant += float(table.costs[0])
            self._relation(table)
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

    def _relation(self, table: CostTable) -> None:
        """Write which states go together: one of a kind needs one of those that this kind goes with.

        Kinds of that variable are taken which has fewer. Where no two kinds share a partner, both sides are equal.
        """
        both = kinds(table, self.counts)
        side = 0 if both[0].max() <= both[1].max() else 1
        v, other = table.variables[side], table.variables[1 - side]
        of, own, partners = both[side], table.columns[side], table.columns[1 - side]
        if np.array_equal(self.states(v, own), self.states(other, partners)):
            return
        states = np.flatnonzero(of >= 0)
        if not _is_exact(table, of, side, self.counts[other]):
            self._joint(table)
            return
        _, place = np.unique(of[states], return_index=True)
        is_first = np.zeros(len(of), np.bool_)
        is_first[states[place]] = True
        chosen = is_first[own]
        partner_kinds, partners = of[own[chosen]], partners[chosen]
        apart = np.bincount(partners).max() <= 1
        row = self.rows(len(place), 0.0 if apart else -inf)
        self.add(row + of[states], self.states(v, states), 1.0)
        self.add(row + partner_kinds, self.states(other, partners), -1.0)

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
    for place, table in left.tables.items():
        checkpoint()
        writer.table(table, None if budget is None else budget.held(place))
    if budget is not None:
        writer.budget(budget.most_bytes // budget.unit_bytes)
    return writer.program(tuple(left.domains))


def _shared_columns(left: Consistent, first: Integers) -> Integers:
    """Return a column for each state that is left, the same one for states that tables allow only together."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

    ones, others = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table in left.tables.values():
        if len(table.variables) == 2:
            alone = [np.bincount(column)[column] == 1 for column in table.columns]
            together = alone[0] & alone[1]
            ones.append(first[table.variables[0]] + table.columns[0][together])
            others.append(first[table.variables[1]] + table.columns[1][together])
    one, other = np.concatenate(ones), np.concatenate(others)
    count = int(first[-1])
    _, group = connected_components(coo_array((np.ones(len(one)), (one, other)), shape=(count, count)), directed=False)
    columns = np.full(count, -1, np.int64)
    here = np.zeros(count, np.bool_)
    for v, domain in left.domains.items():
        here[first[v] : first[v + 1]] = domain
    _, columns[here] = np.unique(group[here], return_inverse=True)
    return columns


def _is_exact(table: CostTable, of: Codes, side: int, other_count: int) -> bool:
    """Say whether the states of each kind have the very same rows; sums of hashes only make it likely."""
    own = of[table.columns[side]]
    key, span = keys((own, table.columns[1 - side]), (int(of.max()) + 1, other_count), table.rows)
    return bool((np.bincount(key, minlength=span)[key] == np.bincount(of[of >= 0])[own]).all())


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


def solved(program: IntegerProgram, time_limit_s: float = inf, gap: float = 0.0) -> ProgramPlan:
    """Solve a program with HiGHS.

    Args:
        gap: the share by which the plan may lie above the bound.

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
            bounds=Bounds(0.0, 1.0),
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
