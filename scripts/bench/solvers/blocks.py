"""One block of a path decomposition: the messages that it sends on, and its states read back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import inf

import numpy as np
from numpy.typing import NDArray

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import consistent
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.conditioning import MOST_ROWS, cheapest, with_margin
from autotuner.solve.dominance import merged
from autotuner.solve.limits import SolverLimits
from autotuner.solve.tables import Costs, CostTable, Network
from autotuner.solve.variable_splitting import split
from scripts.bench.solvers.elimination import PartCases, cheaper, fixed
from scripts.bench.solvers.path_decomposition import PathBlock

# Results of fewer rows are had once for a block, not at every message.
FEW_ROWS = 300.0
# Tables over shared states are larger than others; cases are split above so many rows.
WIDE_ROWS = 64 * MOST_ROWS
# What lies above the least total of a block is looked for where that made no larger tables; else a part of it is.
CHEAP_ROWS = 40_000
PART = 0.15
# Cases that are tried for it.
MOST_CASES = 8
# A guess that nothing is found below is raised by this factor of its distance from the bound: too high a one is slow.
RAISED = 1.15
# The first guess of a window lies so far above its bound, as a share.
STEP = 0.004


class TimeOverError(Exception):
    """The time was over; `proven_us` is a bound on what was being looked for."""

    def __init__(self, proven_us: float) -> None:
        super().__init__(f"the time is over, {proven_us} us are proven")
        self.proven_us = proven_us


@dataclass(frozen=True, eq=False)
class BlockMessage:
    """The least total of a block and of all before it, for each combination of the states that it shares onward.

    Args:
        totals_us: one axis per shared variable; the least of all blocks before is taken out. Infinite where there is
            no assignment.
        least_us: of `totals_us` when the message was sent; what comes after takes it as nothing.
        distance: of the least total from the bound that it was found from, as a share of that.
    """

    totals_us: Costs
    least_us: float
    distance: float

    @cached_property
    def digest(self) -> bytes:
        """Equal for messages that say the same."""
        return blake2b((self.totals_us - self.least_us).tobytes(), digest_size=16).digest()

    def table(self, variables: tuple[int, ...]) -> CostTable:
        """Return a table of what each combination costs more than the cheapest."""
        places = np.nonzero(np.isfinite(self.totals_us))
        columns = np.array(places, np.int32).reshape(len(variables), len(places[0]))
        return CostTable("what is before", variables, columns, self.totals_us[places] - self.least_us)

    def lifted(self, known_us: Mapping[tuple[int, ...], float]) -> "BlockMessage":
        """Return the message with bounds raised to what is known of some combinations."""
        totals = self.totals_us.copy()
        for states, us in known_us.items():
            totals[states] = max(totals[states], us)
        return replace(self, totals_us=totals)

    def sent_anew(self) -> "BlockMessage":
        """Return the message with the least of its totals as they are now."""
        return replace(self, least_us=float(self.totals_us.min()))


@dataclass(frozen=True)
class BlockStates:
    """States of a block's variables, by their places in it.

    Args:
        bound_us: what these and all others with the same states shared onward cost at least, with the message before.
    """

    codes: Mapping[int, int]
    bound_us: float


class BlockSolver:
    """A block's tables, with all done that does not depend on what is before or after.

    Args:
        network: of the whole problem.

    Raises:
        InfeasibleError: the block's own tables contradict each other.
    """

    def __init__(self, network: Network, block: PathBlock, limits: SolverLimits) -> None:
        number = {v: place for place, v in enumerate(block.variables)}
        names = [network.names[v] for v in block.variables]
        counts = [len(network.states[v]) for v in block.variables]
        self.left = tuple(number[v] for v in block.left)
        self.right = tuple(number[v] for v in block.right)
        self.limits = limits
        tables = {
            place: CostTable(table.name, tuple(number[v] for v in table.variables), table.columns, table.costs)
            for place in block.tables
            for table in [network.tables[place]]
        }
        kept = {*self.left, *self.right}
        parts = split(consistent(names, tables, counts), counts)
        left, argmins = merged(parts.left, parts.state_counts, kept)
        self._shape = tuple(counts[v] for v in self.right)
        self._possible = np.ones(self._shape, np.bool_)
        for axis, v in enumerate(self.right):
            if v in left.domains:
                self._possible &= _along(left.domains[v], axis, len(self.right))
        self._start = BucketElimination(left.names, parts.state_counts, left.tables.values(), limits, argmins)
        self._start.run(FEW_ROWS, kept)
        self._unnamed = [v for v in range(len(names)) if v not in left.domains]

    @cached_property
    def bound_us(self) -> float:
        """A bound on what the block costs, whatever is before and after it."""
        return self._start.copy().tighten(inf)

    @property
    def quick_bound_us(self) -> float:
        """A lower bound than `bound_us`, at no cost."""
        return self._start.bound_us

    @property
    def rows(self) -> int:
        return self._start.rows

    def message(self, before: BlockMessage | None, share: float, distance: float) -> BlockMessage:
        """Return the message onward, exact up to a share of the bound above its least.

        Args:
            distance: at which the first total is guessed above the bound, as a share of it.

        Raises:
            InfeasibleError: there is no assignment.
            TimeOverError: it was over before any was found.
        """
        start = self._after(before)
        if start.run(MOST_ROWS, self.right):
            totals = self._totals(start)
            if not np.isfinite(totals).any():
                raise InfeasibleError("no states of a block agree with those before")
            return BlockMessage(totals, float(totals.min()), distance)
        bound = start.tighten(inf)
        most = start.most_us
        step = share * bound + (most - bound) / 4096
        guess, proven = bound + max(distance * bound, step), bound
        found: BlockMessage | None = None
        while True:
            guess = guess if guess < most else inf
            totals = np.full(self._shape, inf)
            # What is dearer than the least is worth some effort, but not any.
            cases = PartCases(start, with_margin(guess), self.right, WIDE_ROWS, inf if found is None else MOST_CASES)
            cases.stoppable = True
            largest, self.limits.rows = self.limits.rows, 0
            for case in cases:
                totals = np.minimum(totals, self._totals(case))
            rows, self.limits.rows = self.limits.rows, max(largest, self.limits.rows)
            if cases.stopped:
                if found is None:
                    raise TimeOverError(proven)
                return found
            least = float(totals.min(initial=inf))
            if guess == inf and least == inf:
                raise InfeasibleError(cases.reason)
            if least <= guess:
                totals = np.where(self._possible, np.minimum(totals, guess), inf)
                found = BlockMessage(totals, least, (least - bound) / (1 + abs(bound)))
                above = share * bound * (1.0 if rows <= CHEAP_ROWS else PART)
                if guess >= least + 0.7 * above:
                    return found
                guess = least + above
            else:
                proven, guess = guess, bound + RAISED * (guess - bound)

    def read(self, before: BlockMessage | None, onward: Sequence[int] | None, told_us: float) -> BlockStates:
        """Return the cheapest states of the block's variables with these states shared onward.

        Args:
            onward: None where any will do.
            told_us: what they cost at least.

        Raises:
            InfeasibleError: there are none.
        """
        start = self._after(before)
        if onward:
            start = fixed(start, dict(zip(self.right, onward, strict=True)))
        best = None
        cases = PartCases(start, with_margin(told_us, 3))
        cases.stoppable = True
        for case in cases:
            if best is None or case.constant < best.constant:
                best, cases.most_us = case, with_margin(case.constant, -1)
        if best is not None and best.constant <= with_margin(told_us, 3):
            return BlockStates(self._codes(best), told_us)
        found = cheapest(start, told_us)
        return BlockStates(self._codes(found.plan), found.plan.constant if found.bound_us is None else found.bound_us)

    def between(self, states: Mapping[int, int]) -> BlockStates:
        """Return the cheapest states of the block's variables with these states of what it shares, as far as given.

        Raises:
            InfeasibleError: there are none.
        """
        found = cheapest(fixed(self._start, states))
        bound_us = found.plan.constant if found.bound_us is None else found.bound_us
        return BlockStates(self._codes(found.plan) | dict(states), bound_us)

    def cheaper(self, states: Mapping[int, int], most_us: float) -> BlockStates | None:
        """Return states as `between`, or None where none that cost less than `most_us` were found with some effort."""
        try:
            start = fixed(self._start, states)
        except InfeasibleError:
            return None
        best = cheaper(start, most_us, STEP * (1 + abs(start.bound_us)), RAISED, MOST_CASES)
        return None if best is None else BlockStates(self._codes(best) | dict(states), best.constant)

    def _codes(self, plan: BucketElimination) -> dict[int, int]:
        return dict.fromkeys(self._unnamed, 0) | plan.codes()

    def _after(self, before: BlockMessage | None) -> BucketElimination:
        start = self._start.copy()
        if before is not None and self.left:
            start.add(before.table(self.left))
        return start

    def _totals(self, case: BucketElimination) -> Costs:
        """Return the totals of a complete elimination, for each combination of what is shared onward."""
        totals = np.where(self._possible, case.constant, inf)
        for argmin in case.argmins:
            if argmin.variable in self.right:  # it has one state left
                axis = self.right.index(argmin.variable)
                only = np.arange(self._shape[axis]) == argmin.states[0]
                totals[~np.broadcast_to(_along(only, axis, len(self.right)), self._shape)] = inf
        for table in case.tables.values():
            dense = np.full([case.state_counts[v] for v in table.variables], inf)
            dense[tuple(table.columns)] = table.costs
            axes = [self.right.index(v) for v in table.variables]
            shape = [size if axis in axes else 1 for axis, size in enumerate(self._shape)]
            totals = totals + dense.transpose(np.argsort(axes)).reshape(shape)
        return totals


def _along(mask: NDArray[np.bool_], axis: int, axes: int) -> NDArray[np.bool_]:
    """Return a mask as an array of so many axes, of which one is as long as the mask."""
    return mask.reshape([-1 if place == axis else 1 for place in range(axes)])


def block_key(network: Network, block: PathBlock) -> bytes:
    """Return a digest of a block: equal for blocks that differ in names alone."""
    number = {v: place for place, v in enumerate(block.variables)}
    counts = [len(network.states[v]) for v in block.variables]
    digest = blake2b(repr((counts, [number[v] for v in block.left], [number[v] for v in block.right])).encode())
    for place in block.tables:
        table = network.tables[place]
        digest.update(repr([number[v] for v in table.variables]).encode())
        digest.update(table.columns.tobytes())
        digest.update(table.costs.tobytes())
    return digest.digest()
