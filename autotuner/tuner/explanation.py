"""Explanation of a plan: for each operator the cost of the best other plan, and plans that could be faster yet."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import fsum
from time import monotonic
from types import MappingProxyType

from autotuner.checkpoint import checkpoint
from autotuner.ir.records import Measurement
from autotuner.plan.step import Alternative, Step
from autotuner.solve import Alternatives, alternatives
from autotuner.solve.problem import Solution
from autotuner.solve.problem.formulate import Formulation
from autotuner.solve.problem.ordering import CircleError
from autotuner.tuner.policy import DEFAULT_POLICY
from autotuner.tuner.steps import interval_us


@dataclass(frozen=True)
class Explanation:
    """Other plans than the chosen one.

    Args:
        by_operator: operator -> the best other way to compute it: any choice but the chosen one, whose cover, kernel or
            forms differ. Operators without another way are left out, and those that the time did not suffice for.
        overtaking: what could be better than the chosen plan within the intervals, the lowest `extra_low_us` first;
            as many as were asked for.
        overtaking_count: how many there are.
    """

    by_operator: Mapping[str, Alternative]
    overtaking: tuple[Alternative, ...]
    overtaking_count: int

    def with_alternatives(self, steps: tuple[Step, ...], alike: Collection[str]) -> tuple[Step, ...]:
        """Return steps with the best other way for the first operator of each, where there is one.

        Conversions have none, nor what backward repeats: that is told where it is computed first.

        Args:
            alike: operators that the steps compute as the plan does that was explained.
        """
        return tuple(
            replace(step, alternative=self._of(step))
            if not step.is_conversion and not step.again and step.operators[0] in alike
            else step
            for step in steps
        )

    def _of(self, step: Step) -> Alternative | None:
        return self.by_operator.get(step.operators[0])


def explained(
    formulation: Formulation,
    solution: Solution,
    known: Mapping[str, Measurement],
    *,
    time_limit_s: float | None = None,
    overtaking_max: int = DEFAULT_POLICY.overtaking_max,
) -> Explanation:
    """Return what the best plan with each other choice takes more than an optimal one.

    `extra_us` compares medians. `extra_low_us` compares the same two plans at the ends of their calls' 95 % intervals
    that suit the other one: what it executes more often at its low end, what it executes less often at its high end. A
    call that both execute equally often takes what it takes, and makes no difference. The plan is the best one by
    medians; another with the same candidate may be lower at the ends of its intervals.

    Args:
        solution: optimal, of the formulation's problem.
        known: what was measured, by call key.
        time_limit_s: when to stop looking; what was not found until then is left out.
        overtaking_max: plans listed in `Explanation.overtaking`.
    """
    if time_limit_s == 0:
        return Explanation(MappingProxyType({}), (), 0)
    ends_at = None if time_limit_s is None else monotonic() + time_limit_s
    while True:
        left_s = None if ends_at is None else max(0.0, ends_at - monotonic())
        names = [text for text, variable in formulation.variables.items() if variable.role == "operator"]
        found = alternatives(formulation.problem, solution, names, time_limit_s=left_s)
        circle = _circle(formulation, found)
        if circle is None:
            return _explanation(formulation, solution, known, found, overtaking_max)
        formulation = formulation.without(circle)


def _circle(formulation: Formulation, found: Alternatives) -> tuple[tuple[str, ...], ...] | None:
    """Return covers of some plan that depend on each other in a circle, so that it cannot run; None where all can."""
    for plans in found.plans.values():
        for plan in plans.values():
            checkpoint()
            try:
                formulation.in_order(plan)
            except CircleError as error:
                return error.covers
    return None


def _explanation(
    formulation: Formulation,
    solution: Solution,
    known: Mapping[str, Measurement],
    found: Alternatives,
    overtaking_max: int,
) -> Explanation:
    by_operator: dict[str, Alternative] = {}
    by_choice: dict[str, Alternative] = {}
    for name, plans in found.plans.items():
        checkpoint()
        for state, plan in plans.items():
            if plan.gap == 0 and state not in by_choice:
                by_choice[state] = _alternative(formulation, solution, known, state, plan)
        best = found.best(name)
        if best is not None and best[0] in by_choice:
            by_operator[formulation.variables[name].name] = by_choice[best[0]]
    overtaking = sorted(
        (each for each in by_choice.values() if each.extra_low_us < 0),
        key=lambda each: (each.extra_low_us, each.extra_us, each.operators, each.inputs, each.outputs),
    )
    return Explanation(
        MappingProxyType(by_operator),
        tuple(overtaking[:overtaking_max]),
        len(overtaking),
    )


def _alternative(
    formulation: Formulation, solution: Solution, known: Mapping[str, Measurement], state: str, plan: Solution
) -> Alternative:
    choice = formulation.choices[state]
    cover, forms = choice.cover, choice.by_tensor
    more = Counter(formulation.calls(plan))
    more.subtract(formulation.calls(solution))
    low_us = fsum(times * interval_us(known[key])[0 if times > 0 else 1] for key, times in more.items() if times)
    return Alternative(
        operators=cover.operators,
        kernel=choice.candidate.kernel,
        params=choice.candidate.params,
        inputs=tuple((name, forms[name]) for name in cover.inputs),
        outputs=tuple((name, forms[name]) for name in cover.outputs),
        extra_us=plan.total_us - solution.total_us,
        extra_low_us=low_us,
        predicted_us=known[choice.call.key].median_us,
    )
