"""The cheapest assignment, proven: elimination on what cannot be ruled out by bounds."""

from autotuner.errors import InfeasibleError
from autotuner.problem import Problem, Solution
from autotuner.solvers.consistency import whole
from autotuner.solvers.elimination import Elimination
from autotuner.solvers.reduction import merged, undominated
from autotuner.solvers.tables import encode

# Tables of this many rows cost less to make than to avoid; above it, bounds drop rows first, and cases are split.
# Timed on layers of 76 operators: 30,000 to 50,000 differ by less than the clock's noise, 20,000 takes longer.
MOST_ROWS = 40_000.0
# Rows that the bounds must drop, as a share, for another round on the same variables to pay.
DROPPED = 0.15
# Rounding while costs move between tables stays far below this share of a total.
MARGIN = 1e-9


def exact(problem: Problem) -> Solution:
    """Return the assignment with the least total cost, by eliminating one variable after another.

    The problem is made arc consistent, variables that are forced to be equal become one, and states that another one
    always replaces are dropped. Variables with small results are eliminated, the smallest estimate first. Then a total
    is guessed a little above the bound, rows that no assignment within the guess can use are dropped, and elimination
    goes on; where results still grow, the states of a variable are shared between two cases. If nothing is found, the
    guess was a bound: the next one is higher.

    Args:
        problem: its parts that share no variable never meet in a table, so they are solved apart.

    Returns:
        States whose total is proven, up to rounding by less than 1e-9 of it: `lower_bound_us` equals `total_us`.
        The same problem gives the same states.

    Raises:
        InfeasibleError: the factors contradict each other; the message names where that showed.
        ProblemError: a table of the elimination would need more than 2 GiB.

    Cost:
        O(n * f**w) for n variables of f states, w of them beside one another at most; far less where bounds are tight.

    Source:
        Dechter, Bucket elimination (1999); de Givry et al., Solving Max-SAT as weighted CSP (2003) for the bounds.
    """
    network = encode(problem)
    left, choices = merged(undominated(whole(network), network.state_counts), network.state_counts)
    start = Elimination(network.names, network.state_counts, left.tables.values(), choices)
    states = network.named(_cheapest(start).codes())
    total = problem.cost_us(states)
    return Solution(states, total, total, "exact")


def _cheapest(start: Elimination) -> Elimination:
    """Return the elimination, complete, of the least total; guesses rise until one holds."""
    if start.run(MOST_ROWS):
        return start
    most = start.constant + sum(float(table.costs.max()) for table in start.tables.values())
    known = start.dive()
    # Rows dearer than a whole assignment go before any cost is moved: sums with them would be rounded more coarsely.
    most = most if known is None else known
    bound = start.tighten(_with_margin(most))
    step = (most - bound) / (32 if known is not None else 1024)
    while True:
        guess = min(most, bound + step)
        found, reason = _within(start, _with_margin(guess))
        if found is not None:
            return found
        if guess >= most:
            raise InfeasibleError(f"no assignment satisfies every factor; in the last case tried, {reason}")
        step *= 1.5


def _with_margin(total_us: float, sign: int = 1) -> float:
    return total_us + sign * MARGIN * (1 + abs(total_us))


def _within(start: Elimination, most_us: float) -> tuple[Elimination | None, str]:
    """Return the elimination of the least total up to `most_us`, or None and what stood against it last."""
    best, reason = None, ""
    cases = [start.copy()]
    while cases:
        case = cases.pop()
        try:
            halves = _solved(case, most_us)
        except InfeasibleError as error:
            reason = str(error)
            continue
        cases.extend(reversed(halves))
        if not halves and case.constant <= most_us:
            best = case
            most_us = _with_margin(case.constant, -1)
    return best, reason


def _solved(case: Elimination, most_us: float) -> list[Elimination]:
    """Eliminate every variable of a case and return nothing, or return the cases that it splits into.

    Raises:
        InfeasibleError: no assignment of this case is as cheap as `most_us`.
    """
    while True:
        before = case.rows
        case.tighten(most_us)
        few_dropped = case.rows > (1 - DROPPED) * before
        if case.run(MOST_ROWS):
            return []
        if few_dropped:
            return case.halves()
