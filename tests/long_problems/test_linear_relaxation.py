"""The linear relaxation of a compact program: its bound is true whatever HiGHS returns, its rounded plans are plans."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import InfeasibleError
from autotuner.solve import exact
from autotuner.solve.arc_consistency import arc_consistent
from autotuner.solve.integer_program import integer_program
from autotuner.solve.limits import SolverLimits
from autotuner.solve.pairs import Pairs, pairs
from autotuner.solve.problem import Factor, Problem, Row
from autotuner.solve.tables import encode
from scripts.bench.brute_force import brute_force
from scripts.bench.solvers.linear_relaxation import relaxed, rounded
from scripts.bench.solvers.long_problems import solve_long
from scripts.bench.synthetic import synthetic_problem
from tests.solve.drawing import problems

LONG = import_module("scripts.bench.solvers.long_problems")
PAIRS = import_module("autotuner.solve.pairs")
RELAXATION = import_module("scripts.bench.solvers.linear_relaxation")


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(problem=problems(), rows=st.sampled_from((0.5, 4_500.0)), cases=st.sampled_from((0, 8)))
def test_the_bound_is_not_above_the_optimum_nor_a_rounded_plan_below_it(
    problem: Problem, rows: float, cases: int
) -> None:
    network = encode(problem)
    try:
        left = arc_consistent(network)
        best = brute_force(problem).total_us
    except InfeasibleError:
        return
    program = integer_program(left, network.state_counts)
    found = relaxed(program)
    assert found is not None
    assert found.bound_us <= best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RELAXATION, "MOST_ROWS", rows)
        patch.setattr(RELAXATION, "MOST_CASES", cases)
        codes = rounded(left, network.state_counts, program, found, SolverLimits())
    if codes is not None:
        assert problem.cost_us(network.named(codes)) >= best


def test_of_a_long_problem_both_are_near_the_optimum() -> None:
    problem = synthetic_problem(150, 4)
    network = encode(problem)
    left = arc_consistent(network)
    program = integer_program(left, network.state_counts)
    found = relaxed(program)
    assert found is not None
    codes = rounded(left, network.state_counts, program, found, SolverLimits())
    assert codes is not None
    best = exact(problem).total_us
    assert best * 0.998 < found.bound_us <= best <= problem.cost_us(network.named(codes)) < best * 1.002
    assert relaxed(program, 0.0) is None


@pytest.mark.parametrize("given_gap", [0.0, 0.002])
def test_large_problems_are_relaxed_and_go_on_only_where_a_gap_is_left(
    given_gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on: list[str] = []
    monkeypatch.setattr(LONG, "_along_path", partial(counted, went_on, "along", LONG._along_path))
    monkeypatch.setattr(LONG, "LONG", 50)
    monkeypatch.setattr(LONG, "MOST_STATES", 0)
    problem = synthetic_problem(150, 4, seed=3)
    found = solve_long(problem, gap=given_gap)
    assert found.total_us <= found.lower_bound_us * (1 + given_gap)
    assert bool(went_on) == (given_gap == 0)


def counted(calls: list[str], name: str, function: Callable[..., object], *arguments: object) -> object:
    calls.append(name)
    return function(*arguments)


@pytest.mark.parametrize(("name", "written"), [("WRITTEN_BYTES", 0), ("RELAXED_BYTES", 1)])
def test_a_program_that_would_need_too_much_memory_is_not_written_or_not_solved(
    name: str, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for function in ("integer_program", "relaxed", "solved"):
        monkeypatch.setattr(LONG, function, partial(counted, calls, function, getattr(LONG, function)))
    monkeypatch.setattr(LONG, "LONG", 50)
    monkeypatch.setattr(LONG, "MOST_STATES", 0)
    monkeypatch.setattr(LONG, name, 1e9)
    problem = synthetic_problem(100, 4)
    found = solve_long(problem)
    assert found.lower_bound_us == found.total_us == problem.cost_us(found.states)
    assert calls == ["integer_program"] * written


def pair_tables(seed: int) -> tuple[Pairs, list[np.ndarray]]:
    """Return tables of pairs of states, and the rows of each as an array of truths."""
    draw = np.random.default_rng(seed)
    factors, allowed = [], []
    for number in range(4):
        truths = np.repeat(draw.random((3, 4)) < 0.6, (1, 2, 1), axis=0)
        truths[0] |= ~truths.any(axis=0)
        truths[:, 0] |= ~truths.any(axis=1)
        rows: dict[Row, float] = {(f"s{i}", f"s{j}"): 0.0 for i, j in product(range(4), range(4)) if truths[i, j]}
        factors.append(Factor(f"f{number}", (f"a{number}", f"b{number}"), rows))
        allowed.append(truths)
    network = encode(Problem(tuple(factors)))
    return pairs(network.tables, np.concatenate(([0], np.cumsum(network.state_counts)))), allowed


@pytest.mark.parametrize("is_rough", [False, True], ids=["hashes", "all hashes are equal"])
def test_kinds_are_states_with_the_same_rows_and_what_hashes_miss_is_told(
    is_rough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_rough:
        monkeypatch.setattr(PAIRS, "hashes", lambda key, _: np.ones(len(key), np.uint64))
    for seed in range(20):
        tables, allowed = pair_tables(seed)
        found = tables.kinds(np.array([True, True, True, False]))
        for number, truths in enumerate(allowed):
            for second, rows in enumerate((truths, truths.T)):
                own = found.of[tables.sides == 2 * number + second]
                if number == 3:
                    assert (own == -1).all()
                    continue
                equal = (rows[:, None] == rows[None]).all(axis=2)
                same = own[:, None] == own[None]
                assert (equal <= same).all()
                assert found.counts[number, second] == len(np.unique(own))
                if found.is_exact[number]:
                    assert (equal == same).all()
            if not is_rough:
                assert found.is_exact[number]
