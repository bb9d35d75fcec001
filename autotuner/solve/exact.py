"""The cheapest assignment, proven."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic

from autotuner.errors import ProblemError
from autotuner.solve.arc_consistency import Consistent, arc_consistent
from autotuner.solve.blocks import block_key
from autotuner.solve.conditioning import cheapest, reduced, with_margin
from autotuner.solve.integer_program import TOLERANCE, ProgramPlan, has_few_states, integer_program, solved
from autotuner.solve.limits import MEMORY_BYTES, SolverLimits
from autotuner.solve.linear_program import lifted
from autotuner.solve.message_passing import MessagePassing
from autotuner.solve.path_decomposition import LONG, PathBlock, having, path_decomposition
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.tables import Network, encode

FEWEST_BLOCKS = 3
# Of more states in all, HiGHS has a good plan only at its end, messages have one early.
MOST_STATES = 70_000
# Where time is limited, an integer program may take this share of it; messages have the rest.
PROGRAM_TIME = 0.75
# The linear relaxation may take this share of what there is then.
LIFTING_TIME = 0.5


def exact(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    memory_limit_bytes: float = MEMORY_BYTES,
    gap: float = 0.0,
) -> Solution:
    """Return the assignment with the least total cost, by eliminating one variable after another.

    The problem is made arc consistent. Wide pairs of variables are split by the kinds of their states, variables that
    are forced to be equal become one, and states that another one always replaces are dropped. Variables with small
    results are eliminated, the smallest estimate first. Then a total is guessed a little above the bound, rows that no
    assignment within the guess can use are dropped, and elimination goes on; where results still grow, the states of a
    variable are shared between two cases. If nothing is found, the guess was a bound: the next one is higher.

    A problem of more than `LONG` variables with at most `FEW_STATES` states each, on average, and `MOST_STATES` in all,
    is an integer program for HiGHS. One of more, or that HiGHS does not solve in time, is cut at its narrow places.
    Where that gives three blocks or more, the dual of a linear relaxation moves costs, so that bounds are tight. Then
    they are solved one after another, with messages between them, in time linear in their number. Costs of a problem
    whose blocks mostly equal others stay, and equal blocks are solved once.

    Args:
        problem: its parts that share no variable never meet in a table, so they are solved apart.
        time_limit_s: when to return the best plan known, unproven; as soon as there is one, where there is none yet.
        memory_limit_bytes: the most that one table may need, with what is needed to make it. A table's rows are counted
            before it is made; where it would need more, cases are split, which takes time instead.
        gap: the share of the bound by which the plan of a long problem may lie above it; 0 for the least total.

    Returns:
        States whose total is proven, up to rounding by less than 1e-9 of it, or 1e-6 where HiGHS proved it:
        `lower_bound_us` equals `total_us`. If the
        time was over first, or a gap allowed, `lower_bound_us` is less. The same problem gives the same states, in
        whatever order its factors, their variables and their rows are: of states that come out equal, the first by
        name is taken, while variables and factors are looked at in order of their names.

        `statistics` has the rows and bytes of the largest table, what it would have needed without bounds at most (by
        an estimate that is made first; 0 where small tables did), and the number of cases.

    Raises:
        InfeasibleError: the factors contradict each other; the message names some that do.

    Cost:
        O(n * f**w) for n variables of f states, w of them beside one another at most; far less where bounds are tight.

    Source:
        Dechter, Bucket elimination (1999); de Givry et al., Solving Max-SAT as weighted CSP (2003) for the bounds;
        Huangfu and Hall, Parallelizing the dual revised simplex method (2018), for HiGHS.
    """
    limits = SolverLimits(memory_limit_bytes, None if time_limit_s is None else monotonic() + time_limit_s)
    network = encode(problem)
    codes, bound = (_long(problem, network, limits, gap) if len(network.names) > LONG else None) or _whole(
        network, limits
    )
    states = network.named(codes)
    total = problem.cost_us(states)
    return Solution(states, total, total if bound is None else min(total, bound), "exact", limits.statistics())


def _long(
    problem: Problem, network: Network, limits: SolverLimits, gap: float
) -> tuple[Mapping[int, int], float | None] | None:
    """Return the states of all variables of a long problem, and a bound where these are not proven to cost the least.

    Returns:
        None for a problem of one block of many states.
    """
    left = arc_consistent(network)
    programmed = _programmed(network, left, limits, gap)
    if programmed is None:
        return _along_path(problem, network, left, limits, gap)
    codes, bound_us = programmed.codes, programmed.bound_us
    total_us = _total_us(problem, network, codes)
    if codes is not None and total_us <= bound_us + 2 * TOLERANCE * (1 + abs(total_us)):
        return codes, None
    if codes is not None and total_us <= bound_us * (1 + gap):
        return codes, bound_us
    other, other_us = _along_path(problem, network, left, limits, gap) or _whole(network, limits)
    if other_us is None:
        return other, None
    if codes is None or _total_us(problem, network, other) < total_us:
        codes = other
    return codes, max(bound_us, other_us)


def _total_us(problem: Problem, network: Network, codes: Mapping[int, int] | None) -> float:
    """Return what states cost; inf where there are none, or some factor forbids them."""
    try:
        return inf if codes is None else problem.cost_us(network.named(codes))
    except ProblemError:  # HiGHS keeps to its rows up to rounding
        return inf


def _programmed(network: Network, left: Consistent, limits: SolverLimits, gap: float) -> ProgramPlan | None:
    """Return what an integer program finds in its share of the time; None where there are many states."""
    if not has_few_states(left) or sum(int(domain.sum()) for domain in left.domains.values()) > MOST_STATES:
        return None
    program = integer_program(left, network.state_counts)
    if program.needed_bytes > limits.memory_bytes:
        return None
    seconds = inf if limits.ends_at is None else PROGRAM_TIME * (limits.ends_at - monotonic())
    return solved(program, seconds, gap)


def _whole(network: Network, limits: SolverLimits) -> tuple[Mapping[int, int], float | None]:
    """Return the states of all variables, and a bound where these are not proven to cost the least."""
    found = cheapest(reduced(network, limits))
    return found.plan.codes(), found.bound_us


def _along_path(
    problem: Problem, network: Network, left: Consistent, limits: SolverLimits, gap: float
) -> tuple[Mapping[int, int], float | None] | None:
    """Return the same for a problem with narrow places; None for others."""
    blocks = path_decomposition(dict(enumerate(network.tables)), network.state_counts)
    if len(blocks) < FEWEST_BLOCKS:
        return None
    if not _is_repeated(network, blocks):
        now = monotonic()
        ends_at = None if limits.ends_at is None else now + LIFTING_TIME * (limits.ends_at - now)
        moved = lifted(left, network.state_counts, blocks, ends_at)
        network = replace(network, tables=tuple(moved.tables.values()))
        blocks = having(blocks, dict(enumerate(network.tables)))

    def cost_us(codes: Mapping[int, int]) -> float:
        return problem.cost_us(network.named(codes))

    found = MessagePassing(network, blocks, limits, cost_us, gap).plan()
    is_proven = found.total_us <= with_margin(found.bound_us, 3)
    return found.codes, None if is_proven else with_margin(found.bound_us, -1)


def _is_repeated(network: Network, blocks: Sequence[PathBlock]) -> bool:
    """Say whether most blocks equal others: they are solved once, which different costs would end."""
    return 2 * len({block_key(network, block) for block in blocks}) <= len(blocks)
