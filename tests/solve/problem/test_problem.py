import json
from typing import Any

import pytest

from autotuner.errors import ProblemError
from autotuner.solve.problem import SCHEMA, Factor, Problem, Solution

PROBLEM = Problem(
    (
        Factor("start", (), {(): 0.5}),
        Factor("matmul", ("x", "y"), {("ab", "ab"): 1.0, ("ab", "ba"): 2.25}),
        Factor("softmax", ("y",), {("ba",): 3.0}),
    ),
    chain=("x", "y"),
)


def value(**changed: Any) -> dict[str, Any]:
    return PROBLEM.to_json() | changed


def test_a_problem_survives_json() -> None:
    assert Problem.from_json(json.loads(json.dumps(PROBLEM.to_json()))) == PROBLEM


def test_variables_are_in_order_of_first_appearance() -> None:
    assert PROBLEM.variables == ("x", "y")


def test_an_assignment_costs_the_sum_of_its_rows() -> None:
    assert PROBLEM.cost_us({"x": "ab", "y": "ba"}) == 5.75


def test_a_forbidden_assignment_names_the_factor_and_the_row() -> None:
    with pytest.raises(ProblemError, match=r"'softmax' has no row \('ab',\)"):
        PROBLEM.cost_us({"x": "ab", "y": "ab"})


def test_an_assignment_without_a_state_for_a_variable_is_refused() -> None:
    with pytest.raises(ProblemError, match="1 of the variables: y"):
        PROBLEM.cost_us({"x": "ab"})


def test_the_order_of_factors_does_not_change_a_total() -> None:
    factors = tuple(Factor(f"f{us}", ("x",), {("ab",): us}) for us in (0.1, 0.2, 0.3, 1e15))
    states = {"x": "ab"}
    assert Problem(factors).cost_us(states) == Problem(factors[::-1]).cost_us(states)


@pytest.mark.parametrize("given", [None, [], "text", {}, {"schema": SCHEMA + 1}, value(schema="1")])
def test_another_schema_is_refused(given: Any) -> None:
    with pytest.raises(ProblemError, match=f"no problem of schema {SCHEMA}"):
        Problem.from_json(given)


@pytest.mark.parametrize(
    "given",
    [
        {"schema": SCHEMA},
        value(factors=None),
        value(factors=[{"name": "f"}]),
        value(factors=["f"]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [[]]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [["ab", "fast"]]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [["ab", None]]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [[["ab"], 1.0]]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [3]}]),
        value(chain=None),
        value(chain="xy"),
        value(chain=["x", 1]),
        value(factors=[{"name": 3, "variables": ["x"], "rows": [["ab", 1.0]]}]),
        value(factors=[{"name": "f", "variables": "x", "rows": [["ab", 1.0]]}]),
        value(factors=[{"name": "f", "variables": ["x", 1], "rows": [["ab", "ab", 1.0]]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": ["a1"]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [[1, 1.0]]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [["ab", "1.0"]]}]),
        value(factors=[{"name": "f", "variables": ["x"], "rows": [["ab", True]]}]),
    ],
)
def test_a_damaged_problem_is_refused(given: Any) -> None:
    with pytest.raises(ProblemError, match="damaged"):
        Problem.from_json(given)


@pytest.mark.parametrize(
    "rows, reason",
    [
        ([["ab", 1.0, 2, 3]], "a row is 1 states and a cost, and then the bytes"),
        ([["ab", 1.0, 2.5]], "no count of bytes"),
        ([["ab", -1.0]], "finite and not negative"),
        ([["ab", float("inf")]], "finite and not negative"),
        ([["ab", float("nan")]], "finite and not negative"),
    ],
)
def test_a_row_that_cannot_be_is_refused(rows: list[Any], reason: str) -> None:
    with pytest.raises(ProblemError, match=reason):
        Problem.from_json(value(factors=[{"name": "f", "variables": ["x"], "rows": rows}], chain=[]))


def test_a_factor_that_names_a_variable_twice_is_refused() -> None:
    with pytest.raises(ProblemError, match="twice"):
        Factor("f", ("x", "x"), {})


def test_a_row_that_is_given_twice_is_refused() -> None:
    given = value(factors=[{"name": "f", "variables": ["x"], "rows": [["ab", 1.0], ["ab", 2.0]]}], chain=[])
    with pytest.raises(ProblemError, match=r"'f' has row \('ab',\) twice, at 1.0 and 2.0"):
        Problem.from_json(given)


def test_factor_names_are_unique() -> None:
    with pytest.raises(ProblemError, match=r"\['f'\]"):
        Problem((Factor("f", ("x",), {}), Factor("f", ("y",), {})))


def test_the_chain_names_variables_of_the_problem() -> None:
    with pytest.raises(ProblemError, match=r"\['z'\]"):
        Problem((), chain=("z",))


@pytest.mark.parametrize("total, bound, gap", [(12.0, 10.0, 0.2), (5.0, 5.0, 0.0), (0.0, 0.0, 0.0)])
def test_the_gap_is_a_share_of_the_bound(total: float, bound: float, gap: float) -> None:
    assert Solution({}, total, bound, "exact").gap == pytest.approx(gap)


def test_the_gap_above_a_bound_of_nothing_is_infinite() -> None:
    assert Solution({}, 1.0, 0.0, "exact").gap == float("inf")
