"""What a plan holds between forward and backward, and what backward may make again instead."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from autotuner.ir.cost import form_bytes
from autotuner.ir.records import Measurement
from autotuner.plan.step import AGAIN, Step, tensor_of
from autotuner.solve import SOLVERS
from autotuner.solve.problem import Factor, Problem, Solution
from autotuner.solve.problem.formulate import Formulation, formulate
from autotuner.space import Space
from autotuner.tuner.steps import steps_of
from tests.solve.problem.test_formulate import SAVED, SMALL, costs_of, encoder, small
from tests.solve.problem.walking import contradictions

MORE = (*SMALL, "torch_gelu_erf", "torch_gelu_erf_grad", "torch_bias_grad")


def with_dear_bytes(problem: Problem, us: int = 100) -> Solution:
    """Return an assignment that holds little: a byte costs as much as so many microseconds."""
    factors = [
        Factor(f.name, f.variables, {row: us * f.held_bytes.get(row, 0) + cost for row, cost in f.table.items()})
        for f in problem.factors
    ]
    return SOLVERS["exact"](Problem(tuple(factors)))


def steps(formulation: Formulation, solution: Solution, costs_us: Mapping[str, float]) -> tuple[Step, ...]:
    return steps_of(formulation, solution, {key: Measurement("ok", median_us=cost) for key, cost in costs_us.items()})


def held(space: Space, steps: Iterable[Step]) -> set[tuple[str, str]]:
    """Return what backward reads of what forward made or got, parameters apart."""
    steps = tuple(steps)
    early = {place for step in steps if step.phase == "forward" for place in step.outputs} | {
        (name, tensor.axes) for name, tensor in space.graph.tensors.items() if tensor.role == "input"
    }
    late = {place for step in steps if step.phase == "backward" for place in step.inputs}
    roles = {name: space.graph.tensors[tensor_of(name)].role for name, _ in early & late}
    return {(name, form) for name, form in early & late if roles[name] != "parameter"}


def bytes_of(space: Space, places: Iterable[tuple[str, str]]) -> int:
    return sum(form_bytes(space.graph, name, form) for name, form in places)


@pytest.mark.slow
@pytest.mark.parametrize("p, seed", [(0.1, 0), (0.0, 2)])
def test_a_plan_that_holds_little_holds_what_the_problem_says(p: float, seed: int) -> None:
    space = encoder(p)
    costs = costs_of(space, seed)
    formulation = formulate(space, saving=True).priced(costs)
    solution = with_dear_bytes(formulation.problem)
    found = steps(formulation, solution, costs)
    assert contradictions(space.graph, space.given, found) == []
    assert formulation.problem.held_bytes(solution.states) == bytes_of(space, held(space, found))
    assert any(step.again for step in found)
    assert sum(step.predicted_us for step in found) == formulation.problem.cost_us(solution.states)


@pytest.mark.slow
def test_repeating_costs_time_and_saves_bytes() -> None:
    space = encoder(0.1)
    costs = costs_of(space, 0)
    plain, saving = (formulate(space, saving=saving).priced(costs) for saving in (False, True))
    fastest = SOLVERS["exact"](plain.problem)
    assert SOLVERS["exact"](saving.problem).total_us == fastest.total_us
    smallest = with_dear_bytes(saving.problem)
    without = with_dear_bytes(plain.problem)
    kept = [saving.problem.held_bytes(smallest.states), plain.problem.held_bytes(without.states)]
    assert kept[0] < 0.6 * kept[1]
    assert saving.problem.cost_us(smallest.states) > fastest.total_us


def test_what_is_made_from_something_held_anyway_is_made_again(tmp_path: Path) -> None:
    space = small(tmp_path, SAVED, *MORE, train=True)
    costs = dict.fromkeys(space.calls, 60.0)
    formulation = formulate(space, saving=True).priced(costs)
    # GELU's backward reads `biased`; the bias can be added again, but then `product` is held: no byte is saved.
    assert formulation.repeated(with_dear_bytes(formulation.problem)) == {}
    assert set(formulation.offered.repeated) == {"biased"}
    assert {name for name, _ in held(space, steps(formulation, with_dear_bytes(formulation.problem), costs))} >= {"x"}


@pytest.mark.slow
def test_what_backward_makes_of_a_tensor_that_forward_had_so_is_another_instance() -> None:
    space = encoder(0.1)
    costs = costs_of(space, 0)
    formulation = formulate(space, saving=True).priced(costs)
    found = steps(formulation, with_dear_bytes(formulation.problem), costs)
    made = [place for step in found for place in step.outputs]
    assert len(made) == len(set(made))
    again = {name for name, _ in made if name.startswith(AGAIN)}
    assert again
    for step in found:
        names = {name for name, _ in step.inputs}
        assert step.phase == "backward" or not names & again


def test_a_circle_of_covers_is_forbidden_as_a_whole_and_not_in_parts() -> None:
    space = encoder(0.1, "declared")
    costs = costs_of(space, 0)
    formulation = formulate(space).priced(costs)
    chosen = [choice.cover.operators for choice in formulation.chosen(SOLVERS["exact"](formulation.problem))]
    wide = [operators for operators in chosen if len(operators) > 1][:3]
    assert len(wide) == 3
    other = formulation.without(wide)
    solution = SOLVERS["exact"](other.problem)
    left = {choice.cover.operators for choice in other.chosen(solution)} & set(wide)
    assert len(left) < 3
    assert solution.total_us >= SOLVERS["exact"](formulation.problem).total_us
