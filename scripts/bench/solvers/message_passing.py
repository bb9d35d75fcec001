"""Message passing along a path decomposition: a bound and a plan for a long problem, in time linear in its length.

Each block sends on what it and all before it cost at least, by the states that it shares onward. That is exact up to a
total a little above the least, and cut off there; so a message costs about as much as a solution of its block. The sum
of the least totals is a bound. Read back from the last block to the first, the blocks give a plan. Where it used what
was cut off, the total is known then, and messages from there on are sent anew, cut off further up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf
from time import monotonic

import numpy as np

from autotuner.checkpoint import checkpoint
from autotuner.errors import InfeasibleError
from autotuner.solve.conditioning import with_margin
from autotuner.solve.limits import SolverLimits
from autotuner.solve.tables import CostTable, Network
from scripts.bench.solvers.blocks import BlockMessage, BlockSolver, BlockStates, TimeOverError, block_key
from scripts.bench.solvers.path_decomposition import PathBlock

# A message is exact up to this share of a block's bound above its least, at first; then up to twice as much.
SHARE = 0.02
# A first total of a block is guessed at this share of the distance from the bound that the one before had.
NEARER = 0.7
# Where a block costs more than it was told, the one after may choose anew so often.
PATIENCE = 3
# Where time is limited, the first messages may take this share of it: a plan is to be found as well.
FORTH = 0.6


@dataclass(frozen=True)
class PathPlan:
    """The states of all variables, and a bound below which no assignment lies."""

    codes: Mapping[int, int]
    total_us: float
    bound_us: float


@dataclass(eq=False)
class MessagePassing:
    """Messages along the blocks of a problem.

    Args:
        cost_us: returns what states cost.
        gap: the share of the bound by which a plan may lie above it.
        share: of a block's bound above its least, up to which a message is exact at first.

    Cost:
        Memory for the blocks' tables, once for equal blocks, and for a message each; time as for solving each block a
        few times.

    Source:
        Wainwright et al., MAP estimation via agreement on trees (2005), for bounds by messages; Dechter and Rish,
        Mini-buckets (2003), for messages that are bounds.
    """

    network: Network
    blocks: Sequence[PathBlock]
    limits: SolverLimits
    cost_us: Callable[[Mapping[int, int]], float]
    gap: float = 0.0
    share: float = SHARE
    _solvers: list[BlockSolver] = field(default_factory=list)
    _messages: list[BlockMessage] = field(default_factory=list)
    # Totals that were found when states were read back, by block and shared states, from the first block on.
    _known_us: list[dict[tuple[int, ...], float]] = field(default_factory=list)
    _shares: list[float] = field(default_factory=list)
    _sent: dict[tuple[int, bytes, float], BlockMessage] = field(default_factory=dict)
    _seen: dict[tuple[int, bytes, tuple[int, ...] | None, float], BlockStates | None] = field(default_factory=dict)

    def plan(self) -> PathPlan:
        """Return the best plan found, and a bound.

        Raises:
            InfeasibleError: there is no assignment.
        """
        made: dict[bytes, BlockSolver] = {}
        for block in self.blocks:
            checkpoint()
            key = block_key(self.network, block)
            if key not in made:
                made[key] = BlockSolver(self.network, block, self.limits)
            self._solvers.append(made[key])
        self._known_us = [{} for _ in self.blocks]
        self._shares = [self.share] * len(self.blocks)
        ends_at = self.limits.ends_at
        if ends_at is not None:
            now = monotonic()
            self.limits.ends_at = now + FORTH * max(0.0, ends_at - now)
        try:
            self._messages = self._forth(0)
        except TimeOverError as error:
            self.limits.ends_at = ends_at
            return self._cut_short(error.proven_us)
        self.limits.ends_at = ends_at
        best: PathPlan | None = None
        bound_us = -inf
        while True:
            bound_us = max(bound_us, self._bound_us(len(self.blocks)))
            states, dear = self._back(len(self.blocks) - 1)
            found = self._improved(self._joined(states), bound_us)
            best = found if best is None or found.total_us < best.total_us else replace(best, bound_us=bound_us)
            if self._is_enough(best) or not dear or self.limits.over:
                return best
            for place in dear:
                self._shares[place] *= 2
            try:
                self._messages = self._forth(min(dear))
            except TimeOverError:
                return best

    def _bound_us(self, count: int) -> float:
        """Return what the first blocks cost at least."""
        return sum(message.least_us for message in self._messages[:count])

    def _forth(self, first: int) -> list[BlockMessage]:
        """Return the messages, those from block `first` on sent anew.

        Raises:
            TimeOverError: the messages so far are left in `_messages`, if these are the first.
        """
        known = bool(self._messages)
        messages = self._messages[:first]
        bound_us = self._bound_us(first)
        for place in range(first, len(self.blocks)):
            checkpoint()
            message = self._message(place, messages[-1] if place else None)
            if self._known_us[place]:
                found = {states: us - bound_us for states, us in self._known_us[place].items()}
                message = message.lifted(found).sent_anew()
            messages.append(message)
            bound_us += message.least_us
            if not known:
                self._messages = messages
        return messages

    def _message(self, place: int, before: BlockMessage | None) -> BlockMessage:
        """Return the message of a block, made once for equal blocks after equal messages."""
        solver = self._solvers[place]
        key = (id(solver), before.digest if before is not None else b"", self._shares[place])
        if key not in self._sent:
            if place < len(self._messages):
                distance = self._messages[place].distance
            else:
                alike = min(range(place), key=lambda other: abs(self._solvers[other].rows - solver.rows), default=None)
                distance = NEARER * self._messages[alike].distance if alike is not None else 0.0
            self._sent[key] = solver.message(before, self._shares[place], distance)
        return self._sent[key]

    def _back(self, last: int) -> tuple[dict[int, Mapping[int, int]], set[int]]:
        """Return states of the blocks up to `last`, and which blocks cost more than messages said.

        Raises:
            InfeasibleError: there are none.
        """
        states: dict[int, Mapping[int, int]] = {}
        dear: set[int] = set()
        patience = [PATIENCE] * last + [0]
        place = last
        while place >= 0:
            checkpoint()
            shared = self._shared(place, states)
            told_us = self._told_us(place, shared)
            found = self._read(place, shared, told_us)
            bound_us = inf if found is None else found.bound_us
            if found is None and not shared:
                raise InfeasibleError("no assignment satisfies every factor")
            if bound_us > with_margin(told_us, 3):
                dear.add(place)
                if shared is not None:
                    self._learn(place, shared, bound_us)
                if patience[place]:
                    patience[place] -= 1
                    place += 1
                    continue
            states |= self._read_together(place, last, states) if found is None else {place: found.codes}
            place -= 1
        return states, dear

    def _shared(self, place: int, states: Mapping[int, Mapping[int, int]]) -> tuple[int, ...] | None:
        """Return the states that a block shares onward, None where what comes after was not read and is free."""
        if place + 1 in states:
            return tuple(states[place + 1][v] for v in self._solvers[place + 1].left)
        return None if self._solvers[place].right else ()

    def _told_us(self, place: int, shared: tuple[int, ...] | None) -> float:
        totals_us = self._messages[place].totals_us
        return float(totals_us.min() if shared is None else totals_us[shared])

    def _read(self, place: int, shared: tuple[int, ...] | None, told_us: float) -> BlockStates | None:
        """Return the cheapest states of a block with some shared states, read once for equal blocks; None for none."""
        if told_us == inf:
            return None
        solver, before = self._solvers[place], self._messages[place - 1] if place else None
        key = (id(solver), before.digest if before is not None else b"", shared, told_us)
        if key not in self._seen:
            try:
                self._seen[key] = solver.read(before, shared, told_us)
            except InfeasibleError:
                self._seen[key] = None
        return self._seen[key]

    def _read_together(
        self, first: int, last: int, states: Mapping[int, Mapping[int, int]]
    ) -> dict[int, Mapping[int, int]]:
        """Return states of a block that agrees with none of those after it, and of as many of these as need others.

        Raises:
            InfeasibleError: there are none.
        """
        before = self._messages[first - 1] if first else None
        for end in range(first + 1, last + 1):
            shared = self._shared(end, states)
            told_us = self._told_us(end, shared) + sum(message.least_us for message in self._messages[first:end])
            window = self._window(first, end)
            try:
                codes = window.read(before, shared, told_us if told_us < inf else 0.0)
            except InfeasibleError:
                continue
            blocks = enumerate(self.blocks[first : end + 1], start=first)
            return {place: {number: codes[v] for number, v in enumerate(block.variables)} for place, block in blocks}
        raise InfeasibleError("no assignment satisfies every factor")

    def _learn(self, place: int, shared: tuple[int, ...], bound_us: float) -> None:
        self._messages[place] = self._messages[place].lifted({shared: bound_us})
        self._known_us[place][shared] = bound_us + self._bound_us(place)

    def _joined(self, states: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
        """Return the states of all variables; what blocks share, later ones chose."""
        codes: dict[int, int] = {}
        for place in sorted(states):
            codes.update((v, states[place][number]) for number, v in enumerate(self.blocks[place].variables))
        return codes

    def _cut_short(self, proven_us: float) -> PathPlan:
        """Return a plan when the time was over before every block had sent its message.

        Args:
            proven_us: what the first block without a message costs at least, with the message before it.
        """
        count = len(self._messages)
        bound_us = (
            self._bound_us(count)
            + proven_us
            + sum(self._least_us(place) for place in range(count + 1, len(self.blocks)))
        )
        codes: dict[int, int] = {}
        if count:
            states, _ = self._back(count - 1)
            codes = self._joined(states)
        for place in range(count, len(self.blocks)):
            codes |= self._next(place, codes)
        return self._improved(codes, bound_us)

    def _least_us(self, place: int) -> float:
        """Return a bound on what a block costs, whatever is before and after it."""
        solver = self._solvers[place]
        return solver.quick_bound_us if self.limits.over else solver.bound_us

    def _next(self, last: int, codes: Mapping[int, int]) -> dict[int, int]:
        """Return cheap states of a block after those of the ones before; of some of these as well, where none agree.

        Raises:
            InfeasibleError: there are none.
        """
        for first in range(last, -1, -1):
            try:
                return self._window(first, last).between(codes)
            except InfeasibleError:
                if not first:
                    raise
        raise AssertionError("there is a first block")

    def _window(self, first: int, last: int) -> "_Window":
        """Return several blocks as one."""
        blocks = self.blocks[first : last + 1]
        variables = tuple(dict.fromkeys(v for block in blocks for v in block.variables))
        tables = tuple(place for block in blocks for place in block.tables)
        whole = PathBlock(variables, tables, blocks[0].left, blocks[-1].right)
        solver = self._solvers[first] if first == last else BlockSolver(self.network, whole, self.limits)
        return _Window(whole, solver)

    def _improved(self, codes: dict[int, int], bound_us: float) -> PathPlan:
        """Return the plan after all windows of two blocks were solved in turn, all else as it is."""
        codes = dict(codes)
        plan = PathPlan(codes, self.cost_us(codes), bound_us)
        for place in range(len(self.blocks) - 1):
            if self._is_enough(plan) or self.limits.over:
                break
            window = self._window(place, place + 1)
            reached_us = fsum(row_cost_us(self.network.tables[each], codes) for each in window.block.tables)
            changed = codes | window.cheaper(codes, reached_us)
            total_us = self.cost_us(changed)
            if total_us < plan.total_us:
                codes, plan = changed, PathPlan(changed, total_us, bound_us)
        return plan

    def _is_enough(self, plan: PathPlan) -> bool:
        return with_margin(plan.bound_us, 3) * (1 + self.gap) >= plan.total_us


def row_cost_us(table: CostTable, codes: Mapping[int, int]) -> float:
    """Return the cost of the row with these states, which the table has."""
    match = np.ones(table.rows, np.bool_)
    for variable, column in zip(table.variables, table.columns, strict=True):
        match &= column == codes[variable]
    return float(table.costs[np.argmax(match)])


@dataclass(frozen=True, eq=False)
class _Window:
    """Neighbouring blocks, solved as one while everything else stays."""

    block: PathBlock
    solver: BlockSolver

    def read(self, before: BlockMessage | None, shared: tuple[int, ...] | None, told_us: float) -> dict[int, int]:
        """Return the cheapest states with the message before, as `BlockSolver.read`.

        Raises:
            InfeasibleError: there are none.
        """
        return self._named(self.solver.read(before, shared, told_us))

    def between(self, codes: Mapping[int, int]) -> dict[int, int]:
        """Return states after those before it.

        Raises:
            InfeasibleError: there are none.
        """
        return self._named(self.solver.between(self._fixed(codes, self.solver.left)))

    def cheaper(self, codes: Mapping[int, int], most_us: float) -> dict[int, int]:
        """Return states between those before and after it that cost less, or nothing."""
        found = self.solver.cheaper(self._fixed(codes, (*self.solver.left, *self.solver.right)), most_us)
        return {} if found is None else self._named(found)

    def _fixed(self, codes: Mapping[int, int], numbers: Sequence[int]) -> dict[int, int]:
        return {number: codes[self.block.variables[number]] for number in numbers}

    def _named(self, found: BlockStates) -> dict[int, int]:
        return {v: found.codes[number] for number, v in enumerate(self.block.variables)}
