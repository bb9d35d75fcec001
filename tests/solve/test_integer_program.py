"""The integer program of a problem: its whole points are the assignments, at their costs; HiGHS solves it alike."""

import itertools

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from autotuner.errors import ProblemError
from autotuner.solve import SOLVERS
from autotuner.solve.problem import Factor, Problem
from scripts.bench.integer_program import IntegerProgram, integer_program
from scripts.bench.synthetic import synthetic_problem

PROBLEM = Problem(
    (
        Factor("start", (), {(): 3.0}),
        Factor("cost of x", ("x",), {("a",): 1.0, ("b",): 4.0}),
        Factor("x, y and z", ("x", "y", "z"), {("a", "c", "e"): 9.0, ("b", "d", "e"): 2.0, ("b", "c", "f"): 1.0}),
        Factor("x with y", ("x", "y"), {("a", "c"): 0.0, ("b", "c"): 5.0, ("b", "d"): 0.0, ("c", "c"): 0.0}),
    )
)


def matrix(program: IntegerProgram) -> "coo_array":
    shape = (len(program.right), len(program.costs))
    return coo_array((program.values, (program.equations, program.places)), shape=shape).tocsc()


def test_an_assignment_is_a_point_of_the_program_exactly_if_no_factor_forbids_it() -> None:
    program = integer_program(PROBLEM)
    equations = matrix(program)
    allowed = {}
    for chosen in itertools.product(*(program.states[name] for name in PROBLEM.variables)):
        states = dict(zip(PROBLEM.variables, chosen, strict=True))
        x = np.zeros(len(program.costs))
        x[[program.states[name][state] for name, state in states.items()]] = 1
        place = program.state_count
        for factor in PROBLEM.factors:
            if len(factor.variables) > 1:
                for row in factor.table:
                    x[place] = row == tuple(states[name] for name in factor.variables)
                    place += 1
        if np.all(equations @ x == program.right) and np.all(x <= program.upper):
            allowed[chosen] = program.costs @ x + program.constant
            assert program.chosen(x) == states
    assert allowed == {("a", "c", "e"): 13.0, ("b", "d", "e"): 9.0, ("b", "c", "f"): 13.0}
    for chosen, total in allowed.items():
        assert PROBLEM.cost_us(dict(zip(PROBLEM.variables, chosen, strict=True))) == total
    with pytest.raises(ProblemError):
        PROBLEM.cost_us({"x": "a", "y": "d", "z": "e"})


@pytest.mark.parametrize("problem", [PROBLEM, synthetic_problem(14, 2)], ids=["small", "made up"])
def test_the_least_point_of_the_program_is_the_exact_solution(problem: Problem) -> None:
    program = integer_program(problem)
    whole = np.arange(len(program.costs)) < program.state_count
    found = milp(
        program.costs, integrality=whole, bounds=Bounds(0.0, program.upper), options={"mip_rel_gap": 0.0},
        constraints=LinearConstraint(matrix(program), program.right, program.right),
    )  # fmt: skip
    total = SOLVERS["exact"](problem).total_us
    assert found.fun + program.constant == pytest.approx(total, rel=1e-6)
    assert problem.cost_us(program.chosen(found.x)) == total
