"""Solving of a measured space: the fastest plan, or the fastest whose simulated peak of memory fits a budget."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf, sqrt
from time import monotonic

from autotuner.errors import BudgetError, InfeasibleError, ProblemError
from autotuner.ir.records import Measurement
from autotuner.plan.memory_planner import StepMemory, memory, plan_steps
from autotuner.plan.parts import LEAN_SHARE, OF_FASTEST
from autotuner.plan.step import Step
from autotuner.solve import SOLVERS, budgeted, exact
from autotuner.solve.lagrangian_dual import BudgetPlan, lagrangian_dual
from autotuner.solve.limits import SolverLimits
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.problem.formulate import Formulation, SpaceProblem, formulate, solve_in_order
from autotuner.solve.problem.ordering import CircleError
from autotuner.space import Space
from autotuner.tuner.peak_search import PeakSearch
from autotuner.tuner.steps import steps_of

BUDGET_LIMIT_S = 60.0
"""The search within a budget takes the best plan that it has found by then."""
EPSILON = 1e-3
"""A leaner plan that is proven to be so near to the fastest within a budget is good enough."""

LEAN_BYTES = 32 << 20
"""That a plan leaves, below which it is not worth looking for one that leaves less."""
LEAN_LIMIT_S = 20.0
NEAR_SHARE = 0.02
"""Of the bytes that the fastest plan leaves: what is saved is found to within so much."""
GRID = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Prices of a byte that are tried: at 1, what the fastest plan leaves would cost as much as its time. From about 0.3
on, a region's forward is better run again."""
CHEAPER = 2.5
"""The least price of the grid, divided by this, saves nothing that is dearer than the share."""
PRICES = 4
"""Further prices that are tried, each between the ones that were too low and too high."""
WORTH = 10
"""A share of time is given for so many times as large a share of the bytes."""
APART_SHARE = 0.03
"""Of the bytes that the fastest plan leaves: a leaner plan that is kept saves so much more than the one before."""
AS_FAST_US = 1e-6
"""By which the sum of the same times may differ."""
LEANER_MAX = 5
"""Plans that are kept beside the one that is taken."""


def solved(
    unpriced: SpaceProblem,
    known: Mapping[str, Measurement],
    solver: str,
    budget_bytes: int | None = None,
    ends_at: float | None = None,
) -> tuple[Formulation, Solution]:
    """Return a space's problem with its measurements, and a solution whose covers do not depend on each other.

    Where nothing has another time than at the last solution, that one is returned.

    Args:
        unpriced: the space's problem; under a budget it lets backward repeat forward operators.
        budget_bytes: for the peak of memory, simulated; the solver is `budgeted` then. None for none.
        ends_at: when to take the best plan found, by `time.monotonic`, as far as the solver can; None for no limit.

    Raises:
        InfeasibleError: some operator has no candidate that works; the message says what became of them. No plan fits
            into the budget; the message says what does.
    """
    space = unpriced.space
    must_be_computable(space, known)
    costs_us = {key: m.median_us for key, m in known.items() if m.median_us is not None}
    is_plain = solver == "exact" and budget_bytes is None
    if is_plain and unpriced.solved is not None and unpriced.solved[0].costs_us == costs_us:
        return unpriced.solved
    if budget_bytes is not None:
        return within_budget(unpriced, known, budget_bytes, ends_at)
    problem = unpriced.priced(costs_us)

    def solve(each: Formulation) -> Solution:
        if solver == "exact" and ends_at is not None:
            return exact(each.problem, time_limit_s=seconds_until(ends_at))
        return SOLVERS[solver](each.problem)

    found = solve_in_order(problem, solve)
    if is_plain and found[1].gap == 0:
        unpriced.solved = found
    return found


def must_be_computable(space: Space, known: Mapping[str, Measurement]) -> None:
    """Raise with what became of an operator's candidates where none of them works."""
    statuses: dict[str, Counter[str]] = {operator.name: Counter() for operator in space.graph.operators}
    for choice in space.choices:
        status = known[choice.call.key].status if choice.call.key in known else "not measured"
        for name in choice.cover.operators:
            statuses[name][status] += 1
    for name, counts in statuses.items():
        if not counts["ok"]:
            found = ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none exists"
            raise InfeasibleError(
                f"operator {name!r} has no candidate that works ({found}): `autotuner tune` measures what is missing, "
                "`autotuner tune --retry` what has failed"
            )


def step_memory(space: Space, steps: Sequence[Step], known: Mapping[str, Measurement]) -> StepMemory:
    """Return what a step of training needs, with the kernels' workspaces as they were measured."""
    plan = plan_steps(space.graph, steps, device_type=space.device_type)
    return memory(plan, {key: found.workspace_bytes for key, found in known.items()})


