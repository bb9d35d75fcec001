"""Kernels of backward that repeat forward operators: which are offered, what plans hold then, and in what order."""

from collections.abc import Callable

import pytest
import yaml

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import load_model
from autotuner.ir.models.model import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.plan.step import AGAIN
from autotuner.solve import SOLVERS
from autotuner.solve.problem.formulate import formulate
from autotuner.space import build_space
from autotuner.space.fusion import Cover, covers, repeats
from tests.made_up import CPU, FEED_FORWARD
from tests.solve.problem.test_formulate import costs_of
from tests.solve.problem.test_saving import bytes_of, held, steps, with_dear_bytes
from tests.solve.problem.walking import contradictions

SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")


def feed_forward() -> Graph:
    definition = parse_definition(yaml.safe_load(FEED_FORWARD), "feed-forward")
    return training_graph(ModelFile("feed-forward", definition).instantiate("small").graph())


def encoder() -> Graph:
    options = dict.fromkeys(SITES, 0.1)
    return training_graph(load_model("bert-encoder").instantiate("tiny", options=options).graph())


def llama() -> Graph:
    return training_graph(load_model("llama-block").instantiate("tiny").graph())


def repeating(graph: Graph) -> set[Cover]:
    return {cover for cover in covers(graph, ("inductor",)) if cover.recomputed}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "BYTES_MIN", 0)


def test_what_is_small_is_not_repeated() -> None:
    assert repeating(feed_forward()) == set()


@pytest.mark.usefixtures("small")
def test_results_that_products_read_are_made_again_where_their_own_operands_are_read() -> None:
    found = {(cover.remade, cover.recomputed) for cover in repeating(encoder()) if cover.remade}
    assert found == {
        (("norm1",), ("norm1",)),
        (("activation_dropped",), ("activation", "activation_dropped")),
        (("attention_dropped",), ("attention_dropped",)),
    }


@pytest.mark.usefixtures("small")
def test_what_is_made_of_what_is_read_anyway_is_made_inside() -> None:
    inside = {(cover.operators, cover.recomputed): cover.inputs for cover in repeating(llama()) if not cover.remade}
    gate = ("grad_up", "grad_activation", "grad_gate")
    assert {*inside[gate, ("activation",)]} == {"gate", "up", "grad_gated"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("graph", [feed_forward, encoder, llama])
def test_covers_that_repeat_read_what_they_need_and_leave_what_they_say(graph: Callable[[], Graph]) -> None:
    made = graph()
    named = {operator.name: operator for operator in made.operators}
    found = repeating(made)
    assert found
    for cover in found:
        members = [named[name] for name in cover.recomputed + cover.operators]
        results = {tensor for operator in members for tensor in operator.outputs}
        assert {named[name].phase for name in cover.recomputed} == {"forward"}
        assert not {named[name].kind for name in cover.recomputed} & {"dropout_mask", "contraction"}
        assert not results & {*cover.inputs}
        assert {t for o in members for t in o.inputs if not made.tensors[t].optional} <= results | {*cover.inputs}
        assert cover.outputs[len(cover.outputs) - len(cover.remade) :] == cover.remade
        made.subgraph(members, cover.inputs, cover.outputs)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("saving", [False, True])
def test_a_plan_holds_what_the_problem_says_and_makes_again_before_others_read(seed: int, saving: bool) -> None:
    space = build_space(feed_forward(), CPU, saving=saving)
    costs = costs_of(space, seed)
    for choice in space.choices:
        if choice.cover.remade:  # beside its own work, it costs little
            costs[choice.call.key] = 1.0
    formulation = formulate(space, saving=saving).priced(costs)
    solution = with_dear_bytes(formulation.problem)
    found = steps(formulation, solution, costs)
    assert contradictions(space.graph, space.given, found) == []
    assert formulation.problem.held_bytes(solution.states) == bytes_of(space, held(space, found))
    assert sum(step.predicted_us for step in found) == pytest.approx(formulation.problem.cost_us(solution.states))
    again = {name for step in found if step.recomputed for name, _ in step.outputs if name.startswith(AGAIN)}
    assert again == {f"{AGAIN}active"}
    seen: set[tuple[str, str]] = set()
    for step in found:
        assert all(place in seen for place in step.inputs if place[0] in again)
        assert not seen & {*step.outputs}
        seen |= {*step.outputs}
    assert ("active", "bf") not in held(space, found)


@pytest.mark.usefixtures("small")
def test_the_fastest_plan_is_no_slower_with_more_to_choose_from(monkeypatch: pytest.MonkeyPatch) -> None:
    space = build_space(feed_forward(), CPU)
    costs = costs_of(space, 0)
    more = SOLVERS["exact"](formulate(space).priced(costs).problem)
    monkeypatch.setattr(repeats, "BYTES_MIN", 1 << 40)
    fewer = build_space(feed_forward(), CPU)
    assert fewer.calls.keys() < space.calls.keys()
    assert more.total_us <= SOLVERS["exact"](formulate(fewer).priced(costs).problem).total_us
