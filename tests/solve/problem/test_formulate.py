"""A space with made-up costs becomes a problem, and the solution becomes a plan: on small models, then on the layer.

Costs are multiples of 60, so that the even shares of a cover's members are integers and totals compare exactly.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autotuner.errors import InfeasibleError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import load_model, search_spaces_dir
from autotuner.ir.records import Call, Environment, Measurement
from autotuner.solve import SOLVERS
from autotuner.solve.problem import Solution
from autotuner.solve.problem.formulate import Formulation, formulate, order_steps
from autotuner.space import Choice, Space, SpaceFile, build_space, load_space
from autotuner.tuner import build_configuration
from scripts.bench.brute_force import brute_force
from scripts.recorded import LARGE, TINY, Recording
from tests.solve.problem.walking import contradictions

UNIT = 60
SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")
ODD = {"b": 3, "l": 5, "h": 6, "n": 2, "p": 3, "f": 7}
CPU: SpaceFile = load_space(search_spaces_dir() / "kernels" / "cpu.yaml")

HEAD = """
version: 1
name: small
axes: {b: batch, h: hidden, f: features}
inputs: {x: {axes: bh}}
"""
CHAIN = (
    HEAD
    + """
parameters: {weight: fh, offset: f}
operators:
  - {name: product, kind: contraction, spec: "bh,fh->bf", inputs: [x, weight], outputs: [product]}
  - {name: biased, kind: bias, spec: "bf,f->bf", inputs: [product, offset], outputs: [biased]}
  - {name: y, kind: relu, spec: "bf->bf", inputs: [biased], outputs: [y]}
outputs: [y]
"""
)
TWO_READERS = (
    HEAD
    + """
parameters: {left_weight: fh, right_weight: fh}
operators:
  - {name: left, kind: contraction, spec: "bh,fh->bf", inputs: [x, left_weight], outputs: [left]}
  - {name: right, kind: contraction, spec: "bh,fh->bf", inputs: [x, right_weight], outputs: [right]}
  - {name: y, kind: add, spec: "bf,bf->bf", inputs: [left, right], outputs: [y]}
outputs: [y]
"""
)
SAVED = (
    HEAD
    + """
parameters: {weight: fh, offset: f}
operators:
  - {name: product, kind: contraction, spec: "bh,fh->bf", inputs: [x, weight], outputs: [product]}
  - {name: biased, kind: bias, spec: "bf,f->bf", inputs: [product, offset], outputs: [biased]}
  - {name: y, kind: gelu_erf, spec: "bf->bf", inputs: [biased], outputs: [y]}
