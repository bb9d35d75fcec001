"""What an optimum costs as a function of some variables: of each state alone, or of a few variables together."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.consistency import whole
from autotuner.solve.exact import with_margin
from autotuner.solve.limits import MEMORY_BYTES, Limits
from autotuner.solve.problem import Problem, State
from autotuner.solve.splitting import split
from autotuner.solve.tables import encode
from autotuner.solve.tree import Tree


def min_marginals(
    problem: Problem, *, most_us: float = inf, memory_limit_bytes: float = MEMORY_BYTES
) -> Mapping[str, Mapping[State, float]]:
    """Return the best total through each state of each variable, inf where no assignment has it.

    One pass up an elimination tree and one down it: not one solution per state. Every state counts, so only what is
    dearer than `most_us` can be ruled out by bounds first: without it, a problem can be too large for this that `exact`
    solves in a moment.

    Args:
        most_us: totals above it are not looked for, and given as inf.
        memory_limit_bytes: what all tables of the tree may need together.

    Returns:
        variable -> state -> total in microseconds; the least of each variable is the optimum. All are inf where no
        assignment satisfies every factor.

    Raises:
        ProblemError: the tables would need more memory; they are counted before they are made.
    """
    network = encode(problem)
    try:
        parts = split(whole(network), network.state_counts)
        tree = Tree(parts.left, parts.state_counts, (), Limits(memory_limit_bytes), with_margin(most_us))
        best = tree.cheapest()
        best = {v: np.where(each <= with_margin(most_us), each, inf) for v, each in best.items()}
    except InfeasibleError:
        best = {v: np.full(count, inf) for v, count in enumerate(network.state_counts)}
    return MappingProxyType(
        {
            name: MappingProxyType(dict(zip(network.states[v], best[v].tolist(), strict=True)))
            for v, name in enumerate(network.names)
        }
    )
