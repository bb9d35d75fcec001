"""Linear relaxation of a compact program: a bound, and a plan where it is nearly whole, in a fifth of HiGHS's time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.conditioning import MOST_ROWS, with_margin
from autotuner.solve.integer_program import IntegerProgram
from autotuner.solve.limits import SolverLimits
from scripts.bench.solvers.elimination import cheaper, parts

# Writing a linear program and solving it with HiGHS needs so many bytes for each entry.
BYTES = 450.0
# An x that is less than 1 by more than this is no whole one.
WHOLE = 1e-6
# What is not whole is looked for this share above its own bound at first, then further, with so many cases.
STEP = 0.004
RAISED = 1.5
MOST_CASES = 8


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A point of the relaxation, and a bound below which no plan lies.

    Args:
        reduced_us: by how much a plan with each x lies above the bound at least; negative where nothing is known.
    """

    x: NDArray[np.float64]
    bound_us: float
    reduced_us: NDArray[np.float64]

    def above(self, most_us: float) -> NDArray[np.bool_]:
        """Say of each x whether no plan that costs `most_us` or less has it."""
        known: NDArray[np.bool_] = with_margin(self.bound_us, -1) + self.reduced_us > with_margin(most_us, 1)
        return known


def relaxed(program: IntegerProgram, time_limit_s: float = inf) -> Relaxed | None:
    """Solve a program whose columns need not be whole, with HiGHS's dual simplex method; None where time is over.

    Raises:
        InfeasibleError: there is no point, so there is no assignment.
    """
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    if not len(program.costs):
        return Relaxed(np.zeros(0), program.constant, np.zeros(0))
    matrix = program.matrix.tocsr()
    is_equal = program.lowest == program.highest
    rows = matrix[~is_equal], program.highest[~is_equal], matrix[is_equal], program.highest[is_equal]
    # HiGHS's presolve finds little here, in as much time as the rest takes.
    options = {"presolve": False} | ({} if time_limit_s == inf else {"time_limit": max(0.0, time_limit_s)})
    found = linprog(program.costs, *rows, method="highs-ds", options=options)
    if found.status == 2:
        raise InfeasibleError("no assignment satisfies every factor")
    if found.status:
        return None
    prices = np.zeros(len(program.lowest))
    prices[is_equal] = found.eqlin.marginals
    # Any prices give a bound, if those of inequalities are not above 0: rounding in HiGHS cannot lift it.
    prices[~is_equal] = np.minimum(found.ineqlin.marginals, 0.0)
    reduced = program.costs - program.matrix.T @ prices
    bound_us = program.constant + float(prices @ program.highest) + float(np.minimum(reduced, 0.0).sum())
    return Relaxed(found.x, with_margin(bound_us, -1), reduced)


def rounded(
    left: Consistent, state_counts: Sequence[int], program: IntegerProgram, near: Relaxed, limits: SolverLimits
) -> Mapping[int, int] | None:
    """Return cheap states of all variables, of which each has the state that is whole at a point, if there is one.

    Returns:
        None where there are none, or none that are found with some effort. Tables of variables that all are whole are
        not looked at: they may forbid the states.
    """
    codes = {}
    for v in left.domains:
        columns = program.column_of[program.first[v] : program.first[v + 1]]
        share = np.where(columns >= 0, near.x[columns], 0.0)
        if share.max() >= 1 - WHOLE:
            codes[v] = int(share.argmax())
    try:
        rest = BucketElimination(left.names, state_counts, (), limits)
        rest._replace(_beside(left, codes))
        codes |= rest.codes()
        for part in parts(rest):
            plan = part if part.run(MOST_ROWS) else _cheap(part)
            if plan is None:
                return None
            codes |= plan.codes()
    except InfeasibleError:
        return None
    return codes


def _beside(left: Consistent, codes: Mapping[int, int]) -> Consistent:
    """Return what is left of the tables with any variable that has no state here, when the others have theirs.

    Raises:
        InfeasibleError: nothing is left of some table.
    """
    tables = {place: table for place, table in left.tables.items() if not codes.keys() >= set(table.variables)}
    readers: dict[int, list[int]] = {}
    for place, table in tables.items():
        for v in table.variables:
            readers.setdefault(v, []).append(place)
    domains = {v: left.domains[v] for v in readers}
    only = {v: np.arange(len(domain)) == codes[v] for v, domain in domains.items() if v in codes}
    return Consistent(left.names, tables, domains, readers).narrowed(only)


def _cheap(part: BucketElimination) -> BucketElimination | None:
    """Return a cheap assignment; the first one that is found at all where that takes too many cases.

    Raises:
        InfeasibleError: there is none.
    """
    step_us = STEP * (1 + abs(part.bound_us))
    return cheaper(part, part.most_us, step_us, RAISED, MOST_CASES) or part.dive()
