"""Bounds of the best total through each state: true, and met by the optimum."""

from hypothesis import given

from autotuner.errors import InfeasibleError
from autotuner.solve import least_through, min_marginals
from autotuner.solve.problem import Factor, Problem
from tests.solve.drawing import problems


def test_the_bound_of_a_chain_is_met() -> None:
    problem = Problem((
        Factor("x", ("x",), {("a",): 1.0, ("b",): 4.0}),
        Factor("x with y", ("x", "y"), {("a", "a"): 5.0, ("b", "a"): 0.0, ("b", "b"): 3.0}),
    ))  # fmt: skip
    assert least_through(problem) == {"x": {"a": 6.0, "b": 4.0}, "y": {"a": 4.0, "b": 7.0}}


@given(problems())
def test_no_bound_is_above_the_best_total_through_its_state(problem: Problem) -> None:
    best = min_marginals(problem)
    try:
        least = least_through(problem)
    except InfeasibleError:
        assert all(us == float("inf") for states in best.values() for us in states.values())
        return
    for name, states in best.items():
        for state, us in states.items():
            assert least[name][state] <= us + 1e-6
