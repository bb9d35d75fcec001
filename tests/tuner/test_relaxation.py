"""Looking at problems of which a part is measured: the bound is true, and the loop ends at the optimum."""

import random
from collections.abc import Mapping

import pytest

from autotuner.errors import InfeasibleError
from autotuner.measure.roofline import work_of
from autotuner.solve.problem import Factor, Problem, Solution
from autotuner.solve.problem.formulate import Formulation
from autotuner.solve.problem.ordering import CircleError
from autotuner.space import Choice
from autotuner.tuner.bounds import bounds
from autotuner.tuner.learned import Learned
from autotuner.tuner.progress import gap
from autotuner.tuner.relaxation import RelaxedProblem
from scripts.bench.plain_problem import PlainProblem
from scripts.bench.synthetic import synthetic_problem
from tests.tuner.conftest import Recorded

CHOICE = Problem((Factor("x", ("x",), {("a",): 10.0, ("b",): 8.0, ("c",): 30.0}),))
A, B, C = "x: a", "x: b", "x: c"
PAIR = Problem(tuple(Factor(name, (name,), {("a",): 10.0, ("b",): 12.0}) for name in ("x", "y")))


def test_what_the_cheapest_optimistic_plan_is_made_of_is_wanted_first() -> None:
    found = bounds(PlainProblem(CHOICE).solve, {A: 10.0}, {B: 5.0, C: 9.0})
    assert (found.best_us, found.bound_us) == (10.0, 5.0)
    assert (found.wanted, found.first) == ((B, C), 1)
    assert found.proven_gap == 1.0


def test_what_cannot_be_part_of_a_better_plan_is_not_wanted() -> None:
    found = bounds(PlainProblem(CHOICE).solve, {A: 10.0}, {B: 5.0, C: 20.0})
    assert found.wanted == (B,)
    proven = bounds(PlainProblem(CHOICE).solve, {A: 10.0, B: 8.0}, {C: 20.0})
    assert (proven.wanted, proven.proven_gap) == ((), 0.0)


def test_nothing_is_wanted_once_the_gap_is_small_enough() -> None:
    assert bounds(PlainProblem(CHOICE).solve, {A: 10.0}, {B: 8.0}, enough=0.2).wanted == (B,)
    assert bounds(PlainProblem(CHOICE).solve, {A: 10.0}, {B: 8.0}, enough=0.25).wanted == ()


def test_learned_costs_give_a_second_gap_and_never_a_lower_bound() -> None:
    found = bounds(PlainProblem(CHOICE).solve, {A: 10.0}, {B: 5.0, C: 5.0}, learned({B: 8.0, C: 25.0}))
    assert (found.bound_us, found.estimated_us) == (5.0, 8.0)
    assert (found.proven_gap, found.estimated_gap) == (1.0, 0.25)


def test_without_a_plan_of_measured_calls_there_is_a_bound_and_no_gap() -> None:
    found = bounds(PlainProblem(CHOICE).solve, {}, {A: 5.0, B: 4.0})
    assert (found.best_us, found.bound_us, found.proven_gap) == (None, 4.0, None)
    with pytest.raises(InfeasibleError):
        bounds(PlainProblem(CHOICE).solve, {}, {})


