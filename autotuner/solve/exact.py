"""The cheapest assignment, proven: by elimination, or by an integer program where a long problem is too wide."""

from collections.abc import Mapping
from itertools import count
from math import inf
from time import monotonic

from autotuner.errors import ProblemError
from autotuner.solve.arc_consistency import arc_consistent
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.conditioning import MOST_ROWS, cheapest, reduced
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
from autotuner.solve.tables import Encoder, Network, encode

# Where time is limited, an integer program may take this share of it; elimination has the rest.
PROGRAM_TIME = 0.75
# Where it is not, both take turns: so many seconds each at first, twice as many in each later turn.
TURN_S = 20.0


def exact(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    memory_limit_bytes: float = MEMORY_BYTES,
    encoder: Encoder | None = None,
) -> Solution:
    """Return the assignment with the least total cost, by eliminating one variable after another.

    The problem is made arc consistent. Wide pairs of variables are split by the kinds of their states, variables that
    are forced to be equal become one, and states that another one always replaces are dropped. Variables with small
    results are eliminated, the smallest estimate first. Then a total is guessed a little above the bound, rows that no
    assignment within the guess can use are dropped, and elimination goes on; where results still grow, the states of a
    variable are shared between two cases. If nothing is found, the guess was a bound: the next one is higher.

    A problem of more than `LONG` variables with at most `FEW_STATES` states each, on average, is written as an integer
    program for HiGHS, where variables with small results do not make up all of it. Without a time limit, HiGHS and
    elimination take turns of `TURN_S` seconds at first, each twice as long as the one before.

    Args:
        problem: its parts that share no variable never meet in a table, so they are solved apart.
        time_limit_s: when to return the best plan known, unproven; as soon as there is one, where there is none yet.
        memory_limit_bytes: the most that one table or program may need, with what is needed to make it. A table's rows
            are counted before it is made; where it would need more, cases are split, which takes time instead.
        encoder: of a problem with the same variables, to solve it at many costs.

    Returns:
        States whose total is proven, up to rounding by less than 1e-9 of it, or 1e-6 where HiGHS proved it:
        `lower_bound_us` equals `total_us`. If the time was over first, `lower_bound_us` is less. The same problem gives
        the same states, in whatever order its factors, their variables and their rows are: of states that come out
        equal, the first by name is taken, while variables and factors are looked at in order of their names. Of several
        cheapest plans of a long problem, the one returned may depend on what was solved in its turn.

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
    network = encoder.encode(problem) if encoder else encode(problem)
    start = reduced(network, limits)
    best = _Best(problem, network)
    program = None
    if len(network.names) > LONG and not start.run(MOST_ROWS):
        program = _program(network, limits)
    if program is None:
        best.eliminate(start)
    else:
        best.take_turns(program, start)
    assert best.states is not None
    return Solution(best.states, best.total_us, min(best.total_us, best.bound_us), "exact", limits.statistics())


def _program(network: Network, limits: SolverLimits) -> IntegerProgram | None:
    """Return a problem as an integer program; None where it has many states, or would need much memory."""
    left = arc_consistent(network)
    rows = sum(table.rows for table in left.tables.values())
    if not has_few_states(left) or rows * WRITTEN_BYTES > limits.memory_bytes:
        return None
    program = integer_program(left, network.state_counts)
    return program if program.needed_bytes <= limits.memory_bytes else None


class _Best:
    """The best plan of a problem so far, and the best bound."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self._problem, self._network = problem, network
        self.states: Mapping[str, str] | None = None
        self.total_us, self.bound_us = inf, -inf

    @property
    def is_proven(self) -> bool:
        return self.total_us <= self.bound_us

    def take_turns(self, program: IntegerProgram, start: BucketElimination) -> None:
        """Solve by an integer program and by elimination, until the plan is proven or the time is over."""
        limits, ends_at = start.limits, start.limits.ends_at
        for turn in count():
            seconds = TURN_S * 2.0**turn if ends_at is None else PROGRAM_TIME * (ends_at - monotonic())
            found = solved(program, seconds)
            self._learn(found.codes, found.bound_us)
            if self.total_us <= self.bound_us + 2 * TOLERANCE * (1 + abs(self.bound_us)):
                self.bound_us = self.total_us
                return
            limits.ends_at = monotonic() + seconds if ends_at is None else ends_at
            self.eliminate(start.copy())
            if ends_at is not None or self.is_proven:
                return

    def eliminate(self, start: BucketElimination) -> None:
        """Solve by elimination.

        Raises:
            InfeasibleError: there is no assignment.
        """
        found = cheapest(start)
        self._learn(found.plan.codes(), found.bound_us)

    def _learn(self, codes: Mapping[int, int] | None, bound_us: float | None) -> None:
        """Take a plan, if it is cheaper, and a bound; None for one that the plan itself is."""
        total_us = inf
        if codes is not None:
            states = self._network.named(codes)
            try:
                total_us = self._problem.cost_us(states)
            except ProblemError:  # HiGHS keeps to its rows up to rounding
                total_us = inf
            if total_us < self.total_us:
                self.states, self.total_us = states, total_us
        self.bound_us = max(self.bound_us, total_us if bound_us is None else bound_us)
