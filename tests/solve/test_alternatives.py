"""The best plan with another state of a variable, against the totals of all assignments."""

from importlib import import_module
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import ProblemError
from autotuner.solve import Alternatives, alternatives, exact, min_marginals
from autotuner.solve.problem import Factor, Problem, Solution
from tests.solve.drawing import problems, totals
from tests.solve.generate import transformer_layer
from tests.solve.test_marginals import AB, BA, CHAIN, expected_marginals

ALTERNATIVES = import_module("autotuner.solve.alternatives")
EXACT = import_module("autotuner.solve.conditioning")
TREE = import_module("autotuner.solve.junction_tree")
SPLITTING = import_module("autotuner.solve.variable_splitting")


def others(problem: Problem, best: Solution) -> dict[str, dict[str, float]]:
    """Return the best total of each state that is not the solution's, by variable."""
    return {
        name: {state: total for state, total in of.items() if state != best.states[name]}
        for name, of in expected_marginals(problem).items()
    }


def assert_true(problem: Problem, best: Solution, found: Alternatives, most_us: float = inf) -> None:
    """Check every plan and bound; `found` was not cut by time."""
    for name, of in others(problem, best).items():
        least = min((total for total in of.values() if total <= most_us and total < inf), default=None)
        found_best = found.best(name)
        if least is None:
            assert found_best is None
            assert found.least_us[name] == most_us
            continue
        assert found_best is not None
        assert found_best[1].total_us == found_best[1].lower_bound_us == least
        assert found.least_us[name] == pytest.approx(least, rel=1e-8, abs=1e-8)
        plans = found.plans[name]
        for state, plan in plans.items():
            assert plan.states[name] == state != best.states[name]
            assert plan.total_us == problem.cost_us(plan.states) == of[state]
        assert set(plans) >= {state for state, total in of.items() if total <= min(found.complete_us, most_us)}


def test_another_state_of_a_chain_changes_the_rest_as_suits_it() -> None:
    found = alternatives(CHAIN, exact(CHAIN))
    state, plan = found.best("x") or pytest.fail("x can be ba")
    assert (state, plan.total_us, plan.states) == (BA, 12.0, {"x": BA, "y": BA, "z": AB})
    assert found.plans["y"][AB].total_us == 10.0
    assert found.best("z") is None
    assert found.least_us == {"x": 12.0, "y": 10.0, "z": inf}


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(problem=problems(), near=st.sampled_from(((), (0.1,), (0.0, 0.5), (100.0,))), hard=st.booleans())
def test_every_alternative_is_the_best_of_all_assignments_with_another_state(
    problem: Problem, near: tuple[float, ...], hard: bool
) -> None:
    if not totals(problem):
        return
    best = exact(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ALTERNATIVES, "NEAR", near)
        if hard:  # every limit is reached: bounds, cases and put-off joins are used
            patch.setattr(ALTERNATIVES, "MOST_ROWS", 0.5)
            patch.setattr(EXACT, "MOST_ROWS", 0.5)
            patch.setattr(TREE, "MOST_ROWS", 0.5)
            patch.setattr(SPLITTING, "FEWEST_ROWS", 0)
        assert_true(problem, best, alternatives(problem, best))


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(problem=problems(), above=st.integers(0, 12), near=st.sampled_from(((), (0.05,))))
def test_what_is_above_the_most_asked_for_is_not_there(problem: Problem, above: int, near: tuple[float, ...]) -> None:
    if not totals(problem):
        return
    best = exact(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ALTERNATIVES, "NEAR", near)
        most_us = best.total_us + above
        assert_true(problem, best, alternatives(problem, best, most_us=most_us), most_us)


@pytest.mark.slow
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(problem=problems(), most=st.integers(0, 3))
def test_of_too_many_near_states_the_cheapest_are_there_and_the_result_says_up_to_where(
    problem: Problem, most: int
) -> None:
    if not totals(problem):
        return
    best = exact(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ALTERNATIVES, "NEAR", (100.0,))
        patch.setattr(ALTERNATIVES, "MOST_PLANS", most)
        found = alternatives(problem, best)
    assert_true(problem, best, found)
    assert sum(plan.total_us <= found.complete_us for of in found.plans.values() for plan in of.values()) <= most


@pytest.mark.slow
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_without_time_or_memory_what_is_said_is_still_true(problem: Problem) -> None:
    if not totals(problem):
        return
    best = exact(problem)
    late = alternatives(problem, best, time_limit_s=0)
    assert not any(late.plans.values())
    for name, of in others(problem, best).items():
        assert late.least_us[name] <= min(of.values(), default=inf)
    assert_true(problem, best, alternatives(problem, best, memory_limit_bytes=1))


@pytest.mark.slow
def test_alternatives_of_a_layer_equal_its_marginals() -> None:
    layer = transformer_layer(0, rows=8, converted=False)
    best = exact(layer)
    names = [name for name in layer.variables if "operator" in name or "cover" in name] or list(layer.variables)
    within = best.total_us * 1.05
    marginals = min_marginals(layer, most_us=within)
    found = alternatives(layer, best, names)
    compared = 0
    for name in names:
        least = min((us for state, us in marginals[name].items() if state != best.states[name]), default=inf)
        _, plan = found.best(name) or (None, None)
        if plan is not None and least < inf:
            assert plan.total_us == pytest.approx(least, rel=1e-9)
            compared += 1
        else:
            assert plan is None or plan.total_us > within * (1 - 1e-9)
    assert compared > 5


def test_a_variable_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProblemError, match="no variables 'w'"):
        alternatives(CHAIN, exact(CHAIN), ["w"])


def test_a_solution_of_another_problem_is_refused() -> None:
    with pytest.raises(ProblemError, match="has no row"):
        alternatives(Problem((Factor("f", ("x",), {(AB,): 1.0}),)), Solution({"x": BA}, 1.0, 1.0, "exact"))
