"""Answer of a tuning run: the configuration that a space and its measurements give, with its certificate."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic

from autotuner.checkpoint import OverError, until
from autotuner.errors import InfeasibleError
from autotuner.ir.cost import fused_bytes, moved_bytes
from autotuner.ir.models import Model
from autotuner.ir.numerics import Numerics
from autotuner.ir.records import Environment, Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Certificate, Fusion, LeanerPlan, Memory
from autotuner.plan.step import Alternative, Step, tensor_of
from autotuner.settings import package_version
from autotuner.solve import SOLVERS
from autotuner.solve.baselines import default_us
from autotuner.solve.problem import Solution
from autotuner.solve.problem.formulate import Formulation, SpaceProblem, formulate
from autotuner.space import Space
from autotuner.tuner.doubts import doubts_of, is_default_marked
from autotuner.tuner.explanation import explained
from autotuner.tuner.policy import DEFAULT_POLICY, TuningPolicy
from autotuner.tuner.progress import gap
from autotuner.tuner.solving import leaner, leaner_that_run, seconds_until, solved, spread, step_memory, worth_having
from autotuner.tuner.steps import best_by_cover, steps_of


def build_configuration(
    model: Model,
    space: Space,
    known: Mapping[str, Measurement],
    environment: Environment,
    counts: Mapping[str, int],
    *,
    solver: str = "exact",
    noise_floor: float | None = None,
    lower_bound_us: float | None = None,
    estimated_us: float | None = None,
    budget_bytes: int | None = None,
    numerics: Numerics = "exact",
    left_s: float | None = None,
    fresh: Collection[str] | None = None,
    policy: TuningPolicy = DEFAULT_POLICY,
    unpriced: SpaceProblem | None = None,
) -> Configuration:
    """Solve a space with its measurements, and write the answer down.

    Args:
        lower_bound_us: proven: no plan takes less, measured or not; None for what follows from the measurements.
        estimated_us: by learned costs, no plan takes less; None where nothing is estimated.
        budget_bytes: for the peak of memory, with what is asked of the space for it; None for none.
        numerics: the class that the space was built for. Without a budget, the plan itself is exact, and leaner ones
            need not be.
        left_s: time limit, raised to the policy's `finishing_s`. The best plan that is found until then is taken, and
            its explanation is left out. None for no limit.
        fresh: keys of what was measured for it: of all else, what could matter was measured well. None for everything.
        unpriced: the problem of the space, under a budget as for that; None to build it.

    Raises:
        InfeasibleError: some operator has no candidate that works; the message says what became of them. No plan fits
            into the budget; the message says what does.
    """
    ends_at = None if left_s is None else monotonic() + max(left_s, policy.finishing_s)
    saving = budget_bytes is not None
    unpriced = unpriced or formulate(space if saving else space.exact, saving=saving)
    problem, fastest = solved(unpriced, known, solver, budget_bytes, ends_at)
    if saving and space.narrow_calls:
        with suppress(InfeasibleError):  # an exact plan that fits may have been missed, and be no slower
            exact = solved(formulate(space.exact, saving=True), known, solver, budget_bytes, ends_at)
            if exact[1].total_us <= fastest.total_us:
                bound_us = min(exact[1].lower_bound_us, fastest.lower_bound_us)
                problem, fastest = exact[0], replace(exact[1], lower_bound_us=bound_us)
    is_free = SOLVERS[solver].exact and budget_bytes is None
    lean, plans = leaner_that_run(problem, fastest, ends_at) if is_free else (problem, [fastest])
    solution, formulation = leaner(plans), lean
    kept = [(lean, plan) for plan in spread(plans, solution)]
    if is_free and space.narrow_calls:
        wider, narrow = leaner_that_run(problem, fastest, ends_at, space)
        leanest = spread(worth_having(plans[0], [*plans, *narrow]), solution)
        kept = [(lean if any(plan is each for each in plans) else wider, plan) for plan in leanest]
    fastest_bytes = problem.problem.held_bytes(fastest.states)
    if solution.held_bytes >= fastest_bytes:
        solution, formulation = replace(fastest, held_bytes=fastest_bytes), problem
    costs = problem.costs_us
    steps = steps_of(formulation, solution, known)
    overtaking: tuple[Alternative, ...] = ()
    if is_free and fastest.gap == 0:
        limit_s = min(policy.explaining_s, seconds_until(ends_at))
        explanation = explained(problem, fastest, known, time_limit_s=limit_s, overtaking_max=policy.overtaking_max)
        both = set(problem.chosen(fastest)) & set(formulation.chosen(solution))
        alike = {name for choice in both for name in choice.cover.operators}
        steps, overtaking = explanation.with_alternatives(steps, alike), explanation.overtaking
        counts = {**counts, "overtaking": explanation.overtaking_count}
    total = sum(step.predicted_us for step in steps)
    if lower_bound_us is None:
        lower_bound_us = max(own_bests_us(space, known), _proven_us(space, known, solution))
    bound = min(lower_bound_us, total)
    unfused = fused_bytes(space.graph, [(o.inputs, o.outputs) for o in space.graph.operators])
    chosen = moved_bytes(space.graph, ([(tensor_of(n), form) for n, form in s.inputs + s.outputs] for s in steps))
    needs = step_memory(space, steps, known)
    return Configuration(
        model=model,
        graph_key=space.graph.key,
        environment=environment.to_json(),
        environment_key=environment.key,
        steps=steps,
        certificate=Certificate(
            solver=solution.solver,
            predicted_us=total,
            lower_bound_us=bound,
            proven_gap=gap(total, bound),
            estimated_gap=gap(total, estimated_us),
            low_us=sum(step.low_us for step in steps),
            high_us=sum(step.high_us for step in steps),
            baseline_us=_baseline_us(problem, ends_at),
            default_us=default_us(space, costs),
            default_is_marked=is_default_marked(space, known),
            noise_floor=noise_floor,
            statistics=dict(solution.statistics),
        ),
        fusions=tuple(_fusions(space, costs, steps)),
        counts=dict(counts),
        bytes_moved={"unfused": unfused, "chosen": chosen},
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"autotuner": package_version()},
        overtaking=overtaking,
        doubts=doubts_of(
            steps,
            set(formulation.calls(solution)),
            calls=space.calls,
            known=known,
            environment=environment,
            noise_floor=noise_floor,
            fresh=fresh,
        ),
        memory=Memory(budget_bytes, needs.held_bytes, needs.peak_bytes),
        numerics=numerics,
        leaner=tuple(_leaner_plan(space, steps_of(each, plan, known), known) for each, plan in kept),
    )


def _leaner_plan(space: Space, steps: tuple[Step, ...], known: Mapping[str, Measurement]) -> LeanerPlan:
    needs = step_memory(space, steps, known)
    return LeanerPlan(steps, sum(step.predicted_us for step in steps), needs.held_bytes, needs.peak_bytes)


def _proven_us(space: Space, known: Mapping[str, Measurement], solution: Solution) -> float:
    """Return the solution's own bound, where nothing is unknown that it leaves out."""
    return solution.lower_bound_us if space.calls.keys() <= known.keys() else 0.0


