"""Many tables of two variables at once, their rows behind one another: most are too small for arrays of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import checkpoint
from autotuner.solve.tables import CostTable, Integers, hashes


@dataclass(frozen=True, eq=False)
class Pairs:
    """Tables of two variables; each has a slot for each state of either of its variables.

    Args:
        starts: of each table, its first row.
        of: of each row, its table.
        slots: two arrays: of each row, the slots of its states.
        sides: of each slot, twice its table, and 1 more for the table's second variable.
        states: of each slot, its state, numbered through all variables.
    """

    starts: Integers
    of: Integers
    slots: Integers
    sides: Integers
    states: Integers

    def kinds(self, is_used: NDArray[np.bool_]) -> "SlotKinds":
        """Return the kinds of states: those of one kind have the same rows. Costs are not looked at.

        Args:
            is_used: of each table, whether its kinds are asked for.

        Cost:
            O(r log r) for r rows: kinds are found by sums of hashes, and then compared exactly.
        """
        used = is_used[self.of]
        sums, rows = np.zeros(len(self.sides), np.uint64), np.zeros(len(self.sides), np.int64)
        for own, other in (self.slots, self.slots[::-1]):
            np.add.at(sums, own[used], hashes(other[used], 0))
            rows += np.bincount(own[used], minlength=len(rows))
        present = np.flatnonzero(rows)
        order = present[np.lexsort((sums[present], self.sides[present]))]
        side = self.sides[order]
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (side[1:] != side[:-1]) | (sums[order[1:]] != sums[order[:-1]])
        number = np.cumsum(is_new) - 1
        of = np.full(len(self.sides), -1, np.int64)
        of[order] = number
        counts = np.bincount(side[is_new], minlength=2 * len(self.starts)).reshape(-1, 2)
        checkpoint()
        is_exact = np.ones(len(self.starts), np.bool_)
        sizes = np.bincount(number)
        for own, other in (self.slots, self.slots[::-1]):
            # Where two states of a kind differ, some partner of that kind is not the partner of all of its states.
            met = np.sort(of[own[used]] * len(self.sides) + other[used])
            ends = np.flatnonzero(np.diff(met, append=-1))
            met = met[ends]
            is_other = np.diff(ends, prepend=-1) != sizes[met // len(self.sides)]
            is_exact[self.sides[met[is_other] % len(self.sides)] // 2] = False
        return SlotKinds(of, order[is_new], counts, is_exact)


@dataclass(frozen=True, eq=False)
class SlotKinds:
    """Kinds of the states of tables of two variables.

    Args:
        of: of each slot, its kind, numbered through all tables; -1 for states without a row.
        first: of each kind, its first slot.
        counts: of each table, the kinds of either variable.
        is_exact: of each table, whether the states of each kind have the very same rows, as all most likely have.
    """

    of: Integers
    first: Integers
    counts: Integers
    is_exact: NDArray[np.bool_]


def pairs(tables: Sequence[CostTable], first: Integers) -> Pairs:
    """Return tables of two variables as one.

    Args:
        first: of each variable, the number of its first state.
    """
    rows = np.array([table.rows for table in tables], np.int64)
    variables = np.array([table.variables for table in tables], np.int64).reshape(-1, 2)
    counts = np.diff(first)[variables].reshape(-1)
    starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
    of = np.repeat(np.arange(len(tables)), rows)
    columns = np.concatenate([table.columns for table in tables] or [np.zeros((2, 0), np.int32)], axis=1)
    sides = np.repeat(np.arange(len(counts)), counts)
    states = np.arange(len(sides)) + (first[variables].reshape(-1) - starts)[sides]
    return Pairs(np.cumsum(rows) - rows, of, columns + starts.reshape(-1, 2)[of].T, sides, states)
