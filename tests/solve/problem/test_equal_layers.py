"""Equal layers from a problem of four, on a chain small enough for exhaustive search."""

import pytest

from autotuner.errors import ProblemError
from autotuner.solve import SOLVERS
from autotuner.solve.problem import Factor, Problem, Row
from autotuner.solve.problem.equal_layers import equal_layers


def chain(layers: int, *, skip: bool = False) -> Problem:
    """Return a chain of layers that each have a variable of three states, two of them named after layers."""
    names = [f"operator L{k}_x" for k in range(1, layers + 1)]
    states = [("alone", f"with L{k - 1}_x", f"before L{k}_x") for k in range(1, layers + 1)]
    factors = [Factor("start", ("x",), {("a",): 3.0, ("b",): 1.0})]
    factors.append(Factor("x with L1_x", ("x", names[0]), {("a", states[0][0]): 0.0, ("b", states[0][2]): 4.0}))
    for k, name in enumerate(names):
        costs = dict(zip(states[k], (5.0, 2.0, 4.0), strict=True))
        factors.append(Factor(f"cost of L{k + 1}_x", (name,), {(state,): cost for state, cost in costs.items()}))
        if k:
            table: dict[Row, float] = {
                (one, other): float(7 * i * j % 5)
                for i, one in enumerate(states[k - 1])
                for j, other in enumerate(states[k])
                if (i, j) != (1, 1)
            }
            factors.append(Factor(f"L{k}_x with L{k + 1}_x", (names[k - 1], name), table))
    factors.append(Factor(f"end of L{layers}_x", (names[-1],), {(states[-1][0],): 6.0, (states[-1][2],): 2.0}))
    if skip:
        factors.append(Factor("skip", (names[0], names[2]), {("alone", "alone"): 0.0}))
    return Problem(tuple(factors), ("x", *names))


@pytest.mark.parametrize("layers", [4, 5, 9])
def test_repeated_layers_are_the_problem_of_so_many_layers(layers: int) -> None:
    whole, repeated = chain(layers), equal_layers(chain(4), layers)
    assert set(repeated.variables) == set(whole.variables)
    assert repeated.chain == whole.chain
    assert {(f.name, f.variables, len(f.table)) for f in repeated.factors} == {
        (f.name, f.variables, len(f.table)) for f in whole.factors
    }
    for name in ("exact", "brute_force"):
        assert SOLVERS[name](repeated).total_us == SOLVERS[name](whole).total_us


def test_equal_layers_share_their_tables_and_name_layers_relative_to_their_own() -> None:
    tables = {factor.name: factor.table for factor in equal_layers(chain(4), 7).factors}
    assert tables["cost of L2_x"] is tables["cost of L5_x"]
    assert tables["L2_x with L3_x"] is tables["L4_x with L5_x"]
    assert list(tables["cost of L2_x"]) == [("alone",), ("with L-1_x",), ("before L+0_x",)]


def test_what_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(ProblemError, match="3 layers"):
        equal_layers(chain(4), 3)
    with pytest.raises(ProblemError, match=r"layers \[1, 2, 3, 4, 5\]"):
        equal_layers(chain(5), 9)
    with pytest.raises(ProblemError, match=r"'skip' is over layers \[1, 3\]"):
        equal_layers(chain(4, skip=True), 9)
