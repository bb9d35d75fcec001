"""The compact integer program: its whole points are the assignments, at their costs; HiGHS finds the least of them."""

import itertools
import threading
import time
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from autotuner.checkpoint import OverError, until
from autotuner.errors import BudgetError, InfeasibleError, ProblemError
from autotuner.solve import budgeted, exact
from autotuner.solve.arc_consistency import arc_consistent
from autotuner.solve.integer_program import IntegerProgram, ProgramPlan, has_few_states, integer_program, solved
from autotuner.solve.lagrangian_dual import lagrangian_dual
from autotuner.solve.problem import Factor, Problem
from autotuner.solve.tables import Network, encode
from scripts.bench.brute_force import brute_force
from scripts.bench.synthetic import synthetic_problem
from tests.solve.drawing import problems, totals, weighed_problems

EXACT = import_module("autotuner.solve.exact")
BUDGETED = import_module("autotuner.solve.budgeted")
PROGRAM = import_module("autotuner.solve.integer_program")

# Both states of x that go with "c" are of one kind; "b" and "d" share a column with nobody.
ALIKE = Factor("x with y", ("x", "y"), {("a", "c"): 0.0, ("b", "c"): 0.0, ("b", "d"): 0.0, ("e", "d"): 0.0})
PROBLEM = Problem(
    (
        Factor("start", (), {(): 3.0}),
        Factor("cost of x", ("x",), {("a",): 1.0, ("b",): 4.0, ("e",): 2.0}),
        ALIKE,
        Factor("y is z", ("y", "z"), {("c", "f"): 2.0, ("d", "g"): 2.0}),
        Factor("z, w and x", ("z", "w", "x"), {("f", "h", "a"): 9.0, ("f", "i", "b"): 1.0, ("g", "h", "e"): 5.0}),
        Factor("w with x", ("w", "x"), {("h", "a"): 1.0, ("i", "b"): 7.0, ("h", "e"): 0.0, ("i", "e"): 1.0}),
    )
)


def written(problem: Problem) -> tuple[Network, IntegerProgram]:
    network = encode(problem)
    return network, integer_program(arc_consistent(network), network.state_counts)


def test_the_whole_points_are_the_assignments_that_no_factor_forbids_at_their_costs() -> None:
    network, program = written(PROBLEM)
    found: dict[tuple[str, ...], float] = {}
    for point in itertools.product((0.0, 1.0), repeat=len(program.costs)):
        x = np.array(point)
        sums = program.matrix @ x
        if np.all(program.lowest <= sums) and np.all(sums <= program.highest):
            states = network.named(program.codes(x))
            found[tuple(states[name] for name in sorted(states))] = float(program.costs @ x) + program.constant
    expected = {}
    for row in itertools.product(*network.states):
        named = dict(zip(network.names, row, strict=True))
        try:
            expected[row] = PROBLEM.cost_us(named)
        except ProblemError:
            continue
    assert found == expected
    assert len(found) == 3


def test_states_that_come_together_share_a_column_and_kinds_share_a_row() -> None:
    # Four states of x and y beside three relations: "y is z" takes neither a column nor a row.
    network, program = written(Problem((ALIKE, *PROBLEM.factors[3:4])))
    assert network.state_counts == (3, 2, 2)
    assert len(program.costs) == 5
    assert len(program.lowest) == 3 + 2


def test_a_state_that_would_need_two_of_another_variable_is_ruled_out() -> None:
    # x = a asks for y = c, y = c for z = e, and z = e for x = b: arc consistency sees no contradiction in that.
    circle = Problem(
        (
            Factor("x y", ("x", "y"), {("a", "c"): 0.0, ("b", "d"): 5.0}),
            Factor("y z", ("y", "z"), {("c", "e"): 0.0, ("d", "f"): 5.0}),
            Factor("z x", ("z", "x"), {("e", "b"): 0.0, ("f", "a"): 5.0}),
        )
    )
    network, program = written(circle)
    with pytest.raises(InfeasibleError):
        solved(program)
    rest = Problem((*circle.factors[:2], Factor("z x", ("z", "x"), {("e", "b"): 0.0, ("f", "b"): 5.0})))
    network, program = written(rest)
    found = solved(program)
    assert found.codes is not None
    assert network.named(found.codes) == {"x": "b", "y": "d", "z": "f"}


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_the_least_point_is_that_of_exhaustive_search(problem: Problem) -> None:
    try:
        best = brute_force(problem).total_us
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            solved(written(problem)[1])
        return
    network, program = written(problem)
    found = solved(program)
    assert found.codes is not None
    assert found.is_optimal
    assert problem.cost_us(network.named(found.codes)) == best
    assert best * (1 - 1e-5) - 1e-5 <= found.bound_us <= best


