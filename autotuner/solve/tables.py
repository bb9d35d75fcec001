"""Sparse tables of costs on arrays: a row is one small integer per variable; a row that is not there is forbidden."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import checkpoint
from autotuner.errors import ProblemError
from autotuner.solve.limits import SolverLimits, TooLargeError
from autotuner.solve.problem import Factor, Problem

Integers = NDArray[np.int64]
Codes = NDArray[np.int32]
Costs = NDArray[np.float64]

# Keys up to this index an array as they are; above it, and above a few per row, they are renumbered without holes.
DENSE_KEYS = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class CostTable:
    """Distinct rows of states and their costs.

    Args:
        name: of the factors that it came from, for messages.
        variables: numbers, in the order of `columns`.
        columns: one row of the array per variable, one column per row of the table.
        costs: one per row of the table.
    """

    name: str
    variables: tuple[int, ...]
    columns: Codes
    costs: Costs

    @property
    def rows(self) -> int:
        return len(self.costs)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self.columns.nbytes + self.costs.nbytes

    def column(self, variable: int) -> Codes:
        """Return the variable's state in each row."""
        column: Codes = self.columns[self.variables.index(variable)]
        return column

    def cheapest(self, variable: int, state_count: int) -> Costs:
        """Return the cheapest row of each of the variable's states, inf where there is none."""
        best = np.full(state_count, np.inf)
        np.minimum.at(best, self.column(variable), self.costs)
        return best

    def take(self, rows: NDArray[np.bool_]) -> "CostTable":
        """Return the table of the rows where the mask is true."""
        return CostTable(self.name, self.variables, self.columns[:, rows], self.costs[rows])

    def without(self, variables: Container[int]) -> "CostTable":
        """Return the table without the columns of these variables; the caller knows that rows stay distinct."""
        places = [place for place, variable in enumerate(self.variables) if variable not in variables]
        return CostTable(self.name, tuple(self.variables[place] for place in places), self.columns[places], self.costs)

    def costing(self, costs: Costs) -> "CostTable":
        """Return the table with the same rows at other costs."""
        return CostTable(self.name, self.variables, self.columns, costs)


@dataclass(frozen=True, eq=False)
class Network:
    """A problem with its variables numbered in order of their names, and their states as well.

    Tables are in order of their factors' names, columns in order of variables, rows in order of their numbers. So
    nothing depends on the order in which a problem or a factor's table was written down.
    """

    names: tuple[str, ...]
    states: tuple[tuple[str, ...], ...]
    tables: tuple[CostTable, ...]

    @property
    def state_counts(self) -> tuple[int, ...]:
        """The number of states of each variable."""
        return tuple(len(states) for states in self.states)

    def named(self, codes: Mapping[int, int]) -> dict[str, str]:
        """Return states by their names from states by their numbers."""
        return {name: self.states[v][codes[v]] for v, name in enumerate(self.names)}


def encode(problem: Problem) -> Network:
    """Return the problem on arrays.

    Cost:
        One look into a dictionary per state of each row: 40 ms for 110,000 rows of two states.
    """
    names = tuple(sorted(problem.variables))
    number = {name: v for v, name in enumerate(names)}
    # States are numbered as they turn up, and then anew in order of their names.
    met: list[dict[str, int]] = [_Met() for _ in names]
    factors = sorted(problem.factors, key=lambda factor: factor.name)
    raw = [_coded(factor, number, met) for factor in factors]
    states = tuple(tuple(sorted(each)) for each in met)
    renumber = [np.argsort(np.fromiter(map(each.__getitem__, ordered), np.int32, len(ordered))).astype(np.int32)
                for each, ordered in zip(met, states, strict=True)]  # fmt: skip
    tables = []
    for factor, (variables, array) in zip(factors, raw, strict=True):
        for row, variable in enumerate(variables):
            array[row] = renumber[variable][array[row]]
        tables.append(_sorted_table(factor, variables, array, [len(states[v]) for v in variables]))
    return Network(names, states, tuple(tables))


