"""Made-up problems: solvable, repeatable, of the size that was asked for, and coupled as a training step is."""

from importlib import import_module

import pytest

from autotuner.errors import ProblemError
from autotuner.solve import SOLVERS
from autotuner.solve.problem import Problem
from scripts.bench.brute_force import brute_force
from scripts.bench.synthetic import synthetic_problem
from scripts.bench.synthetic_graph import ENCODER, Block, Step

BRUTE_FORCE = import_module("scripts.bench.brute_force")
ONE_LINEAR = Block((Step("product", "linear", ("x",)),))
FUSED = Block((Step("biased", "bias", ("x",)), Step("active", "gelu", ("biased",))), (("biased", "active"),))
MASKED = Block((Step("dropped", "dropout", ("x",)), Step("y", "add", ("dropped", "x"))), (("dropped", "y"),))


def operators(problem: Problem) -> list[str]:
    return [name.removeprefix("operator ") for name in problem.variables if name.startswith("operator ")]


def linked(problem: Problem, tensor: str) -> set[str]:
    """Return the operators that share a factor with a tensor."""
    return {
        factor.variables[0].removeprefix("operator ")
        for factor in problem.factors
        if factor.variables[1:] == (f"tensor {tensor}",) and factor.variables[0].startswith("operator ")
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block, forms", [(ONE_LINEAR, 2), (ONE_LINEAR, 3), (FUSED, 2), (MASKED, 2)])
def test_exhaustive_search_agrees_with_the_exact_solver(
    monkeypatch: pytest.MonkeyPatch, block: Block, forms: int, seed: int
) -> None:
    monkeypatch.setattr(BRUTE_FORCE, "MOST_ASSIGNMENTS", 1e12)  # it ends branches early: these are small
    problem = synthetic_problem(4, forms, seed, block)
    found, expected = SOLVERS["exact"](problem), brute_force(problem)
    assert found.total_us == expected.total_us == problem.cost_us(found.states)
    assert SOLVERS["shortest_path"](problem).total_us >= found.total_us


@pytest.mark.parametrize("asked, forms", [(30, 4), (100, 8), (300, 2)])
def test_a_problem_has_about_as_many_operators_and_forms_as_asked_for(asked: int, forms: int) -> None:
    problem = synthetic_problem(asked, forms)
    assert 0.9 * asked <= len(operators(problem)) <= asked
    tables = [factor.table for factor in problem.factors if factor.name.startswith("cost of tensor")]
    made = [{row[0].split(" > ")[0] for row in table if not row[0].startswith("inside ")} for table in tables]
    assert max(map(len, made)) == forms


def test_the_same_seed_gives_the_same_problem_and_another_one_other_costs() -> None:
    assert synthetic_problem(30, 4, seed=1) == synthetic_problem(30, 4, seed=1)
    other = synthetic_problem(30, 4, seed=2)
    assert other.variables == synthetic_problem(30, 4, seed=1).variables
    assert other != synthetic_problem(30, 4, seed=1)


def test_layers_are_a_chain_with_residual_edges_and_several_readers() -> None:
    problem = synthetic_problem(150, 2)
    assert {"1.query", "1.key", "1.value", "1.attended"} <= linked(problem, "0.y")
    assert "0.summed" in linked(problem, "0.normed")
    assert problem.chain[:3] == ("operator 0.query", "tensor 0.query", "operator 0.scores")
    assert problem.chain[-1] == "operator 2.result_biased"
    assert "tensor 1.y" in problem.chain


@pytest.mark.parametrize(
    "saved, forward, backward",
    [
        ("0.output_dropped_mask", "0.output_dropped", "0.grad_output_dropped"),
        ("0.hidden_biased", "0.active", "0.grad_active"),
        ("0.weights", "0.weights", "0.grad_weights"),
        ("0.normed_statistics", "0.normed", "0.grad_normed"),
        ("0.query_weight", "0.query", "0.grad_query"),
        ("x", "0.query", "0.grad_query_weight"),
    ],
)
def test_a_saved_tensor_ties_an_operator_to_its_own_backward(saved: str, forward: str, backward: str) -> None:
    assert {forward, backward} <= linked(synthetic_problem(49, 2), saved)


@pytest.mark.parametrize("seed", range(3))
def test_members_of_a_cover_choose_it_together_and_weights_lie_as_their_gradients(seed: int) -> None:
    problem = synthetic_problem(55, 3, seed)
    states = SOLVERS["exact"](problem).states
    covers = {state for state in states.values() if "+" in state and not state.startswith("inside ")}
    assert covers
    for state in covers:
        for member in state.split()[0].split("+"):
            assert states[f"operator {member}"] == state
    for name in ("query", "key", "value", "output", "hidden", "result"):
        stored = states[f"tensor 0.{name}_weight"].split(" > ")[0]
        assert stored in states[f"tensor 0.grad_{name}_weight"].split(" > ")
    assert len({states[f"tensor 0.{name}_weight"].split(" > ")[0] for name in ("query", "key", "value")}) == 1


def test_members_without_a_tensor_inside_share_a_token() -> None:
    problem = synthetic_problem(49, 2)
    token = "token 0.query+0.key+0.value"
    assert {factor.variables[0] for factor in problem.factors if token in factor.variables} == {
        "operator 0.query",
        "operator 0.key",
        "operator 0.value",
    }
    assert "token 0.weights+0.dropped_weights" in problem.variables  # backward reads what softmax makes
    assert "token 0.output+0.output_biased" not in problem.variables  # nobody else reads the product


def test_what_cannot_be_made_up_is_refused() -> None:
    with pytest.raises(ProblemError, match="2 operators; the first step and its backward alone are 3"):
        synthetic_problem(2, 4)
    with pytest.raises(ProblemError, match="0 forms"):
        synthetic_problem(30, 0)
    with pytest.raises(ProblemError, match="kind 'conv'; known: linear"):
        Block((Step("y", "conv", ("x",)),))
    with pytest.raises(ProblemError, match="reads \\('z',\\)"):
        Block((*ENCODER.steps, Step("last", "gelu", ("z",))))