@pytest.mark.slow
@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems())
def test_within_a_budget_as_well(problem: Problem) -> None:
    searched = 0

    def dual(*args: Any) -> Any:
        nonlocal searched
        searched += 1
        return lagrangian_dual(*args)

    names = sorted(problem.variables)
    both = {(cost, problem.held_bytes(dict(zip(names, row, strict=True)))) for row, cost in totals(problem).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BUDGETED, "LONG", 0)
        patch.setattr(BUDGETED, "lagrangian_dual", dual)
        for budget in sorted({held for _, held in both}):
            found = budgeted(problem, budget)
            best = min(time for time, held in both if held <= budget)
            assert found.total_us == problem.cost_us(found.states) == found.lower_bound_us == best
            assert found.held_bytes == problem.held_bytes(found.states) <= budget
        assert not searched or not names
        least = min((held for _, held in both), default=0)
        if least:
            with pytest.raises(BudgetError) as raised:
                budgeted(problem, least - 1)
            assert raised.value.least_bytes == least


@pytest.mark.slow
def test_long_problems_of_few_states_are_programs_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = synthetic_problem(220, 3), synthetic_problem(100, 8)
    assert has_few_states(arc_consistent(encode(few)))
    assert not has_few_states(arc_consistent(encode(many)))
    calls: list[float] = []
    whole = PROGRAM.solved

    def counted(program: IntegerProgram, time_limit_s: float, *arguments: Any) -> object:
        calls.append(time_limit_s)
        return whole(program, time_limit_s, *arguments)

    monkeypatch.setattr(EXACT, "solved", counted)
    found = exact(few)
    asked = len(calls)
    assert asked >= 1
    assert found.total_us == found.lower_bound_us
    monkeypatch.setattr(PROGRAM, "FEW_STATES", 0.0)
    assert exact(few).total_us == found.total_us
    monkeypatch.undo()
    monkeypatch.setattr(EXACT, "solved", counted)
    assert exact(synthetic_problem(30, 4)).gap == 0
    assert len(calls) == asked


@pytest.mark.slow
def test_elimination_answers_where_the_program_ran_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = synthetic_problem(220, 2)
    best = exact(problem).total_us
    monkeypatch.setattr(EXACT, "PROGRAM_TIME", 0.0)
    monkeypatch.setattr(EXACT, "MOST_ROWS", 0.0)  # all of it is left for the program
    found = exact(problem, time_limit_s=60)
    assert found.total_us == found.lower_bound_us == best
    found = exact(problem, time_limit_s=0)
    assert found.lower_bound_us <= best <= found.total_us


@pytest.mark.slow
def test_without_a_time_limit_highs_and_elimination_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = synthetic_problem(150, 4, seed=3)
    best = exact(problem).total_us
    given: list[float] = []

    def late(_: IntegerProgram, time_limit_s: float) -> ProgramPlan:
        given.append(time_limit_s)
        return ProgramPlan(None, 1.0, is_optimal=False)

    monkeypatch.setattr(EXACT, "LONG", 50)
    monkeypatch.setattr(EXACT, "MOST_ROWS", 0.0)
    monkeypatch.setattr(EXACT, "TURN_S", 0.01)
    monkeypatch.setattr(EXACT, "solved", late)
    found = exact(problem)
    assert found.total_us == found.lower_bound_us == best
    assert given == [0.01 * 2**turn for turn in range(len(given))]
    assert len(given) > 1


@pytest.mark.slow
def test_a_program_that_would_need_too_much_memory_is_not_written_or_not_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = synthetic_problem(150, 4, seed=3)
    monkeypatch.setattr(EXACT, "LONG", 50)
    monkeypatch.setattr(EXACT, "MOST_ROWS", 0.0)
    monkeypatch.setattr(EXACT, "solved", lambda *_: pytest.fail("it is solved"))
    for module, name in ((EXACT, "WRITTEN_BYTES"), (PROGRAM, "BYTES")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, 1e9)
            assert exact(problem).gap == 0


def test_work_is_heard_to_be_over_while_highs_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("scipy.optimize.milp", lambda *_, **__: release.wait(60.0))
    _, program = written(PROBLEM)
    begun = time.monotonic()
    try:
        with pytest.raises(OverError), until(lambda: time.monotonic() > begun + 0.2):
            solved(program)
    finally:
        release.set()