def _coded(
    factor: Factor, number: Mapping[str, int], states: Sequence[Mapping[str, int]]
) -> tuple[tuple[int, ...], Codes]:
    """Return a factor's variables by number, in order, and the states of its rows by number."""
    checkpoint()
    scope = sorted((number[name], place) for place, name in enumerate(factor.variables))
    array = np.empty((len(scope), len(factor.table)), np.int32)
    for row, (variable, place) in enumerate(scope):
        # Not with zip, which makes an iterator per row: so many at once keep the garbage collector busy.
        codes = map(states[variable].__getitem__, map(itemgetter(place), factor.table))
        array[row] = np.fromiter(codes, np.int32, len(factor.table))
    return tuple(variable for variable, _ in scope), array


def _sorted_table(factor: Factor, variables: tuple[int, ...], array: Codes, state_counts: Sequence[int]) -> CostTable:
    costs = np.fromiter(factor.table.values(), np.float64, len(factor.table))
    if variables:
        key, _ = keys(array, state_counts, len(costs))
        order = np.argsort(key)
        array, costs = array[:, order], costs[order]
    return CostTable(factor.name, variables, array, costs)


class Encoder:
    """Encodes problems with the variables and states of a first one, such as the same at other costs.

    A factor that is the very object of the first problem is not encoded again.

    Args:
        problem: the first one. It has every state that a later one may offer.
    """

    def __init__(self, problem: Problem) -> None:
        self._network = encode(problem)
        self._number = {name: v for v, name in enumerate(self._network.names)}
        self._codes = [{state: code for code, state in enumerate(states)} for states in self._network.states]
        factors = sorted(problem.factors, key=lambda factor: factor.name)
        self._known = {f.name: (f, table) for f, table in zip(factors, self._network.tables, strict=True)}

    def encode(self, problem: Problem) -> Network:
        """Return a problem on arrays; states that it does not offer keep their numbers.

        Raises:
            ProblemError: it has other variables than the first one, or further states.
        """
        if set(problem.variables) != self._number.keys():
            other = sorted(self._number.keys() ^ set(problem.variables))
            raise ProblemError(f"the problem and the one encoded first differ in variables: {other[:8]}")
        ordered = sorted(problem.factors, key=lambda factor: factor.name)
        return replace(self._network, tables=tuple(self._table(factor) for factor in ordered))

    def _table(self, factor: Factor) -> CostTable:
        known, table = self._known.get(factor.name, (None, None))
        if table is not None and known is factor:
            return table
        try:
            variables, array = _coded(factor, self._number, self._codes)
        except KeyError as error:
            raise ProblemError(f"factor {factor.name!r}: the problem encoded first lacks the state {error}") from error
        return _sorted_table(factor, variables, array, [len(self._network.states[v]) for v in variables])


class _Met(dict[str, int]):
    """Numbers given to keys as they are first asked for."""

    def __missing__(self, key: str) -> int:
        self[key] = number = len(self)
        return number


def keys(columns: Iterable[Codes], state_counts: Iterable[int], rows: int) -> tuple[Integers, int]:
    """Return one number per row, equal where the rows are, ordered as the rows are, and the count of numbers.

    Mixed radix while the numbers stay dense enough to index arrays with; renumbered by sorting where they do not.
    """
    checkpoint()  # whatever joins, minimises or compares tables comes by here
    key, span = np.zeros(rows, np.int64), 1
    for column, state_count in zip(columns, state_counts, strict=True):
        if span * state_count >= 1 << 62:
            key, span = renumbered(key)
        key, span = key * state_count + column, span * state_count
    return renumbered(key) if span > max(DENSE_KEYS, 8 * rows) else (key, span)


def renumbered(key: Integers) -> tuple[Integers, int]:
    """Return the keys as places in the sorted list of distinct ones, and the length of that list."""
    distinct, places = np.unique(key, return_inverse=True)
    return places.astype(np.int64), max(1, len(distinct))


