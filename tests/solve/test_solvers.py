"""Every solver of the dict against exhaustive search; costs are integers, so that totals can be compared exactly."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.solve import SOLVERS, Solver, exact
from autotuner.solve.problem import Factor, Problem, Row, Solution
from scripts.bench.brute_force import brute_force
from tests.solve.drawing import problems, shuffled
from tests.solve.generate import transformer_layer

EXACT = import_module("autotuner.solve.conditioning")
SHORTEST_PATH = import_module("autotuner.solve.baselines")
SPLITTING = import_module("autotuner.solve.variable_splitting")
TABLES = import_module("autotuner.solve.tables")
AB, BA = "ab", "ba"


@pytest.fixture(params=SOLVERS, ids=str)
def solve(request: pytest.FixtureRequest) -> Solver:
    return SOLVERS[request.param]


def solution_or_none(solver: Callable[[Problem], Solution], problem: Problem) -> Solution | None:
    try:
        return solver(problem)
    except InfeasibleError:
        return None


def assert_solved_as_exhaustively(problem: Problem) -> None:
    best = solution_or_none(brute_force, problem)
    for name, solver in SOLVERS.items():
        found = solution_or_none(solver, problem)
        if best is None:
            assert found is None, name
            continue
        assert found is not None, name
        assert found.solver == name
        assert set(found.states) == set(problem.variables)
        assert found.total_us == problem.cost_us(found.states)
        assert found.lower_bound_us <= best.total_us <= found.total_us
        if solver.exact:
            assert found.total_us == best.total_us
            assert found.lower_bound_us == found.total_us


@pytest.mark.slow
@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_exact_solvers_equal_exhaustive_search_and_baselines_are_feasible_and_never_better(problem: Problem) -> None:
    assert_solved_as_exhaustively(problem)


@pytest.mark.slow
@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_the_same_holds_where_every_limit_is_reached(problem: Problem) -> None:
    """Problems small enough for exhaustive search meet no limit of their own: bounds and cases would never be used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXACT, "MOST_ROWS", 0.5)
        patch.setattr(SHORTEST_PATH, "MOST_BACKTRACKS", 0)
        patch.setattr(TABLES, "DENSE_KEYS", 0)
        patch.setattr(SPLITTING, "FEWEST_ROWS", 0)
        assert_solved_as_exhaustively(problem)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_bounds_and_cases_change_nothing_for_a_layer_of_a_transformer(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    problem = transformer_layer(seed, rows=4)
    with_bounds = SOLVERS["exact"](problem).total_us
    monkeypatch.setattr(EXACT, "MOST_ROWS", float("inf"))
    assert with_bounds == pytest.approx(SOLVERS["exact"](problem).total_us, rel=1e-12)
    assert with_bounds <= SOLVERS["shortest_path"](problem).total_us


def triangle(states: int) -> Problem:
    """Return three variables with a random cost for each pair of states: eliminating one makes a table of all three."""
    draw = random.Random(0)
    costs: dict[Row, float] = {(f"s{i}", f"s{j}"): draw.randint(0, 99) for i in range(states) for j in range(states)}
    return Problem(tuple(Factor(f"{a} {b}", (a, b), dict(costs)) for a, b in (("x", "y"), ("x", "z"), ("y", "z"))))


def test_no_table_needs_more_memory_than_there_may_be() -> None:
    problem = triangle(30)
    wide = exact(problem)
    assert wide.statistics["largest_rows"] == 30**3
    tight = exact(problem, memory_limit_bytes=100_000)
    assert 0 < tight.statistics["largest_bytes"] <= 100_000 < wide.statistics["largest_bytes"]
    assert tight.total_us == tight.lower_bound_us == wide.total_us


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_exact_holds_where_hardly_any_table_fits(problem: Problem) -> None:
    best = solution_or_none(brute_force, problem)
    if best is not None:
        assert exact(problem, memory_limit_bytes=1) == replace(best, solver="exact", states=ANY)


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_when_the_time_is_over_there_is_a_plan_with_a_true_bound(problem: Problem) -> None:
    best = solution_or_none(brute_force, problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXACT, "MOST_ROWS", 0.5)
        if best is None:
            with pytest.raises(InfeasibleError):
                exact(problem, time_limit_s=0)
            return
        found = exact(problem, time_limit_s=0)
    assert found.total_us == problem.cost_us(found.states)
    assert found.lower_bound_us <= best.total_us <= found.total_us


@pytest.mark.slow
def test_a_layer_has_a_plan_before_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXACT, "MOST_ROWS", 30.0)
    problem = transformer_layer(0, rows=4)
    early, late = exact(problem, time_limit_s=0), exact(problem)
    assert early.lower_bound_us < late.total_us == late.lower_bound_us <= early.total_us
    assert early.gap > 0
    assert late.statistics["estimated_bytes"] > late.statistics["largest_bytes"] > 0
    assert early.statistics["cases"] < late.statistics["cases"]