outputs: [y]
"""
)
SMALL = ("torch_matmul", "torch_bias", "torch_relu", "torch_add", "torch_matmul_bias", "inductor")

Price = Callable[[Choice], float | None]


def small(tmp_path: Path, text: str, *kernels: str, train: bool = False) -> Space:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    graph = load_model(str(path)).instantiate(extents={"b": 2, "h": 3, "f": 4}).graph()
    entries = {name: CPU.kernels[name] for name in kernels or CPU.kernels}
    return build_space(training_graph(graph) if train else graph, CPU.model_copy(update={"kernels": entries}))


@cache
def encoder(p: float, layouts: str = "all") -> Space:
    graph = training_graph(load_model("bert-encoder").instantiate(None, ODD, dict.fromkeys(SITES, p)).graph())
    entries = {
        name: entry.model_copy(update={"layouts": layouts} if layouts == "declared" else {})
        for name, entry in CPU.kernels.items()
    }
    return build_space(graph, CPU.model_copy(update={"kernels": entries}))


def priced(space: Space, price: Price, convert: float | None = UNIT) -> Formulation:
    """Return the problem in which a choice costs what `price` says, and any conversion `convert`; None leaves it out.

    Choices share calls where they execute the same; here each gets a call of its own, and so a price of its own.
    """
    choices = tuple(
        replace(choice, call=Call(choice.call.subgraph, replace(choice.candidate, params=(("place", place),))))
        for place, choice in enumerate(space.choices)
    )
    costs = {choice.call.key: cost for choice in choices if (cost := price(choice)) is not None}
    if convert is not None:
        costs |= {conversion.call.key: convert for conversion in space.conversions}
    return formulate(replace(space, choices=choices)).priced(costs)


def by_kernel(**costs: float) -> Price:
    return lambda choice: costs.get(choice.candidate.kernel.removeprefix("torch_"))


def solved(problem: Formulation, solver: str = "exact") -> tuple[Solution, set[tuple[str, ...]]]:
    """Return the solution and the operators of each chosen cover."""
    solution = SOLVERS[solver](problem.problem)
    return solution, {choice.cover.operators for choice in problem.chosen(solution)}


def forms(problem: Formulation, solution: Solution, tensor: str) -> set[str]:
    return {c.by_tensor[tensor] for c in problem.chosen(solution) if tensor in c.by_tensor}


@pytest.mark.parametrize(
    "seed", [*range(1, 3), *range(4, 8), *range(9, 15)]
)  # other draws leave an operator without a cost
@pytest.mark.parametrize("text", [CHAIN, TWO_READERS], ids=["chain", "two readers"])
def test_the_exact_solver_equals_exhaustive_search(tmp_path: Path, text: str, seed: int) -> None:
    draw = random.Random(seed)
    space = small(tmp_path, text, *SMALL)
    few: dict[tuple[str, ...], list[Choice]] = {}
    for choice in draw.sample(space.choices, len(space.choices)):
        own = few.setdefault(choice.cover.operators, [])
        if len(own) < 3:
            own.append(choice)
    thinned = replace(space, choices=tuple(choice for own in few.values() for choice in own))
    costs = {key: float(UNIT * draw.randint(1, 9)) for key in space.calls if draw.random() < 0.9}
    problem = formulate(thinned).priced(costs)
    try:
        expected = brute_force(problem.problem)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            SOLVERS["exact"](problem.problem)
        return
    found = SOLVERS["exact"](problem.problem)
    assert found.total_us == expected.total_us == found.lower_bound_us
    assert SOLVERS["shortest_path"](problem.problem).total_us >= found.total_us
    parts = [part.call.key for part in problem.chosen(found)] + [part.call.key for part in problem.converted(found)]
    assert found.total_us == sum(problem.costs_us[key] for key in parts)


@pytest.mark.parametrize(
    "fused, chosen, total",
    [(300, {("product", "biased"), ("y",)}, 360), (420, {("product",), ("biased",), ("y",)}, 420)],
)
def test_a_fused_cover_is_chosen_exactly_when_it_is_cheaper(
    tmp_path: Path, fused: float, chosen: set[tuple[str, ...]], total: float
) -> None:
    space = small(tmp_path, CHAIN, *SMALL)
    problem = priced(space, by_kernel(matmul=240, bias=120, relu=60, matmul_bias=fused))
    solution, covers = solved(problem)
    assert covers == chosen
    assert solution.total_us == total


def test_of_overlapping_covers_the_cheaper_whole_wins(tmp_path: Path) -> None:
    space = small(tmp_path, CHAIN, *SMALL)
    alone = {"matmul": 240.0, "bias": 120.0, "relu": 120.0}
    for matmul_bias, inductor, chosen, total in (
        (240, 240, {("product", "biased"), ("y",)}, 360),
        (360, 120, {("product",), ("biased", "y")}, 360),
        (240, 60, {("product",), ("biased", "y")}, 300),
    ):
        solution, covers = solved(priced(space, by_kernel(**alone, matmul_bias=matmul_bias, inductor=inductor)))
        assert (covers, solution.total_us) == (chosen, total)


def test_a_conversion_is_charged_once_for_several_readers(tmp_path: Path) -> None:
    space = small(tmp_path, TWO_READERS, "torch_matmul", "torch_add")

    def turned(choice: Choice) -> float | None:
        return None if choice.by_tensor.get("x") == "bh" else 240.0

    problem = priced(space, turned, convert=600)
    solution, _ = solved(problem)
    assert solution.total_us == 3 * 240 + 600
    assert [(c.tensor, c.source, c.target) for c in problem.converted(solution)] == [("x", "bh", "hb")]


def test_one_reader_may_take_a_tensor_as_it_is_and_another_converted(tmp_path: Path) -> None:
    space = small(tmp_path, TWO_READERS, "torch_matmul", "torch_add")

    def opposed(choice: Choice) -> float | None:
        wanted = {"left": "bh", "right": "hb"}.get(choice.cover.operators[0])
        return None if wanted and choice.by_tensor["x"] != wanted else 240.0

    problem = priced(space, opposed, convert=60)
    solution, _ = solved(problem)
    assert solution.total_us == 3 * 240 + 60
    assert forms(problem, solution, "x") == {"bh", "hb"}


def test_what_the_caller_gets_is_converted_at_the_end(tmp_path: Path) -> None:
    space = small(tmp_path, CHAIN, *SMALL)

    def columns(choice: Choice) -> float | None:
        return 60.0 if choice.by_tensor.get("y", "fb") == "fb" else None

    problem = priced(space, columns, convert=120)
    solution, _ = solved(problem)
    assert ("y", "fb", "bf") in {(c.tensor, c.source, c.target) for c in problem.converted(solution)}


@pytest.mark.parametrize("convert, read, total", [(300, "hf", 60 + 300), (900, "fh", 600)])
def test_a_weight_is_read_in_another_order_exactly_where_converting_it_each_step_is_worth_it(
    tmp_path: Path, convert: float, read: str, total: float
) -> None:
    space = small(tmp_path, CHAIN, "torch_matmul", "torch_bias", "torch_relu", "torch_relu_grad", "torch_bias_grad",
                  train=True)  # fmt: skip

    def price(choice: Choice) -> float | None:
        if choice.cover.operators == ("product",):
            return 60.0 if choice.by_tensor["weight"] == "hf" else 600.0
        plain = all(text == space.graph.tensors[name].axes for name, text in choice.by_tensor.items())
        return 0.0 if plain else None

    problem = priced(space, price, convert=convert)
    solution, _ = solved(problem)
    product = next(choice for choice in problem.chosen(solution) if choice.cover.operators == ("product",))
    assert product.by_tensor["weight"] == read
    assert forms(problem, solution, "grad_weight") == {"fh"}
    assert solution.total_us == total


@pytest.mark.parametrize("text", [SAVED, CHAIN], ids=["what is read inside", "what is made last"])
def test_a_cover_may_return_what_it_also_reads_inside(tmp_path: Path, text: str) -> None:
    # Backward reads the biased tensor, so the fused kernel of bias and activation returns it besides using it.
    space = small(tmp_path, text, train=True)
    whole = ("biased", "y")
    problem = priced(
        space, lambda choice: 60.0 if choice.cover.operators == whole else 600.0 * len(choice.cover.operators)
    )
    solution, covers = solved(problem)
    assert whole in covers
    chosen = next(choice for choice in problem.chosen(solution) if choice.cover.operators == whole)
    assert chosen.cover.outputs == (("biased", "y") if text == SAVED else ("y",))


def test_an_operator_without_a_cost_is_named(tmp_path: Path) -> None:
    space = small(tmp_path, CHAIN, *SMALL)
    with pytest.raises(InfeasibleError, match="operator 'biased'"):
        priced(space, by_kernel(matmul=60, relu=60))


def test_of_equal_forms_the_fastest_candidate_is_kept(tmp_path: Path) -> None:
    space = small(tmp_path, CHAIN, "torch_matmul", "torch_bias", "torch_relu")
    slower = [
        replace(c, candidate=replace(c.candidate, params=(("block", 8),)), call=replace(c.call, candidate=replace(
            c.call.candidate, params=(("block", 8),))))
        for c in space.choices
    ]  # fmt: skip
    both = replace(space, choices=(*slower, *space.choices))
    problem = priced(both, lambda choice: 120.0 if choice.candidate.params else 60.0)
    solution, _ = solved(problem)
    assert solution.total_us == 180
    assert {choice.candidate.params for choice in problem.chosen(solution)} == {()}


def test_steps_that_need_each_other_are_refused(tmp_path: Path) -> None:
    space = small(tmp_path, CHAIN, *SMALL)
    alone = {choice.cover.operators: choice for choice in space.choices if len(choice.cover.operators) == 1}
    ordered = order_steps(space.graph, [alone["y",], alone["product",], alone["biased",]])
    assert [choice.cover.operators[0] for choice in ordered] == ["product", "biased", "y"]
    with pytest.raises(InfeasibleError, match=r"these covers depend on each other: y$"):
        order_steps(space.graph, [alone["product",], alone["y",]])


def costs_of(space: Space, seed: int) -> dict[str, float]:
    """Return random costs; a cover of many operators would win nearly always, so it costs in proportion to them."""
    draw = random.Random(seed)
    costs = {conversion.call.key: float(UNIT * draw.randint(1, 20)) for conversion in space.conversions}
    for choice in space.choices:
        costs[choice.call.key] = float(UNIT * len(choice.cover.operators) * draw.randint(1, 60))
    return costs


@pytest.mark.slow
@pytest.mark.parametrize("p, seed", [(0.1, 0), (0.1, 1), (0.0, 2)])
def test_a_plan_of_the_layer_runs_from_step_to_step(p: float, seed: int) -> None:
    space = encoder(p)
    costs = costs_of(space, seed)
    problem = formulate(space).priced(costs)
    solution = SOLVERS["exact"](problem.problem)
    known = {key: Measurement("ok", median_us=cost) for key, cost in costs.items()}
    model = load_model("bert-encoder").instantiate(None, ODD, dict.fromkeys(SITES, p))
    found = build_configuration(model, space, known, Environment("cpu", "made up", ()), {})
    assert contradictions(space.graph, space.given, found.steps) == []
    assert len(found.steps) == len(problem.chosen(solution)) + len(problem.converted(solution))
    assert sum(step.predicted_us for step in found.steps) == solution.total_us == found.certificate.predicted_us
    assert found.certificate.lower_bound_us <= solution.total_us
    assert found.certificate.baseline_us is not None
    assert found.certificate.baseline_us >= solution.total_us
    assert found.certificate.default_us is not None
    assert found.certificate.default_us >= solution.total_us


@pytest.mark.slow
def test_the_walk_finds_a_form_that_was_not_made_and_an_operator_left_out() -> None:
    space = encoder(0.1, "declared")
    known = {key: Measurement("ok", median_us=cost) for key, cost in costs_of(space, 0).items()}
    model = load_model("bert-encoder").instantiate(None, ODD, dict.fromkeys(SITES, 0.1))
    steps = list(build_configuration(model, space, known, Environment("cpu", "made up", ()), {}).steps)
    assert contradictions(space.graph, space.given, steps) == []
    late = next(i for i, step in enumerate(steps) if step.inputs and step.inputs[0][0] in space.graph.producers)
    read = steps[late].inputs[0][0]
    turned = replace(steps[late], inputs=((read, "turned"), *steps[late].inputs[1:]))
    changed = [*steps[:late], turned, *steps[late + 1 :]]
    assert any(f"reads {read} as turned" in text for text in contradictions(space.graph, space.given, changed))
    left_out = contradictions(space.graph, space.given, steps[:-1])
    assert any("is computed 0 times" in text for text in left_out)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.0])
def test_a_cover_of_the_layer_is_chosen_when_it_is_cheap(p: float) -> None:
    space = encoder(p)
    wide = sorted({choice.cover.operators for choice in space.choices if len(choice.cover.operators) > 1})
    assert len(wide) > 35

    def favour(operators: tuple[str, ...]) -> Price:
        return lambda choice: 0.0 if choice.cover.operators == operators else 600.0 * len(choice.cover.operators)

    for operators in wide[:: len(wide) // 5]:
        assert operators in solved(priced(space, favour(operators)))[1], operators


@pytest.mark.slow
def test_stacked_projections_read_their_weights_and_make_their_gradients_as_declared() -> None:
    space = encoder(0.1)
    stack = ("query_projection", "key_projection", "value_projection", "query", "key", "value")
    problem = priced(
        space, lambda choice: 0.0 if choice.cover.operators == stack else 600.0 * len(choice.cover.operators)
    )
    solution, covers = solved(problem)
    assert stack in covers
    for name in ("query_weight", "key_weight", "value_weight"):
        assert forms(problem, solution, name) == {"nph"}
        assert "nph" in forms(problem, solution, f"grad_{name}")


def test_the_chain_is_the_longest_forward_path() -> None:
    problem = priced(encoder(0.1, "declared"), lambda _: 60.0).problem
    operators = [name.removeprefix("operator ") for name in problem.chain if name.startswith("operator ")]
    assert operators[0].endswith("_projection")
    assert operators[-1] == "y"
    for name in ("scores", "attention", "context", "norm1", "linear1", "activation", "linear2"):
        assert name in operators
    assert [name.split()[0] for name in problem.chain[:4]] == ["operator", "tensor", "operator", "tensor"]


def test_conversions_that_were_not_measured_are_not_used(tmp_path: Path) -> None:
    space = small(tmp_path, CHAIN, *SMALL)
    problem = priced(space, lambda _: 60.0, convert=None)
    assert problem.conversions == {}
    solution, _ = solved(problem)
    assert problem.converted(solution) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("recording", "saving"), [(TINY, True), (LARGE, False)], ids=["tiny, saving", "large"])
def test_pricing_again_gives_the_problem_that_pricing_first_gives(recording: Recording, saving: bool) -> None:
    space, measured = recording.space(), recording.costs_us
    draw = random.Random(0)
    covered = {choice.call.key for choice in space.choices if len(choice.cover.operators) == 1}
    others = {key: us * draw.uniform(0.5, 2) for key, us in measured.items()}
    fewer = {key: us for key, us in measured.items() if key in covered or draw.random() < 0.5}
    unpriced = formulate(space, saving=saving)
    structures = []
    for costs in (measured, others, fewer, measured):
        again, first = unpriced.priced(costs), formulate(space, saving=saving).priced(costs)
        assert again.problem.to_json() == first.problem.to_json()  # rows in the same order, too
        assert list(again.choices.items()) == list(first.choices.items())
        assert (again.conversions, again.base_bytes) == (first.conversions, first.base_bytes)
        structures.append(again.structure)
    assert structures[0] is structures[1]
    assert structures[1] is not structures[2]


def test_variables_say_what_the_texts_in_a_problem_name() -> None:
    formulation = formulate(TINY.space(), saving=True).priced(TINY.costs_us)
    roles = {variable.role for variable in formulation.variables.values()}
    assert roles == {"operator", "repeated", "tensor", "saved"}
    assert all(str(variable) == text for text, variable in formulation.variables.items())
    left = set(formulation.problem.variables) - formulation.variables.keys()
    assert left
    assert all(text.startswith("token ") for text in left)
