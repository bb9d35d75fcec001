"""Lagrangian relaxation of a budget: a price for held bytes, and the bounds that it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd, inf

import numpy as np
from numpy.typing import NDArray

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent, Domain, arc_consistent, bound_us, consistent
from autotuner.solve.bucket_elimination import ArgminTable
from autotuner.solve.dominance import merged
from autotuner.solve.labels import Labels
from autotuner.solve.problem import Factor, Problem
from autotuner.solve.reduced_costs import SWEEPS, near_order, tightened
from autotuner.solve.tables import Costs, CostTable, Network, encode
from autotuner.solve.variable_splitting import split

# Costs are moved between tables once more where it lifted the bound by more than this share of what is spare, but no
# more often than this.
TIGHTER = 0.1
ROUNDS = 3


@dataclass(frozen=True, eq=False)
class LagrangianRelaxation:
    """Labels whose sums are the assignments, arc consistent.

    Args:
        names: of the variables, by number, for messages.
        state_counts: of all variables by number.
        tables: by place; their costs are times and prices together, moved between tables in any way.
        price: that the costs are made with, in microseconds per held byte.
    """

    names: Sequence[str]
    state_counts: tuple[int, ...]
    tables: Mapping[int, Labels]
    price: float = 0.0

    @property
    def rows(self) -> int:
        return sum(labels.rows for labels in self.tables.values())

    @cached_property
    def left(self) -> Consistent:
        """The tables at their costs, as other solvers see them; the same states may occur several times."""
        return consistent(self.names, {p: labels.table for p, labels in self.tables.items()}, self.state_counts)

    @cached_property
    def unit_bytes(self) -> int:
        """The largest count that divides all counts of held bytes."""
        return gcd(*(int(np.gcd.reduce(labels.held_bytes)) for labels in self.tables.values())) or 1

    @cached_property
    def lean_price(self) -> float:
        """The price at which one unit of held bytes costs more than any assignment takes."""
        return (sum(float(labels.time_us.max()) for labels in self.tables.values()) + 1) / self.unit_bytes

    def bound_us(self) -> float:
        """Return the sum of each table's cheapest row: no assignment has less time and price together."""
        return bound_us(labels.table for labels in self.tables.values())

    def at(self, price: float) -> "LagrangianRelaxation":
        """Return the same with another price for a held byte."""
        if price == self.price:
            return self
        more = price - self.price
        tables = {p: t.costing(t.table.costs + more * t.held_bytes) for p, t in self.tables.items()}
        return replace(self, tables=tables, price=price)

    def narrowed(self, variable: int, domain: Domain) -> "LagrangianRelaxation":
        """Return what is left when a variable keeps only these of its states.

        Raises:
            InfeasibleError: nothing is left of some table.
        """
        return self.taking(
            {p: domain[t.table.column(variable)] for p, t in self.tables.items() if variable in t.table.variables}
        )

    def taking(self, kept: Mapping[int, NDArray[np.bool_]]) -> "LagrangianRelaxation":
        """Return what is left with these rows only of some of the tables.

        Raises:
            InfeasibleError: nothing is left of some table.
        """
        return self if all(each.all() for each in kept.values()) else self.consistent(kept)

    def consistent(self, kept: Mapping[int, NDArray[np.bool_]]) -> "LagrangianRelaxation":
        """Return what arc consistency leaves of these rows of some of the tables, and all of the others.

        Raises:
            InfeasibleError: nothing is left of some table.
        """
        numbered = {}
        for place, labels in self.tables.items():
            table = labels.table.costing(np.arange(labels.rows, dtype=np.float64))
            numbered[place] = table.take(kept[place]) if place in kept else table
        left = consistent(self.names, numbered, self.state_counts)
        tables = {
            place: labels.take(left.tables[place].costs.astype(np.intp))
            if left.tables[place].rows < labels.rows
            else labels
            for place, labels in self.tables.items()
        }
        return LagrangianRelaxation(self.names, self.state_counts, tables, self.price)

    def tightened(self) -> "LagrangianRelaxation":
        """Return the same with costs moved between tables so that the bound is tighter."""
        left = tightened(self.left, near_order(self.left), SWEEPS)
        tables = {place: labels.costing(left.tables[place].costs) for place, labels in self.tables.items()}
        return LagrangianRelaxation(self.names, self.state_counts, tables, self.price)

    def shrunk(self, price: float, most_us: float) -> "LagrangianRelaxation":
        """Return what is left within `most_us` at a price, with a bound as tight as moving costs makes it.

        Raises:
            InfeasibleError: nothing is left.
        """
        given, bound = self.at(price), -inf
        for _ in range(ROUNDS):
            given = given.tightened()
            bound, before = given.bound_us(), bound
            if bound - before <= TIGHTER * max(0.0, most_us - bound):
                break
        return given.within(most_us)

    def within(self, most_us: float) -> "LagrangianRelaxation":
        """Return what is left without rows that no assignment of at most so much time and price can have.

        Raises:
            InfeasibleError: nothing is left.
        """
        return self.taking(self._affordable(most_us))

    def fitting(self, budget_bytes: int) -> "LagrangianRelaxation":
        """Return what is left without rows that no assignment within the budget can have, by bounds on held bytes.

        Raises:
            InfeasibleError: nothing is left.
        """
        tight = self._holding()
        # Counts are whole, so what lies above by rounding is none.
        return self.taking(tight._affordable(budget_bytes + 0.5))

    def least_held(self) -> int:
        """Return a count of bytes that every assignment holds at least."""
        units = self._holding().bound_us() / self.unit_bytes
        return ceil(units - 1e-6) * self.unit_bytes

    def _holding(self) -> "LagrangianRelaxation":
        """Return the labels at the bytes that they hold as costs, with a tight bound."""
        held = {place: labels.costing(labels.held_bytes.astype(np.float64)) for place, labels in self.tables.items()}
        return LagrangianRelaxation(self.names, self.state_counts, held, 1.0).tightened().tightened()

    def _affordable(self, most_us: float) -> dict[int, NDArray[np.bool_]]:
        spare = most_us - self.bound_us()
        if spare < 0:
            raise InfeasibleError(f"no assignment costs {most_us} us or less: the bound is {-spare} us above it")
        return {p: labels.table.costs - labels.table.costs.min() <= spare for p, labels in self.tables.items()}


