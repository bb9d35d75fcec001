"""What an optimum costs as a function of some variables: of each state alone, or of a few variables together."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType

import numpy as np

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.solve.conditioned import Conditioned
from autotuner.solve.consistency import whole
from autotuner.solve.exact import with_margin
from autotuner.solve.limits import MEMORY_BYTES, Limits, TooLargeError
from autotuner.solve.problem import Problem, Row, State
from autotuner.solve.splitting import split
from autotuner.solve.tables import Table, encode, join
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


def project(
    problem: Problem, variables: Sequence[str], *, memory_limit_bytes: float = MEMORY_BYTES
) -> Mapping[Row, float]:
    """Return the best total for each combination of states of some variables; what is impossible is absent.

    All others are eliminated. Where their tables would not fit, each combination is solved as by `exact`.

    Args:
        variables: to keep, few, in the order of a row's states.
        memory_limit_bytes: the most that one table may need, with what is needed to make it.

    Returns:
        row -> total in microseconds, rows in order: it can be the table of a factor over these variables.

    Raises:
        ProblemError: a variable is unknown or named twice.
    """
    unknown = sorted(set(variables) - set(problem.variables))
    if unknown:
        raise ProblemError(f"the problem has no variables {', '.join(map(repr, unknown))}")
    if len(set(variables)) != len(variables):
        raise ProblemError(f"a variable is to be kept twice: {', '.join(variables)}")
    network = encode(problem)
    kept = [network.names.index(name) for name in variables]
    try:
        ready = Conditioned(network, kept, Limits(memory_limit_bytes))
        try:
            found = _tabled(ready)
        except TooLargeError:
            found = dict(ready.totals())
    except InfeasibleError:
        return MappingProxyType({})
    named = {tuple(network.states[v][code] for v, code in zip(kept, row, strict=True)): us for row, us in found.items()}
    return MappingProxyType(dict(sorted(named.items())))


def _tabled(ready: Conditioned) -> dict[tuple[int, ...], float]:
    counts, limits = ready.state_counts, replace(ready.limits)
    tree = Tree(ready.left, counts, ready.kept, limits)
    result = Table("", (), np.zeros((0, 1), np.int32), np.full(1, tree.constant))
    for table in tree.left():
        result = join(result, table, counts, limits)
    columns = [result.column(v).tolist() for v in ready.kept]
    rows = zip(*columns, strict=True) if columns else itertools.repeat((), result.rows)
    return dict(zip(rows, result.costs.tolist(), strict=True))