def seconds_until(ends_at: float | None) -> float:
    """Return the seconds until a moment, by `time.monotonic`; infinite for None."""
    return inf if ends_at is None else max(0.0, ends_at - monotonic())


def within_budget(
    unpriced: SpaceProblem, known: Mapping[str, Measurement], budget_bytes: int, ends_at: float | None = None
) -> tuple[Formulation, Solution]:
    """Return the fastest plan found whose simulated peak fits, with a bound below which no plan that fits lies.

    Args:
        unpriced: the space's problem.
        known: what was measured, by call key.
        budget_bytes: of the peak.
        ends_at: when to take the best plan that fits, by `time.monotonic`; at the latest after `BUDGET_LIMIT_S`.

    Returns:
        What was solved, and its solution: proven for small problems, and else as far as `PeakSearch` comes.

    Raises:
        BudgetError: no plan fits, or none was found; the message says what the leanest one needs.
        InfeasibleError: the factors contradict each other.
    """

    def simulate(formulation: Formulation, solution: Solution) -> StepMemory:
        return step_memory(unpriced.space, steps_of(formulation, solution, known), known)

    latest = monotonic() + BUDGET_LIMIT_S
    search = PeakSearch(unpriced, known, simulate, latest if ends_at is None else min(ends_at, latest))
    search.run(budget_bytes)
    bound_us, is_proven = search.bound_us, search.is_proven
    if search.best is None:
        search.look_for_leaner()
    best = search.best
    if best is None:
        raise _too_small(search, budget_bytes, is_proven=is_proven)
    found = best.solution
    return best.formulation, replace(found, lower_bound_us=min(bound_us, found.total_us))


def _too_small(search: PeakSearch, budget_bytes: int, *, is_proven: bool) -> BudgetError:
    """Return the error that no plan fits, with the leanest plan found; that of a small problem is searched for."""
    within, is_least = budget_bytes, is_proven and budget_bytes + 1 >= search.leanest.peak_bytes
    while search.is_small and within < search.leanest.peak_bytes - 1 and not search.is_late:
        within = int(search.leanest.peak_bytes) - 1
        search.run(within, any_plan=True)
        is_least = search.best is None and search.is_proven
    needs = search.leanest.needs
    assert needs is not None
    most = needs.peak_bytes
    proof = ", and none needs less" if is_least else ""
    return BudgetError(
        f"no plan fits into {budget_bytes:,} bytes: the smallest that was found needs {most:,} bytes beside parameters "
        f"and inputs{proof}. {needs.outputs_bytes:,} are for the output and gradients, {needs.arena_bytes:,} for "
        "copies of inputs and all else that is live at one time "
        f"({needs.held_bytes:,} are kept from forward to backward), and {needs.workspace_bytes:,} for the workspace of "
        f"a kernel; ask for {most:,} or more",
        most,
        is_proven=is_proven,
    )


def leaner_that_run(
    formulation: Formulation, fastest: Solution, ends_at: float | None, space: Space | None = None
) -> tuple[Formulation, list[Solution]]:
    """Return the plans of `leaner_plans`, without those whose covers depend on each other, and what they solve.

    In these, backward may run operators of forward again, each by itself: weights are cast once more, say. The first
    plan is as fast as the fastest, and may leave other bytes. Where nothing can be saved it is the fastest, alone.

    Args:
        formulation: what `fastest` solves.
        ends_at: when to take what is found, by `time.monotonic`; None for after some seconds.
        space: where to look for leaner plans: a larger one than that of `formulation`, which it is by default.
    """
    if formulation.problem.held_bytes(fastest.states) < LEAN_BYTES or not seconds_until(ends_at):
        return formulation, [fastest]
    seconds = min(LEAN_LIMIT_S, seconds_until(ends_at))
    lean, first = formulation, fastest
    with suppress(ProblemError):  # it is too large
        repeating = formulate(space or formulation.offered.space, saving=True).priced(formulation.costs_us)
        found = solve_in_order(repeating, lambda each: exact(each.problem, time_limit_s=seconds))
        if found[1].total_us <= fastest.total_us + AS_FAST_US:  # otherwise it was not found in time
            lean, first = found[0], replace(fastest, states=found[1].states)

    def runs(solution: Solution) -> bool:
        try:
            lean.in_order(solution)
        except CircleError:
            return False
        return True

    first, *others = leaner_plans(lean.problem, first, ends_at)
    plans = [first, *filter(runs, others)]
    alike = sum(plan.total_us <= first.total_us + AS_FAST_US for plan in plans)
    return lean, plans[alike - 1 :]


