"""What an optimum costs as a function of some variables, against the totals of all assignments."""

from importlib import import_module
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import ProblemError
from autotuner.solve import min_marginals
from autotuner.solve.problem import Factor, Problem
from tests.solve.drawing import problems, totals

TREE = import_module("autotuner.solve.junction_tree")
SPLITTING = import_module("autotuner.solve.variable_splitting")
AB, BA = "ab", "ba"
CHAIN = Problem(
    (
        Factor("first", ("x", "y"), {(AB, AB): 1.0, (AB, BA): 2.0, (BA, BA): 9.0}),
        Factor("second", ("y", "z"), {(AB, AB): 9.0, (BA, AB): 3.0}),
    )
)


def expected_marginals(problem: Problem) -> dict[str, dict[str, float]]:
    best = {
        name: dict.fromkeys(
            sorted({row[f.variables.index(name)] for f in problem.factors if name in f.variables for row in f.table}),
            inf,
        )
        for name in sorted(problem.variables)
    }
    for row, total in totals(problem).items():
        for name, state in zip(sorted(problem.variables), row, strict=True):
            best[name][state] = min(best[name][state], total)
    return best


def test_each_state_of_a_chain_has_the_total_of_the_best_path_through_it() -> None:
    assert min_marginals(CHAIN) == {"x": {AB: 5.0, BA: 12.0}, "y": {AB: 10.0, BA: 5.0}, "z": {AB: 5.0}}


@pytest.mark.slow
@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_marginals_are_the_best_totals_of_all_assignments(problem: Problem) -> None:
    assert min_marginals(problem) == expected_marginals(problem)


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(problem=problems(), above=st.integers(0, 12))
def test_marginals_up_to_a_total_are_the_same_and_infinite_above_it(problem: Problem, above: int) -> None:
    expected = expected_marginals(problem)
    most = min([total for of in expected.values() for total in of.values()], default=0.0) + above
    if most == inf:
        return
    within = {name: {s: t if t <= most else inf for s, t in of.items()} for name, of in expected.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TREE, "MOST_ROWS", 0)
        found = min_marginals(problem, most_us=most)
    assert {name: dict(of) for name, of in found.items()} == {
        name: pytest.approx(of, rel=1e-9, abs=1e-9) for name, of in within.items()
    }


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_wide_pairs_split_by_kinds_change_nothing(problem: Problem) -> None:
    """Problems small enough for all assignments have no table that is worth a split of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SPLITTING, "FEWEST_ROWS", 0)
        assert min_marginals(problem) == expected_marginals(problem)


def test_marginals_of_what_is_infeasible_are_infinite() -> None:
    problem = Problem((Factor("writes", ("x",), {(AB,): 1.0}), Factor("reads", ("x",), {(BA,): 1.0})))
    assert min_marginals(problem) == {"x": {AB: inf, BA: inf}}


def test_marginals_that_would_need_too_much_memory_are_refused_before_that() -> None:
    with pytest.raises(ProblemError, match=r"at most 0\.0 MiB may be used"):
        min_marginals(CHAIN, memory_limit_bytes=10)