def own_bests_us(space: Space, known: Mapping[str, Measurement]) -> float:
    """Return the sum of each operator's best share of any cover, conversions free: no plan costs less.

    What is not measured yet may turn out to cost nothing.
    """
    costs_us = dict.fromkeys(space.calls.keys() - known.keys(), 0.0)
    costs_us |= {key: m.median_us for key, m in known.items() if m.median_us is not None}
    shares: dict[str, float] = {}
    for names, cost in best_by_cover(space, costs_us).items():
        for name in names:
            share = cost / len(names)
            shares[name] = min(share, shares.get(name, share))
    return sum(shares.values())


def _fusions(space: Space, costs_us: Mapping[str, float], steps: Sequence[Step]) -> Iterator[Fusion]:
    """Yield every cover of several operators with what its best candidate costs and what was chosen instead."""
    steps = [step for step in steps if not step.again]
    shares = {name: step.predicted_us / len(step.operators) for step in steps for name in step.operators}
    alone = {names[0]: us for names, us in best_by_cover(space, costs_us).items() if len(names) == 1}
    chosen = {frozenset(step.operators) for step in steps}
    best: dict[tuple[str, ...], tuple[float, str]] = {}
    for choice in space.choices:
        names = choice.cover.operators
        if len(names) > 1:
            found = (costs_us.get(choice.call.key, float("inf")), choice.candidate.kernel)
            best[names] = min(found, best.get(names, found))
    for names, (cost, kernel) in best.items():
        works = cost < float("inf")
        instead = sum(shares[name] for name in names)
        alone_us = sum(alone[name] for name in names) if alone.keys() >= set(names) else None
        yield Fusion(
            names, kernel if works else "", cost if works else None, instead, frozenset(names) in chosen, alone_us
        )


def _baseline_us(problem: Formulation, ends_at: float | None) -> float | None:
    """Return what the paper's strategy reaches on the same costs, or None where it finds no plan, or none in time."""
    try:
        with until(lambda: seconds_until(ends_at) == 0):
            return SOLVERS["shortest_path"](problem.problem).total_us
    except (InfeasibleError, OverError):
        return None
