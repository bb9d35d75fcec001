"""A problem is solved at many costs: what stays is encoded once, and the solution is that of encoding it all."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotuner.errors import ProblemError
from autotuner.solve.exact import exact
from autotuner.solve.problem import Factor, Problem
from autotuner.solve.tables import Encoder, encode
from scripts.bench.brute_force import brute_force
from scripts.bench.synthetic import synthetic_problem

SMALL = Problem(
    (
        Factor("cost of x", ("x",), {("a",): 1.0, ("b",): 2.0, ("c",): 3.0}),
        Factor("cost of y", ("y",), {("p",): 1.0, ("q",): 2.0}),
        Factor("link", ("y", "x"), {("p", "b"): 0.0, ("p", "c"): 0.0, ("q", "a"): 0.0, ("q", "c"): 0.0}),
    )
)


def priced(problem: Problem, costs: Mapping[str, Mapping[str, float]]) -> Problem:
    """Return the problem with other costs of single variables; states without one are not offered."""
    return Problem(
        tuple(
            replace(f, table={(state,): us for state, us in costs[f.name].items()}) if f.name in costs else f
            for f in problem.factors
        )
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_problem_at_other_costs_is_solved_as_if_it_was_encoded_alone(seed: int) -> None:
    draw = random.Random(seed)
    encoder = Encoder(SMALL)
    for _ in range(3):
        offered = draw.sample("ab", 2) if draw.random() < 0.5 else draw.sample("abc", 3)
        costs = {"cost of x": {s: draw.randrange(9) / 4 for s in offered}, "cost of y": {"p": draw.random(), "q": 1.0}}
        problem = priced(SMALL, costs)
        found = exact(problem, encoder=encoder)
        assert found == exact(problem)
        assert found.total_us == brute_force(problem).total_us


@pytest.mark.slow
def test_larger_problems_get_the_same_states() -> None:
    whole = synthetic_problem(12, 3, seed=1)
    draw, encoder = random.Random(1), Encoder(whole)
    alone = [factor for factor in whole.factors if len(factor.variables) == 1]
    for _ in range(3):
        problem = priced(whole, {f.name: {row[0]: us * draw.random() for row, us in f.table.items()} for f in alone})
        assert exact(problem, encoder=encoder) == exact(problem)


def test_factors_that_stay_are_not_encoded_again() -> None:
    encoder = Encoder(SMALL)
    again = encoder.encode(priced(SMALL, {"cost of y": {"p": 4.0, "q": 5.0}}))
    tables = {table.name: table for table in again.tables}
    first = {table.name: table for table in encoder.encode(SMALL).tables}
    assert tables["link"] is first["link"]
    assert tables["cost of y"].costs.tolist() == [4.0, 5.0]
    assert (again.names, again.states) == (encode(SMALL).names, encode(SMALL).states)


def test_a_problem_of_other_variables_or_further_states_is_refused() -> None:
    encoder = Encoder(SMALL)
    with pytest.raises(ProblemError, match=r"differ in variables: \['x'\]"):
        encoder.encode(Problem((SMALL.factors[1],)))
    with pytest.raises(ProblemError, match="'cost of y': the problem encoded first lacks the state 'r'"):
        encoder.encode(priced(SMALL, {"cost of y": {"p": 4.0, "r": 5.0}}))