def hashes(key: Integers, salt: int) -> NDArray[np.uint64]:
    """Return a well mixed number for each key; sums of them tell sets of keys apart, but for a chance of 1 in 2**64.

    Source:
        Steele et al., Fast splittable pseudorandom number generators (2014): the finaliser of SplitMix64.
    """
    mixed = (key.astype(np.uint64) + np.uint64(salt << 40 | 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def join(
    left: CostTable, right: CostTable, state_counts: Sequence[int], limits: SolverLimits, most_rows: float = inf
) -> CostTable:
    """Return the table over both tables' variables: every pair of rows that agree, costs added.

    Raises:
        TooLargeError: the result would have more than `most_rows` rows, or need more memory than there may be; its rows
            are counted before they are made.

    Cost:
        O(rows of left + right + result), a sort of right's keys besides.
    """
    if len(left.variables) < len(right.variables):
        left, right = right, left
    shared = [v for v in left.variables if v in right.variables]
    added = [v for v in right.variables if v not in left.variables]
    variables = left.variables + tuple(added)
    both = [np.concatenate((left.column(v), right.column(v))) for v in shared]
    key, span = keys(both, [state_counts[v] for v in shared], left.rows + right.rows)
    left_key, right_key = key[: left.rows], key[left.rows :]
    counts = np.bincount(right_key, minlength=span)
    partners = counts[left_key]
    rows = int(partners.sum())
    if rows > most_rows:
        raise TooLargeError(f"joining {left.name!r} with {right.name!r} makes {rows:,} rows, above {most_rows:,.0f}")
    limits.admit(rows, [state_counts[v] for v in variables], lambda: f"joining {left.name!r} with {right.name!r}")
    if not added:
        # Rows of the right table are distinct, so there is one to each row of the left, or none.
        agreeing = left if rows == left.rows else left.take(partners > 0)
        costs = np.empty(span)
        costs[right_key] = right.costs
        return agreeing.costing(agreeing.costs + costs[left_key[partners > 0] if rows < left.rows else left_key])

    order = np.argsort(right_key, kind="stable")
    first = (np.cumsum(counts) - counts)[left_key]
    left_rows = np.repeat(np.arange(left.rows), partners)
    within = np.arange(rows) - np.repeat(np.cumsum(partners) - partners, partners)
    right_rows = order[np.repeat(first, partners) + within]
    columns = np.empty((len(variables), rows), np.int32)
    for place in range(len(left.variables)):
        columns[place] = left.columns[place][left_rows]
    for place, variable in enumerate(added, start=len(left.variables)):
        columns[place] = right.column(variable)[right_rows]
    return CostTable(left.name, variables, columns, left.costs[left_rows] + right.costs[right_rows])


def minimised(table: CostTable, variable: int, state_counts: Sequence[int]) -> tuple[CostTable, Codes]:
    """Return the cheapest cost over the variable's states for each row of the others, and the state that has it.

    Of equally cheap states the first is taken. Rows of the result are sorted.
    """
    rest = table.without((variable,))
    key, span = keys(rest.columns, [state_counts[v] for v in rest.variables], table.rows)
    best = np.full(span, np.inf)
    np.minimum.at(best, key, table.costs)
    ties = np.flatnonzero(table.costs == best[key])
    states = table.column(variable)
    first = np.full(span, np.iinfo(np.int32).max, np.int32)
    np.minimum.at(first, key[ties], states[ties])
    winners = ties[states[ties] == first[key[ties]]]
    winners = winners[np.argsort(key[winners], kind="stable")]
    return CostTable(table.name, rest.variables, rest.columns[:, winners], table.costs[winners]), states[winners]


def product(state_counts: Iterable[int]) -> float:
    """Return the product as a float, so that astronomic ones can be compared."""
    return float(prod(map(float, state_counts)))
