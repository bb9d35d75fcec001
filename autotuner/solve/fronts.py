"""Every time that fewer bytes can be bought with: of a whole problem, and of a part by the states of its ends."""

from collections.abc import Mapping, Sequence
from math import floor
from types import MappingProxyType

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.solve.budgeted import Search, check_epsilon
from autotuner.solve.labelled import Encoded, encoded
from autotuner.solve.labelling import Error, Labelling
from autotuner.solve.labels import Labels
from autotuner.solve.limits import MEMORY_BYTES, Limits, TooLargeError
from autotuner.solve.prepared import prepared
from autotuner.solve.problem import Memory, Problem, Row, Solution

# A table may have so many labels.
MOST_LABELS = 200_000.0


def pareto(problem: Problem, *, epsilon: float = 0.0, memory_limit_bytes: float = MEMORY_BYTES) -> tuple[Solution, ...]:
    """Return the assignments that no other beats in both time and bytes, the fastest first, the leanest last.

    One search as by `budgeted` for each, with what the one before needs as the budget that is not allowed any more.

    Args:
        epsilon: leave out assignments that save less than this share of the bytes: of whatever assignment there is,
            one that takes no longer is returned, and it needs at most that share more.

    Returns:
        Solutions with their `memory`, each proven; of equal time and bytes, one.

    Raises:
        InfeasibleError: the factors contradict each other.

    Source:
        Haimes et al., the epsilon-constraint method (1971).
    """
    check_epsilon(epsilon)
    ready = prepared(problem, Limits(memory_limit_bytes))
    leanest, _ = ready.leanest()
    least = leanest.memory.total_bytes
    budget = max(least, ready.fastest[0].memory.total_bytes)
    found: list[Solution] = []
    while True:
        solution = Search(ready, budget, 0.0, leanest).solution("pareto")
        if found and solution.total_us <= found[-1].total_us:
            # The one before took as long for more bytes.
            found.pop()
        found.append(solution)
        needed = solution.memory.total_bytes
        if needed <= least:
            return tuple(found)
        budget = max(least, min(needed - 1, floor(needed / (1 + epsilon))))


def fronts(
    layer: Problem, ends: Sequence[str], *, epsilon: float = 0.0, memory_limit_bytes: float = MEMORY_BYTES
) -> Mapping[Row, tuple[Solution, ...]]:
    """Return, for each combination of states of some variables, the assignments that none with these states beats.

    One beats another that is no better in time, held bytes and transient bytes, and worse in one of them. All but the
    ends are eliminated with labels; nothing bounds them, so this is for layers, not for whole models.

    Args:
        ends: variables, few, in the order of a row's states.
        epsilon: an assignment may stand for others that are faster by less than this share of the layer's least time.

    Returns:
        row -> solutions with their `memory`, the fastest first; rows in order, those that are impossible left out.
        `lower_bound_us` is the least that an assignment may take for which this one stands.

    Raises:
        ProblemError: an end is unknown or named twice, or labels get too many: give an epsilon.

    Source:
        Dechter, Bucket elimination (1999), with sets of labels as costs; Warburton, Approximation of Pareto optima in
        multiple-objective, shortest-path problems (1987), for spans of time.
    """
    check_epsilon(epsilon)
    unknown = sorted(set(ends) - set(layer.variables))
    if unknown or len(set(ends)) != len(ends):
        raise ProblemError(f"the ends {', '.join(ends)} are not variables of the layer, each once; unknown: {unknown}")
    limits = Limits(memory_limit_bytes)
    found: dict[Row, list[Solution]] = {}
    try:
        ready = encoded(layer, ends)
        least_us = prepared(layer, limits).fastest[1] if epsilon else 0.0
        error = Error(epsilon * max(0.0, least_us))
        kept = [ready.network.names.index(name) for name in ends]
        whole = Labelling(ready.start, limits, kept=kept, error=error).eliminated(MOST_LABELS)
    except InfeasibleError:
        return MappingProxyType({})
    if whole is None:
        raise TooLargeError(
            f"a layer of {len(layer.variables)} variables has more than {MOST_LABELS:,.0f} labels in one table: give an"
            " epsilon, or a larger one"
        )
    for row in range(whole.rows):
        solution = _solution(layer, ready, whole, row, error.spent_us)
        found.setdefault(tuple(solution.states[name] for name in ends), []).append(solution)
    by_time = {row: sorted(each, key=lambda s: (s.total_us, s.memory)) for row, each in sorted(found.items())}
    return MappingProxyType({row: tuple(each) for row, each in by_time.items()})


def _solution(layer: Problem, ready: Encoded, whole: Labels, row: int, error_us: float) -> Solution:
    states = ready.states(whole.codes(row))
    memory = Memory(int(whole.held_bytes[row]), int(whole.transient_bytes[row]))
    total = layer.cost_us(states)
    return Solution(states, total, max(0.0, total - error_us), "fronts", memory=memory)