def test_a_gap_of_rounding_is_none() -> None:
    assert gap(100.0 + 1e-9, 100.0) == 0.0
    assert gap(110.0, 100.0) == pytest.approx(0.1)
    assert gap(100.0, 0.0) is gap(None, 100.0) is gap(100.0, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_loop_ends_at_the_optimum_and_no_bound_is_above_it(seed: int) -> None:
    problem, draw = PlainProblem(synthetic_problem(12, 3, seed)), random.Random(seed)
    optimistic = {key: us * draw.uniform(0.2, 1.0) for key, us in problem.calls.items()}
    best_us = problem.solve(problem.calls).total_us
    measured: dict[str, float] = {}
    while True:
        found = bounds(problem.solve, measured, left(optimistic, measured))
        assert found.bound_us <= best_us + 1e-6
        assert found.best_us is None or found.best_us >= best_us - 1e-6
        if not found.wanted:
            break
        measured |= {key: problem.calls[key] for key in found.wanted[: found.first]}
    assert found.best_us == pytest.approx(best_us)
    assert len(measured) < len(problem.calls)


@pytest.mark.slow
def test_no_plan_with_a_call_takes_less_than_is_said_of_it(recorded: Recorded) -> None:
    """Of the optimum's own calls it is the optimum at most; near it, fewer others can be part of as good a plan."""
    costs = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    found = RelaxedProblem(recorded.space).solve(costs)
    through_us = found.through_us(float("inf"))
    near_us = found.through_us(found.total_us * 1.001)
    assert through_us.keys() == costs.keys()
    assert found.keys
    assert all(through_us[key] <= found.total_us + 1e-6 for key in found.keys)
    assert all(near_us[key] == pytest.approx(found.total_us) for key in found.keys)
    assert all(through_us[key] <= us + 1e-6 for key, us in near_us.items())
    told = [sum(us <= found.total_us + 1e-6 for us in each.values()) for each in (near_us, through_us)]
    assert len(found.keys) <= told[0] < told[1] < len(costs)


def test_covers_that_depend_on_each_other_in_a_circle_are_not_chosen_together(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    free = RelaxedProblem(recorded.space).solve(costs)
    in_order, forbidden = Formulation.in_order, list[tuple[str, ...]]()

    def in_a_circle(formulation: Formulation, solution: Solution) -> tuple[Choice, ...]:
        chosen = {choice.cover.operators for choice in formulation.chosen(solution)}
        forbidden.extend([] if forbidden else sorted(chosen, key=len)[-3:])
        if chosen.issuperset(forbidden):
            raise CircleError(forbidden)
        return in_order(formulation, solution)

    monkeypatch.setattr(Formulation, "in_order", in_a_circle)
    found = RelaxedProblem(recorded.space).solve(costs)
    assert len(forbidden) == 3
    assert found.total_us > free.total_us
    near_us = found.through_us(found.total_us * 1.001)
    assert all(near_us[key] == pytest.approx(found.total_us) for key in found.keys)


def test_no_recorded_call_took_less_than_ceilings_say_that_evidence_has_lowered(recorded: Recorded) -> None:
    works = {key: work_of(call) for key, call in recorded.space.calls.items()}
    times = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    lowered = recorded.ceilings.lowered((works[key], us) for key, us in times.items())
    assert all(0 < lowered.optimistic_us(works[key]) <= us for key, us in times.items())


def test_few_recorded_calls_took_less_than_the_ceilings_alone_say(recorded: Recorded) -> None:
    """Ceilings and calls were recorded at different moments: one in fifty may be off, up to its own interval."""
    slower = [
        key
        for key, m in recorded.measurements.items()
        if m.high_us is not None and m.high_us < recorded.ceilings.optimistic_us(work_of(recorded.space.calls[key]))
    ]
    assert len(slower) <= len(recorded.measurements) / 50


def test_a_plan_that_is_expected_to_be_better_is_measured_alone() -> None:
    solve = PlainProblem(CHOICE).solve
    better = bounds(solve, {A: 10.0}, {B: 5.0, C: 6.0}, learned({B: 9.0, C: 8.0}))
    assert (better.wanted, better.first) == ((C, B), 1)
    near = bounds(solve, {A: 10.0}, {B: 5.0, C: 6.0}, learned({B: 9.97, C: 9.95}))
    assert (near.wanted, near.first) == ((B, C), 2)


def test_a_plan_is_ruled_out_by_the_fewest_calls_that_are_expected_to_do_it() -> None:
    """Both together cost 6 at least and 20 in the only plan that is known: y is expected to take 16 alone."""
    solve = PlainProblem(PAIR).solve
    sure = learned({"x: b": 10.0, "y: b": 21.0})
    told = bounds(solve, {"x: a": 10.0, "y: a": 10.0}, {"x: b": 3.0, "y: b": 3.0}, sure)
    assert told.wanted[: told.first] == ("y: b",)
    assert set(told.wanted) == {"x: b", "y: b"}
    assert set(told.following(2)) == {"x: b", "y: b"}
    assert told.following(1) == ("y: b",)
    untold = bounds(solve, {"x: a": 10.0, "y: a": 10.0}, {"x: b": 3.0, "y: b": 3.0})
    assert set(untold.wanted[: untold.first]) == {"x: b", "y: b"}


def test_plans_that_follow_are_those_that_come_next_if_calls_take_what_is_expected() -> None:
    """B is expected at 7 to 9; then C is next, at 8; and then nothing is better than A by more than the estimate."""
    solve = PlainProblem(CHOICE).solve
    found = bounds(solve, {A: 10.0}, {B: 5.0, C: 6.0}, learned({B: 7.0, C: 8.0}, {B: 9.0, C: 9.95}))
    assert found.wanted[: found.first] == (B,)
    assert found.following(1) == (B,)
    assert found.following(5) == (B, C)
    none = bounds(solve, {A: 10.0}, {B: 5.0, C: 6.0}, learned({B: 7.0, C: 8.0}, {B: 7.0, C: 8.0}))
    assert none.following(5) == (B,), "B again, and nothing new"


def left(optimistic: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    return {key: us for key, us in optimistic.items() if key not in measured}


def learned(likely: Mapping[str, float], median: Mapping[str, float] | None = None) -> Learned:
    return Learned(likely, median or likely)
