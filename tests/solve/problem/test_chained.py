"""Equal layers in a row: what they hand each other may lie in any order, the same at both ends."""

from functools import cache
from pathlib import Path

import pytest

from autotuner.errors import SpaceError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import load_model
from autotuner.solve import SOLVERS, exact_repeated
from autotuner.solve.problem.formulate import Formulation, formulate
from autotuner.solve.problem.rules import JOINTS, alike_in_a_row
from autotuner.space import Choice, Space, build_space
from tests.made_up import feed_forward
from tests.solve.problem.test_formulate import CPU, ODD, SAVED, costs_of, priced, small

KERNELS = ("torch_matmul", "torch_bias", "torch_bias_grad", "torch_relu", "torch_relu_grad")


@cache
def encoder(chained: bool) -> Space:
    graph = training_graph(load_model("bert-encoder").instantiate(None, ODD).graph())
    file = CPU.model_copy(update={"kernels": {name: e for name, e in CPU.kernels.items() if name != "inductor"}})
    return build_space(graph, file, chained=chained)


def turned_is_cheap() -> Formulation:
    """Return the layer's problem where all that reads or makes an end in order `lbh` costs less than what does not."""

    def price(choice: Choice) -> float:
        ends = {choice.by_tensor[name] for name in ("x", "y", "grad_x", "grad_y") if name in choice.by_tensor}
        return (60.0 if ends == {"lbh"} else 600.0) * len(choice.cover.operators)

    return priced(encoder(chained=True), price, convert=60.0)


def test_a_layer_alone_gets_and_hands_on_what_it_shares_as_declared() -> None:
    given = encoder(chained=False).given
    assert {given[name] for name in ("x", "y", "grad_x", "grad_y")} == {("blh",)}


def test_layers_in_a_row_hand_each_other_the_order_that_suits_them() -> None:
    formulation = turned_is_cheap()
    solution = SOLVERS["exact"](alike_in_a_row(formulation.problem))
    assert {solution.states[name] for name in (*JOINTS, *JOINTS.values())} == {"lbh"}
    assert {formulation.lies(solution)[name].form for name in ("x", "grad_y")} == {"lbh"}


def test_one_layer_solved_with_the_rule_costs_a_share_of_many(tmp_path: Path) -> None:
    graph = training_graph(load_model(str(feed_forward(tmp_path))).instantiate("small").graph())
    kernels = {name: entry for name, entry in CPU.kernels.items() if name != "inductor"}
    space = build_space(graph, CPU.model_copy(update={"kernels": kernels}), chained=True)
    problem = formulate(space, costs_of(space, 3)).problem
    alike = SOLVERS["exact"](alike_in_a_row(problem))
    many = exact_repeated(problem, JOINTS, 12)
    # Layers of many may differ: the ends of the row are free, and two orders may take turns.
    assert 12 * SOLVERS["exact"](problem).total_us <= many.total_us <= 12 * alike.total_us


def test_layers_whose_output_is_no_input_of_theirs_are_refused(tmp_path: Path) -> None:
    graph = small(tmp_path, SAVED, *KERNELS, train=True).graph
    with pytest.raises(SpaceError, match=r"layers of it cannot be chained: its inputs with gradients are \['x'\]"):
        build_space(graph, CPU, chained=True)