def leaner(plans: Sequence[Solution]) -> Solution:
    """Return the leanest of the plans that are as fast as the first within a share, as far as bytes are worth time."""
    found = fastest = plans[0]
    for plan in plans[1:]:
        slower = (plan.total_us - found.total_us) / fastest.total_us
        saved = (found.held_bytes - plan.held_bytes) / fastest.held_bytes
        if plan.total_us <= fastest.total_us * (1 + LEAN_SHARE) and saved >= WORTH * slower:
            found = plan
    if found is fastest:
        return fastest
    told = dict(zip(OF_FASTEST, (fastest.total_us, fastest.held_bytes, found.held_bytes), strict=True))
    return replace(found, statistics={**fastest.statistics, **told})


def leaner_plans(problem: Problem, fastest: Solution, ends_at: float | None = None) -> list[Solution]:
    """Return the fastest plan, and plans found that leave fewer bytes for backward: each slower than the one before.

    Plans that are cheapest at some price of a byte are looked at first. Between the leanest of these that is as fast as
    the fastest within a share and the next one, those of least time within budgets are looked at as well. Where nothing
    can be saved, or not much, the fastest is alone.

    Args:
        fastest: a solution; its bound stays that of each.
        ends_at: when to take what is found, by `time.monotonic`; None for after some seconds.
    """
    fastest_bytes = problem.held_bytes(fastest.states)
    fastest = replace(fastest, held_bytes=fastest_bytes)
    seconds = min(LEAN_LIMIT_S, seconds_until(ends_at))
    if fastest_bytes < LEAN_BYTES or not seconds:
        return [fastest]
    most_us = fastest.total_us * (1 + LEAN_SHARE)
    limits = SolverLimits(ends_at=monotonic() + seconds)
    dual = lagrangian_dual(problem, limits)
    found = [fastest]

    def priced(times: float) -> BudgetPlan:
        plan, _ = dual.at(dual.given, times * fastest.total_us / fastest_bytes)
        found.append(replace(fastest, states=plan.states, total_us=plan.time_us, held_bytes=plan.held_bytes))
        return plan

    held_bytes, too_few, low, high = fastest_bytes, 0, 0.0, inf
    for times in GRID:
        if limits.over:
            break
        plan = priced(times)
        if plan.time_us > most_us:
            high, too_few = min(high, times), max(too_few, plan.held_bytes)
        else:
            low, held_bytes = max(low, times), min(held_bytes, plan.held_bytes)
    low = low or GRID[0] / CHEAPER
    for _ in range(PRICES if high < inf else 0):
        if limits.over or held_bytes - too_few <= NEAR_SHARE * fastest_bytes:
            break
        times = sqrt(low * high)
        plan = priced(times)
        if plan.time_us > most_us:
            high, too_few = times, max(too_few, plan.held_bytes)
        else:
            low, held_bytes = times, min(held_bytes, plan.held_bytes)
    while held_bytes - too_few > NEAR_SHARE * fastest_bytes and not limits.over:
        between = (held_bytes + too_few) // 2
        try:
            limit_s = seconds_until(limits.ends_at) / 2
            within = budgeted(problem, between, time_limit_s=limit_s, epsilon=EPSILON, ready=dual)
        except BudgetError:
            too_few = between
            continue
        found.append(replace(fastest, states=within.states, total_us=within.total_us, held_bytes=within.held_bytes))
        if within.total_us > most_us:
            too_few = between
        else:
            held_bytes = within.held_bytes
    return worth_having(fastest, found)


def worth_having(fastest: Solution, found: Sequence[Solution]) -> list[Solution]:
    """Return the fastest plan and others up to the leanest, without those that another one beats."""
    kept = [fastest]
    for plan in sorted(found, key=lambda plan: (plan.total_us, plan.held_bytes)):
        if plan.held_bytes < kept[-1].held_bytes:
            kept.append(plan)
    return kept


def spread(plans: Sequence[Solution], behind: Solution) -> list[Solution]:
    """Return of plans that are leaner than one of them a few, each of which leaves clearly less than the one before."""
    first_bytes = plans[0].held_bytes
    chosen: list[Solution] = []
    last_bytes = behind.held_bytes
    for plan in plans:
        if plan.total_us > behind.total_us and last_bytes - plan.held_bytes >= APART_SHARE * first_bytes:
            chosen.append(plan)
            last_bytes = plan.held_bytes
    return chosen if len(chosen) <= LEANER_MAX else [*chosen[: LEANER_MAX - 1], chosen[-1]]
