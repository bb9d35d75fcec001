"""Variable splitting: a variable between two others that see each other only roughly, with few kinds of states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import checkpoint
from autotuner.solve.arc_consistency import Consistent
from autotuner.solve.tables import Codes, Costs, CostTable, hashes

# A table with fewer rows, or with fewer to save, is joined as quickly as it would be split.
FEWEST_ROWS = 150


@dataclass(frozen=True, eq=False)
class Split:
    """The tables of `left` with kinds in between; the added variables come after all others, and are no one's answer.

    Args:
        left: arc consistent, as what was split.
        state_counts: of all variables by number, the added ones included.
    """

    left: Consistent
    state_counts: tuple[int, ...]


def split(left: Consistent, state_counts: Sequence[int]) -> Split:
    """Return the same problem with pairs of many states written as two tables through the kinds of one's states.

    Two states of a variable are of one kind in a table where both have the same rows at the same costs: the choices of
    an operator that read a tensor in the same form, say. A table of 286 by 273 states with 8,000 rows so becomes one
    that says each state's kind, and one of 12 kinds by 273 states. No sum changes, nor which assignments there are.

    Cost:
        O(r) steps for r rows, once; kinds are found by sums of hashes, and then compared exactly.
    """
    names, counts, tables = list(left.names), list(state_counts), dict[int, CostTable]()
    domains = dict(left.domains)
    added: list[CostTable] = []
    for place, table in left.tables.items():
        checkpoint()
        kinds = _kinds(table, counts) if len(table.variables) == 2 and table.rows >= FEWEST_ROWS else None
        if kinds is None:
            tables[place] = table
            continue
        side, kind = kinds.side, len(names)
        names.append(f"{left.names[table.variables[side]]} in {table.name}")
        counts.append(kinds.count)
        domains[kind] = np.ones(kinds.count, np.bool_)
        states = np.flatnonzero(kinds.of >= 0).astype(np.int32)
        nothing = np.zeros(len(states))
        added.append(
            CostTable(table.name, (table.variables[side], kind), np.stack([states, kinds.of[states]]), nothing)
        )
        kept = table.take(kinds.first)
        columns = kept.columns.copy()
        columns[side] = kinds.of[columns[side]]
        variables = (kind, table.variables[1]) if side == 0 else (table.variables[0], kind)
        tables[place] = CostTable(table.name, variables, columns, kept.costs)
    tables.update(enumerate(added, start=max(tables, default=-1) + 1))
    readers: dict[int, list[int]] = {}
    for place, table in tables.items():
        for variable in table.variables:
            readers.setdefault(variable, []).append(place)
    return Split(Consistent(names, tables, domains, readers), tuple(counts))


@dataclass(frozen=True, eq=False, slots=True)
class _Kinds:
    """The kinds of one variable's states in a table of two: `of` each state, -1 where it has no row.

    `first` marks the rows of each kind's first state: the others' rows repeat them.
    """

    side: int
    of: Codes
    count: int
    first: NDArray[np.bool_]


def _kinds(table: CostTable, state_counts: Sequence[int]) -> _Kinds | None:
    """Return the kinds of that side's states which leave fewer rows, None where neither saves enough."""
    found = []
    for side in (0, 1):
        own, other = table.columns[side], table.columns[1 - side]
        kinds = alike(side, own, marks(other, table.costs), state_counts[table.variables[side]])
        left = int(np.count_nonzero(kinds.first)) + int(np.count_nonzero(kinds.of >= 0))
        if left + FEWEST_ROWS <= table.rows:
            found.append((left, kinds))
    for _, kinds in sorted(found, key=lambda pair: pair[0]):
        if _is_exact(table, kinds, state_counts):
            return kinds
    return None


def alike(side: int, own: Codes, marks: NDArray[np.uint64], state_count: int) -> _Kinds:
    sums = np.zeros(state_count, np.uint64)
    np.add.at(sums, own, marks)
    rows = np.bincount(own, minlength=state_count)
    states = np.flatnonzero(rows)
    _, first, kind = np.unique(sums[states], return_index=True, return_inverse=True)
    of = np.full(state_count, -1, np.int32)
    of[states] = kind
    is_first = np.zeros(state_count, np.bool_)
    is_first[states[first]] = True
    return _Kinds(side, of, len(first), is_first[own])


def _is_exact(table: CostTable, kinds: _Kinds, state_counts: Sequence[int]) -> bool:
    """Say whether the states of each kind have the very same rows; a sum of hashes only makes it likely."""
    own, other = table.columns[kinds.side], table.columns[1 - kinds.side]
    other_count = state_counts[table.variables[1 - kinds.side]]
    key = kinds.of[own].astype(np.int64) * other_count + other
    expected = np.full(kinds.count * other_count, np.nan)
    expected[key[kinds.first]] = table.costs[kinds.first]
    if not np.array_equal(expected[key], table.costs):
        return False
    rows = np.bincount(own, minlength=len(kinds.of))
    of_first = np.bincount(kinds.of[own[kinds.first]], minlength=kinds.count)
    states = np.flatnonzero(kinds.of >= 0)
    return bool((rows[states] == of_first[kinds.of[states]]).all())


def marks(codes: Codes, costs: Costs) -> NDArray[np.uint64]:
    """Return a well mixed number for each pair of a code and a cost."""
    marks = hashes(codes.astype(np.int64), 0)
    return hashes((marks ^ (costs + 0.0).view(np.uint64)).view(np.int64), 0) if costs.any() else marks