@dataclass(frozen=True, eq=False)
class BudgetNetwork:
    """A problem on arrays.

    Args:
        network: of the problem, with its times.
        start: its tables as labels, variables that are forced to be equal merged and wide pairs split.
        argmins: how to read the variables that are gone.
    """

    network: Network
    start: LagrangianRelaxation
    argmins: tuple[ArgminTable, ...]

    def states(self, codes: Mapping[int, int]) -> dict[str, str]:
        """Return the states of all variables by their names, from those of the variables that labels tell."""
        codes = dict(codes)
        for argmin in reversed(self.argmins):
            codes[argmin.variable] = argmin.state(codes)
        return self.network.named(codes)


def encoded(problem: Problem) -> BudgetNetwork:
    """Return the problem on arrays.

    No state goes because another one replaces it, as `exact` has it: that looks at one weight only.

    Raises:
        InfeasibleError: nothing is left of some table; the message names factors that contradict each other.
    """
    network = encode(problem)
    code = [{state: number for number, state in enumerate(states)} for states in network.states]
    place = {name: v for v, name in enumerate(network.names)}
    factors = sorted(problem.factors, key=lambda factor: factor.name)
    weights = [_weights(factor, table, code, place) for factor, table in zip(factors, network.tables, strict=True)]
    # Splitting and merging see numbers of weights as costs, so that rows are alike only if all of their weights are.
    distinct, numbers = _numbered(np.concatenate([np.zeros((2, 1)), *weights], axis=1))
    ends = np.cumsum([1, *(table.rows for table in network.tables)])
    tables = tuple(
        table.costing(numbers[start : start + table.rows])
        for table, start in zip(network.tables, ends[:-1], strict=True)
    )
    parts = split(arc_consistent(replace(network, tables=tables)), network.state_counts)
    left, argmins = merged(parts.left, parts.state_counts)
    labels = {}
    for number, table in left.tables.items():
        time_us, held = distinct[:, table.costs.astype(np.intp)]
        labels[number] = Labels(table.costing(time_us), time_us, held.astype(np.int64))
    return BudgetNetwork(network, LagrangianRelaxation(left.names, parts.state_counts, labels), tuple(argmins))


def _numbered(weights: Costs) -> tuple[Costs, Costs]:
    """Return the different columns in order, and the number of each column; number 0 is that of the least, all zero."""
    order = np.lexsort(weights[::-1]) if weights[1:].any() else np.argsort(weights[0], kind="stable")
    ranked = weights[:, order]
    is_new = np.concatenate(([True], (ranked[:, 1:] != ranked[:, :-1]).any(axis=0)))
    numbers = np.empty(len(order))
    numbers[order] = np.cumsum(is_new) - 1
    return ranked[:, is_new], numbers


def _weights(factor: Factor, table: CostTable, code: Sequence[dict[str, int]], place: Mapping[str, int]) -> Costs:
    """Return the times and held bytes of the factor's rows, in the order of the table's."""
    weights = np.zeros((2, table.rows))
    weights[0] = table.costs
    if not factor.held_bytes:
        return weights
    variables = [place[name] for name in factor.variables]
    columns = [table.column(v).tolist() for v in variables]
    row_of = {row: number for number, row in enumerate(zip(*columns, strict=True))}
    for row, count in factor.held_bytes.items():
        codes = tuple(code[v][state] for v, state in zip(variables, row, strict=True))
        weights[1, row_of[codes] if variables else 0] = count
    return weights
