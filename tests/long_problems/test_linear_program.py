"""The linear relaxation: it moves costs and changes no total; its bound is far above that of the tables."""

import random
from importlib import import_module
from time import monotonic

import numpy as np
import pytest
from hypothesis import given, settings

from autotuner.errors import InfeasibleError
from autotuner.solve import exact
from autotuner.solve.arc_consistency import arc_consistent, bound_us
from autotuner.solve.problem import Problem
from autotuner.solve.tables import encode
from scripts.bench.solvers.linear_program import MovedCosts, lifted, window
from scripts.bench.solvers.long_problems import solve_long
from scripts.bench.solvers.message_passing import row_cost_us
from scripts.bench.solvers.path_decomposition import path_decomposition
from scripts.bench.synthetic import synthetic_problem
from tests.solve.drawing import problems, totals

LONG = import_module("scripts.bench.solvers.long_problems")
LINEAR = import_module("scripts.bench.solvers.linear_program")


@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_whatever_the_prices_no_total_changes(problem: Problem) -> None:
    network = encode(problem)
    try:
        left = arc_consistent(network)
    except InfeasibleError:
        return
    moved = MovedCosts(left, network.state_counts)
    if not moved.tables:
        return
    program = moved.program(list(moved.tables))
    draw = random.Random(len(program.costs))
    prices = np.array([draw.uniform(-9, 9) for _ in program.right])
    for linked in program.linked:
        moved.move(linked, prices)
    found = moved.result()
    assert all(table.costs.min() == 0 for table in found.tables.values() if len(table.variables) > 1)
    for row, total in totals(problem).items():
        named = dict(zip(sorted(problem.variables), row, strict=True))
        codes = {v: network.states[v].index(named[name]) for v, name in enumerate(network.names)}
        assert sum(row_cost_us(table, codes) for table in found.tables.values()) == pytest.approx(total, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("states", [10_000, 1_000, 100])
def test_the_bound_is_far_above_that_of_the_tables_and_not_above_the_optimum(
    states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LINEAR, "WINDOW_STATES", states)
    problem = synthetic_problem(150, 4)
    network = encode(problem)
    left = arc_consistent(network)
    blocks = path_decomposition(left.tables, network.state_counts)
    assert len(blocks) > 3
    found = lifted(left, network.state_counts, blocks)
    best = exact(problem).total_us
    before, after = bound_us(left.tables.values()), bound_us(found.tables.values())
    assert before < 0.9 * best < 0.98 * best < after <= best * (1 + 1e-9)


def test_when_the_time_is_over_costs_stay_where_they_are() -> None:
    network = encode(synthetic_problem(150, 4))
    left = arc_consistent(network)
    blocks = path_decomposition(left.tables, network.state_counts)
    found = lifted(left, network.state_counts, blocks, monotonic())
    assert all(found.tables[place] is table for place, table in left.tables.items() if len(table.variables) > 1)


def test_windows_cover_all_blocks_and_look_ahead() -> None:
    reached = list(range(0, 1100, 100))  # ten blocks of a hundred states
    found, first = [], 0
    while first < 10:
        last, end = window(reached, first, 300)
        found.append((first, last, end))
        first = last
    assert found == [(0, 2, 3), (2, 4, 5), (4, 6, 7), (6, 8, 9), (8, 10, 10)]
    assert window(reached, 0, 1) == (1, 1)


@pytest.mark.slow
def test_long_problems_of_more_states_are_lifted_and_repeated_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    relax = LONG.lifted

    def counted(*arguments: object) -> object:
        calls.append(1)
        return relax(*arguments)

    monkeypatch.setattr(LONG, "lifted", counted)
    monkeypatch.setattr(LONG, "LONG", 50)
    solve_long(synthetic_problem(150, 4, seed=3))
    assert not calls
    for forms, expected in ((8, 1), (24, 2)):
        solve_long(synthetic_problem(150, forms), time_limit_s=0.5)
        assert len(calls) == expected, f"after {forms} forms"
    monkeypatch.setattr(LONG, "MOST_STATES", 1_000)
    solve_long(synthetic_problem(150, 4, seed=3))
    assert len(calls) == 3
    monkeypatch.setattr(LONG, "_is_repeated", lambda *_: True)
    solve_long(synthetic_problem(150, 8), time_limit_s=0.5)
    assert len(calls) == 3
