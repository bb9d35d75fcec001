"""Solver of long problems, the benchmark's: an integer program for HiGHS and messages between blocks, in turns.

No captured region needs it: the widest, of Flux, has 1,300 to 1,600 variables, and `exact` of `autotuner.solve` proves
its plan by HiGHS, as it does others by elimination. `scripts/bench_solver` compares all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, log2
from time import monotonic

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.solve.arc_consistency import Consistent, arc_consistent
from autotuner.solve.conditioning import MOST_ROWS, cheapest, reduced, with_margin
from autotuner.solve.integer_program import (
    LONG,
    TOLERANCE,
    WRITTEN_BYTES,
    IntegerProgram,
    has_few_states,
    integer_program,
    solved,
)
from autotuner.solve.limits import MEMORY_BYTES, SolverLimits
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.tables import Network, encode
from scripts.bench.solvers.blocks import block_key
from scripts.bench.solvers.linear_program import lifted
from scripts.bench.solvers.linear_relaxation import BYTES as RELAXED_BYTES
from scripts.bench.solvers.linear_relaxation import Relaxed, relaxed, rounded
from scripts.bench.solvers.message_passing import SHARE, MessagePassing
from scripts.bench.solvers.path_decomposition import PathBlock, having, path_decomposition

FEWEST_BLOCKS = 3
# A long problem is eliminated at once where all its joins have so many rows at most: about 1 s. Where time is limited,
# so many for each second of it.
NARROW_ROWS = 10_000_000
# Of more states in all, HiGHS has a good plan only at its end, messages have one early.
MOST_STATES = 70_000
# Where time is limited, an integer program may take this share of it; messages have the rest.
PROGRAM_TIME = 0.75
# Where it is not, both take turns: so many seconds each at first, twice as many in each later turn.
TURN_S = 20.0
# The linear relaxation may take this share of what there is then; where time is not limited, so many seconds.
LIFTING_TIME = 0.5
RELAXED_S = 60.0
# HiGHS looks for a plan within this share of the bound first, so that what it finds does not depend on the gap.
NEAR_GAP = 0.001
# Where a plan is known, messages are exact up to this many times its share above the bound at first; `LEAST_SHARE` at
# least: less makes more of them than it saves.
NEAR = 5
LEAST_SHARE = 0.005


def solve_long(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    memory_limit_bytes: float = MEMORY_BYTES,
    gap: float = 0.0,
) -> Solution:
    """Return the assignment with the least total cost, by methods whose time grows with a problem's length alone.

    A problem of `LONG` variables or fewer, and one that is narrow everywhere, is eliminated as by `exact`. Another one
    with at most `FEW_STATES` states each, on average, is written as an integer program. The linear
    relaxation of that gives a bound, and a plan by rounding. What no better plan can have is ruled out then, and HiGHS
    solves the rest, if there are `MOST_STATES` in all at most. Other long problems, and those that HiGHS does not solve
    in its share of the time, are cut at their narrow places.
    Where that gives three blocks or more, the dual of a linear relaxation moves costs, so that bounds are tight. Then
    they are solved one after another, with messages between them, in time linear in their number. Costs of a problem
    whose blocks mostly equal others stay, and equal blocks are solved once. Without a time limit, HiGHS and messages
    take turns of `TURN_S` seconds at first, each twice as long as the one before. The best plan and the best bound of
    all count, and the order of all this does not depend on the gap.

    Args:
        time_limit_s: when to return the best plan known, unproven; as soon as there is one, where there is none yet.
        memory_limit_bytes: the most that one table or program may need, with what is needed to make it.
        gap: the share of the bound by which the plan of a long problem may lie above it; 0 for the least total.

    Returns:
        States whose total is proven, up to rounding by less than 1e-9 of it, or 1e-6 where HiGHS proved it. If the
        time was over first, or a gap allowed, `lower_bound_us` is less. Of several cheapest plans, the one returned may
        depend on what was solved in its turn.

    Raises:
        InfeasibleError: the factors contradict each other; the message names some that do.

    Source:
        Huangfu and Hall, Parallelizing the dual revised simplex method (2018), for HiGHS.
    """
    limits = SolverLimits(memory_limit_bytes, None if time_limit_s is None else monotonic() + time_limit_s)
    network = encode(problem)
    is_long = len(network.names) > LONG
    codes, bound = _long(problem, network, limits, gap) if is_long else _whole(network, limits)
    states = network.named(codes)
    total = problem.cost_us(states)
    return Solution(states, total, total if bound is None else min(total, bound), "long", limits.statistics())


class _Best:
    """The best plan of a long problem so far, and the best bound.

    Args:
        gap: the share of the bound by which a plan may lie above it.
    """

    def __init__(self, problem: Problem, network: Network, gap: float) -> None:
        self._problem, self._network, self.gap = problem, network, gap
        self.codes: Mapping[int, int] | None = None
        self.total_us, self.bound_us = inf, -inf

    def learn(self, codes: Mapping[int, int] | None, bound_us: float | None) -> None:
        """Take a plan, if it is cheaper, and a bound; None for one that the plan itself is."""
        total_us = inf if codes is None else self.cost_us(codes)
        self.bound_us = max(self.bound_us, total_us if bound_us is None else bound_us)
        if total_us < self.total_us:
            self.codes, self.total_us = codes, total_us

    def cost_us(self, codes: Mapping[int, int]) -> float:
        """Return what states cost; inf where some factor forbids them: HiGHS keeps to its rows up to rounding."""
        try:
            return self._problem.cost_us(self._network.named(codes))
        except ProblemError:
            return inf

    @property
    def is_proven(self) -> bool:
        return self.total_us < inf and self.total_us <= self.bound_us + 2 * TOLERANCE * (1 + abs(self.total_us))

    @property
    def is_enough(self) -> bool:
        return self.is_within(self.gap)

    def is_within(self, gap: float) -> bool:
        """Say whether the plan is proven, or lies no more than this share above the bound."""
        return self.is_proven or self.total_us <= self.bound_us * (1 + gap) < inf


def _long(
    problem: Problem, network: Network, limits: SolverLimits, gap: float
) -> tuple[Mapping[int, int], float | None]:
    """Return the states of all variables of a long problem, and a bound where these are not proven to cost the least.

    Raises:
        InfeasibleError: there is no assignment.
    """
    left = arc_consistent(network)
    codes = _eliminated(network, left, limits)
    if codes is not None:
        return codes, None
    best = _Best(problem, network, gap)
    highs = _Programs.of(network, left, limits, best) if has_few_states(left) else None
    ends_at = limits.ends_at
    for turn in count():
        if best.is_enough:
            break
        turn_s = inf if highs is None else TURN_S * 2.0**turn
        if highs is not None:
            highs.solve(turn_s if ends_at is None else _seconds(limits, PROGRAM_TIME))
        if not best.is_enough:
            limits.ends_at = ends_at if ends_at is not None or turn_s == inf else monotonic() + turn_s
            best.learn(*(_along_path(network, left, limits, best) or _whole(network, limits)))
        if ends_at is not None or highs is None:
            break
    assert best.codes is not None
    return best.codes, None if best.is_proven else best.bound_us


def _eliminated(network: Network, left: Consistent, limits: SolverLimits) -> Mapping[int, int] | None:
    """Return the cheapest states of a problem that is narrow everywhere, such as a chain; None of others.

    Raises:
        InfeasibleError: there is no assignment.
    """
    most_rows = NARROW_ROWS * min(1.0, _seconds(limits, 1.0))
    alive = {v: int(domain.sum()) for v, domain in left.domains.items()}
    if joined_rows((table.variables for table in left.tables.values()), alive, most_rows) > most_rows:
        return None
    start = reduced(network, limits)
    return start.codes() if start.run(max(MOST_ROWS, most_rows / LONG)) else None


class _Programs:
    """A long problem as an integer program, for HiGHS.

    Args:
        relaxation: of the program; None where it was not solved in time.
    """

    def __init__(self, program: IntegerProgram, relaxation: Relaxed | None, best: _Best) -> None:
        self._program, self._relaxation, self._best = program, relaxation, best

    @classmethod
    def of(cls, network: Network, left: Consistent, limits: SolverLimits, best: _Best) -> "_Programs | None":
        """Solve the linear relaxation; return None where the program has too many states, or would need much memory."""
        if WRITTEN_BYTES * sum(table.rows for table in left.tables.values()) > limits.memory_bytes:
            return None
        program = integer_program(left, network.state_counts)
        relaxation = None
        if RELAXED_BYTES * len(program.values) <= limits.memory_bytes:
            relaxation = relaxed(program, min(RELAXED_S, _seconds(limits, LIFTING_TIME)))
        if relaxation is not None:
            best.learn(rounded(left, network.state_counts, program, relaxation, limits), relaxation.bound_us)
        is_large = sum(int(domain.sum()) for domain in left.domains.values()) > MOST_STATES
        if is_large or program.needed_bytes > limits.memory_bytes:
            return None
        return cls(program, relaxation, best)

    def solve(self, time_limit_s: float) -> None:
        """Have HiGHS look for a plan within `NEAR_GAP` first, then for one within the gap that is allowed."""
        best, ends_at = self._best, monotonic() + time_limit_s
        for gap in (max(NEAR_GAP, best.gap), best.gap):
            if best.is_within(gap) or monotonic() > ends_at:
                continue
            excluded = None
            if self._relaxation is not None and best.codes is not None:
                excluded = self._relaxation.above(best.total_us)
            try:
                found = solved(self._program, ends_at - monotonic(), gap, excluded)
            except InfeasibleError:
                if excluded is None:
                    raise
                return  # the best plan is not excluded: HiGHS keeps to its rows up to rounding
            # What was excluded costs more than the best plan.
            best.learn(found.codes, min(found.bound_us, best.total_us))


def _seconds(limits: SolverLimits, share: float) -> float:
    """Return a share of the time that is left."""
    return inf if limits.ends_at is None else share * (limits.ends_at - monotonic())


def joined_rows(scopes: Iterable[tuple[int, ...]], alive: Mapping[int, int], most: float) -> float:
    """Return how many rows an elimination without bounds joins at most, the lightest result first.

    Rows that are missing are counted as if they were there, so the truth may be far less.

    Args:
        scopes: the variables of each table.
        alive: how many states of each variable are left.
        most: counting ends above it.

    Source:
        Kjaerulff, Triangulation of graphs (1990), for orders by weight.
    """
    near: dict[int, set[int]] = {}
    for scope in scopes:
        for variable in scope:
            near.setdefault(variable, set()).update(scope)
    bits = {v: log2(max(1, alive[v])) for v in near}
    weight = {v: sum(bits[u] for u in others) for v, others in near.items()}
    # Weights that no longer hold stay in the heap until they come up.
    heap = [(each, v) for v, each in weight.items()]
    heapify(heap)
    rows = 0.0
    while heap and rows <= most:
        lightest, variable = heappop(heap)
        if weight.get(variable) != lightest:
            continue
        others = near.pop(variable)
        rows += 2.0 ** weight.pop(variable)
        others.discard(variable)
        for other in others:
            near[other] |= others
            near[other].discard(variable)
            weight[other] = sum(bits[u] for u in near[other])
            heappush(heap, (weight[other], other))
    return rows


def _whole(network: Network, limits: SolverLimits) -> tuple[Mapping[int, int], float | None]:
    """Return the states of all variables, and a bound where these are not proven to cost the least."""
    found = cheapest(reduced(network, limits))
    return found.plan.codes(), found.bound_us


def _along_path(
    network: Network, left: Consistent, limits: SolverLimits, best: _Best
) -> tuple[Mapping[int, int], float | None] | None:
    """Return the same for a problem with narrow places; None for others."""
    blocks = path_decomposition(dict(enumerate(network.tables)), network.state_counts)
    if len(blocks) < FEWEST_BLOCKS:
        return None
    if not _is_repeated(network, blocks):
        ends_at = None if limits.ends_at is None else monotonic() + _seconds(limits, LIFTING_TIME)
        moved = lifted(left, network.state_counts, blocks, ends_at)
        network = replace(network, tables=tuple(moved.tables.values()))
        blocks = having(blocks, dict(enumerate(network.tables)))
    share = SHARE if best.codes is None else min(SHARE, max(LEAST_SHARE, NEAR * (best.total_us / best.bound_us - 1)))
    found = MessagePassing(network, blocks, limits, best.cost_us, best.gap, share).plan()
    is_proven = found.total_us <= with_margin(found.bound_us, 3)
    return found.codes, None if is_proven else with_margin(found.bound_us, -1)


def _is_repeated(network: Network, blocks: Sequence[PathBlock]) -> bool:
    """Say whether most blocks equal others: they are solved once, which different costs would end."""
    return 2 * len({block_key(network, block) for block in blocks}) <= len(blocks)