def test_infeasible_problems_name_a_few_factors_that_contradict_each_other() -> None:
    steps = [Factor(f"step {i}", (f"v{i}", f"v{i + 1}"), {(AB, AB): 1.0, (BA, BA): 1.0}) for i in range(9)]
    ends = [Factor("makes", ("v3",), {(AB,): 0.0}), Factor("reads", ("v5",), {(BA,): 0.0})]
    with pytest.raises(InfeasibleError, match="'makes', 'reads', 'step 3', 'step 4' contradict each other"):
        exact(Problem((*steps, *ends)))


@pytest.mark.slow
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(problem=problems(), seed=st.integers(0, 2**32))
def test_the_order_of_factors_variables_and_rows_does_not_change_the_solution(problem: Problem, seed: int) -> None:
    other = shuffled(problem, seed)
    for solver in SOLVERS.values():
        assert solution_or_none(solver, problem) == solution_or_none(solver, other)


def test_the_best_whole_is_not_made_of_the_best_parts(solve: Solver) -> None:
    problem = Problem(
        (
            Factor("fast alone", ("x", "y"), {(AB, AB): 1.0, (AB, BA): 2.0}),
            Factor("next", ("y", "z"), {(AB, AB): 9.0, (BA, AB): 3.0}),
        ),
        chain=("x", "y", "z"),
    )
    solution = solve(problem)
    assert solution.total_us == 5.0
    assert solution.states == {"x": AB, "y": BA, "z": AB}


def test_a_residual_edge_is_seen_by_exact_solvers_only(solve: Solver) -> None:
    path = [Factor(f"step {i}", (f"v{i}", f"v{i + 1}"), {(AB, AB): 1.0, (BA, BA): 2.0}) for i in range(4)]
    residual = Factor("residual", ("v0", "v4"), {(AB, AB): 10.0, (BA, BA): 0.0})
    solution = solve(Problem((*path, residual), chain=tuple(f"v{i}" for i in range(5))))
    assert solution.total_us == (14.0 if solve is SOLVERS["shortest_path"] else 8.0)


def test_a_path_that_the_rest_contradicts_is_given_up_as_far_as_needed(solve: Solver) -> None:
    cheap = Factor("cheap", ("x", "y"), {(AB, AB): 0.0, (BA, BA): 7.0})
    # No pair of states of p and q is arc inconsistent, but with x = y = ab none is left.
    rows: list[Row] = list(itertools.product((AB, BA), repeat=3))
    odd = {row: 0.0 for row in rows if row.count(AB) % 2}
    even = {row: 0.0 for row in rows if row.count(AB) % 2 == 0}
    problem = Problem(
        (
            cheap,
            Factor("odd", ("x", "p", "q"), odd),
            Factor("even", ("y", "p", "q"), even | {(BA, AB, AB): 0.0, (BA, AB, BA): 0.0}),
        ),
        chain=("x", "y"),
    )
    assert solve(problem).states["x"] == BA
    assert solve(problem).total_us == 7.0


def test_a_problem_without_factors_costs_nothing(solve: Solver) -> None:
    assert solve(Problem(())) == Solution({}, 0.0, 0.0, solve(Problem(())).solver)


def test_a_factor_without_variables_is_a_constant(solve: Solver) -> None:
    assert solve(Problem((Factor("start", (), {(): 3.0}), Factor("x", ("x",), {(AB,): 1.0})))).total_us == 4.0


@pytest.mark.parametrize("factor", [Factor("none", (), {}), Factor("none", ("x",), {})])
def test_a_factor_without_rows_is_infeasible(solve: Solver, factor: Factor) -> None:
    with pytest.raises(InfeasibleError):
        solve(Problem((factor,)))


@pytest.mark.parametrize("name", ["exact", "shortest_path"])
def test_a_contradiction_of_two_neighbours_is_named(name: str) -> None:
    problem = Problem((Factor("writes", ("x",), {(AB,): 1.0}), Factor("reads", ("x", "y"), {(BA, AB): 1.0})))
    with pytest.raises(InfeasibleError, match=r"'reads'.*'x'"):
        SOLVERS[name](problem)


def test_a_contradiction_around_a_circle_is_infeasible(solve: Solver) -> None:
    differ: dict[Row, float] = {(AB, BA): 0.0, (BA, AB): 0.0}
    circle = [Factor(f"{a}{b}", (a, b), differ) for a, b in ("xy", "yz", "zx")]
    with pytest.raises(InfeasibleError):
        solve(Problem(tuple(circle)))


def test_exhaustive_search_refuses_what_would_take_too_long() -> None:
    states: dict[Row, float] = {(f"s{i}",): 0.0 for i in range(10)}
    problem = Problem(tuple(Factor(f"f{v}", (f"v{v}",), states) for v in range(7)))
    with pytest.raises(ProblemError, match="10,000,000"):
        brute_force(problem)


def test_there_is_an_exact_solver_and_there_are_baselines() -> None:
    assert {name: solver.exact for name, solver in SOLVERS.items()} == {
        "exact": True,
        "shortest_path": False,
        "greedy": False,
    }
