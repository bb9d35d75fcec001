"""Every solver of the dict against exhaustive search; costs are integers, so that totals can be compared exactly."""

import itertools
import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.problem import Factor, Problem, Row, Solution
from autotuner.solvers import SOLVERS, Solver, independent_bound_us

EXACT = import_module("autotuner.solvers.exact")
SHORTEST_PATH = import_module("autotuner.solvers.shortest_path")
TABLES = import_module("autotuner.solvers.tables")
transformer_layer: Callable[..., Problem] = run_path(str(Path(__file__).with_name("generate.py")))["transformer_layer"]
AB, BA = "ab", "ba"
ORACLE = SOLVERS["brute_force"]


@pytest.fixture(params=SOLVERS, ids=str)
def solve(request: pytest.FixtureRequest) -> Solver:
    return SOLVERS[request.param]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Chains with residual edges, several readers of one variable, equalities, wide factors; some are infeasible."""
    count = draw(st.integers(1, 6))
    names = [f"v{i}" for i in range(count)]
    state_counts = {name: draw(st.integers(1, 4)) for name in names}
    scopes = [tuple(pair) for pair in itertools.pairwise(names) if draw(st.booleans())]
    scopes += draw(st.lists(st.permutations(names).map(lambda p: tuple(p[: min(2, count)])), max_size=4))
    scopes += draw(st.lists(st.permutations(names).map(lambda p: tuple(p[: min(4, count)])), max_size=2))
    scopes += [(name,) for name in names if draw(st.booleans())]
    # Drawing every cost with hypothesis would be slow: a seed fills the tables.
    fill = random.Random(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from((0.3, 0.6, 0.9, 1.0)))
    most = draw(st.sampled_from((0, 2, 50)))
    factors = []
    for number, scope in enumerate(scopes):
        rows: list[Row] = list(itertools.product(*([f"s{i}" for i in range(state_counts[v])] for v in scope)))
        kept = [row for row in rows if fill.random() < share]
        if len(scope) == 2 and fill.random() < 0.2:
            kept = [row for row in rows if row[0] == row[1]]
        fill.shuffle(kept)
        factors.append(Factor(f"f{number}", scope, {row: float(fill.randint(0, most)) for row in kept}))
    named = {v for factor in factors for v in factor.variables}
    chain = tuple(name for name in names if name in named and draw(st.booleans()))
    return Problem(tuple(factors), chain)


def solution_or_none(solver: Solver, problem: Problem) -> Solution | None:
    try:
        return solver(problem)
    except InfeasibleError:
        return None


def assert_solved_as_exhaustively(problem: Problem) -> None:
    best = solution_or_none(ORACLE, problem)
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
    if best is not None:
        assert independent_bound_us(problem) <= best.total_us


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_exact_solvers_equal_exhaustive_search_and_baselines_are_feasible_and_never_better(problem: Problem) -> None:
    assert_solved_as_exhaustively(problem)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_the_same_holds_where_every_limit_is_reached(problem: Problem) -> None:
    """Problems small enough for exhaustive search meet no limit of their own: bounds and cases would never be used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXACT, "MOST_ROWS", 0.5)
        patch.setattr(SHORTEST_PATH, "MOST_BACKTRACKS", 0)
        patch.setattr(TABLES, "DENSE_KEYS", 0)
        assert_solved_as_exhaustively(problem)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_and_cases_change_nothing_for_a_layer_of_a_transformer(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    problem = transformer_layer(seed, rows=4)
    with_bounds = SOLVERS["exact"](problem).total_us
    monkeypatch.setattr(EXACT, "MOST_ROWS", float("inf"))
    assert with_bounds == pytest.approx(SOLVERS["exact"](problem).total_us, rel=1e-12)
    assert with_bounds <= SOLVERS["shortest_path"](problem).total_us


def test_a_table_above_the_memory_limit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TABLES, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(EXACT, "MOST_ROWS", float("inf"))
    draw = random.Random(0)
    costs: dict[Row, float] = {(f"s{i}", f"s{j}"): draw.random() for i in range(60) for j in range(60)}
    pairs = [("hub", "v0"), ("hub", "v1"), ("v0", "v1")]
    problem = Problem(tuple(Factor(f"{a} {b}", (a, b), costs) for a, b in pairs))
    with pytest.raises(ProblemError, match="216,000 rows over 3 variables"):
        SOLVERS["exact"](problem)


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(problem=problems(), seed=st.integers(0, 2**32))
def test_the_order_in_which_a_table_was_filled_does_not_change_the_solution(problem: Problem, seed: int) -> None:
    draw = random.Random(seed)
    shuffled = Problem(
        tuple(
            Factor(factor.name, factor.variables, dict(draw.sample(list(factor.table.items()), len(factor.table))))
            for factor in problem.factors
        ),
        problem.chain,
    )
    for solver in SOLVERS.values():
        assert solution_or_none(solver, problem) == solution_or_none(solver, shuffled)


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
    assert independent_bound_us(problem) == 4.0


def test_a_residual_edge_is_seen_by_exact_solvers_only(solve: Solver) -> None:
    path = [Factor(f"step {i}", (f"v{i}", f"v{i + 1}"), {(AB, AB): 1.0, (BA, BA): 2.0}) for i in range(4)]
    residual = Factor("residual", ("v0", "v4"), {(AB, AB): 10.0, (BA, BA): 0.0})
    solution = solve(Problem((*path, residual), chain=tuple(f"v{i}" for i in range(5))))
    assert solution.total_us == (8.0 if solve.exact else 14.0)


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
    assert independent_bound_us(Problem(tuple(circle))) == 0.0
    with pytest.raises(InfeasibleError):
        solve(Problem(tuple(circle)))


def test_exhaustive_search_refuses_what_would_take_too_long() -> None:
    states: dict[Row, float] = {(f"s{i}",): 0.0 for i in range(10)}
    problem = Problem(tuple(Factor(f"f{v}", (f"v{v}",), states) for v in range(7)))
    with pytest.raises(ProblemError, match="10,000,000"):
        ORACLE(problem)


def test_there_are_exact_solvers_and_a_baseline() -> None:
    assert {name: solver.exact for name, solver in SOLVERS.items()} == {
        "exact": True,
        "shortest_path": False,
        "brute_force": True,
    }
