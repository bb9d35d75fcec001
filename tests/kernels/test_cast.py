"""Casts: every layout row of their kernel, fused sets that contain them, and whole steps of a mixed model."""

import pytest
import torch

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.reference import evaluate
from autotuner.kernels.rules.fused import fused_layouts, global_letters
from autotuner.measure.tolerance import TOLERANCES, allowed
from autotuner.runtime.check import masks_in
from autotuner.runtime.training_step import TrainingStep
from autotuner.space.fusion import covers
from tests.kernels.calls import copied, faults
from tests.mixed import mixed
from tests.runtime.plans import configuration


def cast(source: str, target: str) -> Subgraph:
    node = Node("cast", "abc->abc", (0,), (1,), (("dtype", target),))
    return Subgraph((node,), (TensorType((3, 4, 5), source), TensorType((3, 4, 5), target)), (0,), (1,))


@pytest.mark.parametrize(
    "source, target", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float64", "float32")]
)
def test_every_layout_row_equals_the_reference_and_copies_nothing(source: str, target: str) -> None:
    kernel, one = KERNELS["torch_cast"], cast(source, target)
    rows = (Candidate(kernel.name, row) for row in kernel.layouts(one))
    calls = [Call(one, row) for row in rows if kernel.refuses(one, row) is None]
    assert len(calls) == 6
    assert faults(calls) == {}
    for call, found in copied(calls):
        assert (found.allocated, found.clones) == ((), 0), call.candidate


def test_the_lowest_type_that_a_call_makes_decides_its_tolerance() -> None:
    assert allowed(cast("float32", "bfloat16"), "bfloat16")[0] == 4 * TOLERANCES["bfloat16"].epsilon
    assert allowed(cast("bfloat16", "float32"), "float32")[0] == 32 * TOLERANCES["float32"].epsilon
    low, high = TensorType((3, 4, 5), "bfloat16"), TensorType((3, 4, 5), "float32")
    nodes = (Node("relu", "abc->abc", (0,), (2,)), Node("cast", "abc->abc", (2,), (1,), (("dtype", "float32"),)))
    both = Subgraph(nodes, (low, high, low), (0,), (1,))
    assert allowed(both, "float32")[0] == 2 * 4 * TOLERANCES["bfloat16"].epsilon


def test_the_reference_keeps_the_digits_of_who_computes_in_float64() -> None:
    x = torch.full((3, 4, 5), 1.0 + 2.0**-30, dtype=torch.float64)
    (kept,) = evaluate(cast("float32", "bfloat16"), [x])
    (rounded,) = evaluate(cast("float32", "bfloat16"), [x.float()])
    assert kept is not None
    assert torch.equal(kept, x)
    assert rounded is not None
    assert rounded.dtype == torch.bfloat16


def sets(graph: Graph) -> dict[tuple[str, ...], Subgraph]:
    """Return the fused sets of a graph, by their operators."""
    named = {operator.name: operator for operator in graph.operators}
    return {
        cover.operators: graph.subgraph([named[name] for name in cover.operators], cover.inputs, cover.outputs)
        for cover in covers(graph, ["inductor"])
    }


def test_casts_at_the_edges_of_a_norm_are_fused_with_it() -> None:
    found = sets(training_graph(mixed().graph()))
    assert ("dropped", "high", "sum", "y", "y_normalised") in found
    assert ("up_bias_low", "biased", "active") in found


def test_a_vector_that_is_cast_keeps_its_declared_order() -> None:
    subgraph = sets(training_graph(mixed().graph()))["up_bias_low", "biased", "active"]
    letters = global_letters(subgraph)
    (vector,) = (number for number in subgraph.boundary if len(subgraph.tensors[number].extents) == 1)
    assert letters[vector] == letters[subgraph.outputs[-1]][-1]
    assert len(list(fused_layouts(subgraph))) == 6


@pytest.mark.slow
def test_the_generic_compiler_computes_sets_with_casts() -> None:
    for names, one in sets(training_graph(mixed().graph())).items():
        row = tuple(one.tensors[number].axes for number in one.boundary)
        assert faults([Call(one, Candidate("inductor", row))]) == {}, names


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(2))
def test_a_step_of_a_mixed_model_is_right_in_any_layouts(low: str, seed: int) -> None:
    model = mixed(low)
    graph = training_graph(model.graph())
    draw = torch.Generator().manual_seed(seed)
    given = {name: torch.randn(graph.shape(name), generator=draw).to(getattr(torch, tensor.dtype))
             for name, tensor in graph.tensors.items() if tensor.role in ("input", "parameter")}  # fmt: skip
    plan = configuration(model, seed)
    step = TrainingStep(plan, given)
    torch.manual_seed(seed)
    y = step.forward(given["x"]).clone()
    (kept,) = masks_in(step.workspace, plan).values()
    mask = kept.double() / 0.75 if kept.dtype == torch.bool else kept.double()
    grad = torch.randn(graph.shape("y"), generator=draw)
    found = step.backward(grad)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        f"grad_{name}": tensor.dtype for name, tensor in given.items()
    }
    names = [*given, "grad_y"]
    numbers = {name: place for place, name in enumerate(dict.fromkeys(
        (*names, *graph.outputs, *(t for o in graph.operators for t in o.inputs + o.outputs))))}  # fmt: skip
    wanted = evaluate(graph.subgraph(graph.operators, names, graph.outputs),
                      [*(tensor.double() for tensor in given.values()), grad.double()],
                      {numbers["mask"]: mask})  # fmt: skip
    epsilon = torch.finfo(getattr(torch, low)).eps
    for name, reference in zip(graph.outputs, wanted, strict=True):
        mine = y if name == "y" else found[name]
        assert reference is not None
        error = (mine.double() - reference).abs().max() / reference.abs().max()
        assert error < 8 * epsilon, name


def casts_at_once() -> dict[tuple[str, ...], Subgraph]:
    graph = training_graph(mixed().graph())
    named = {operator.name: operator for operator in graph.operators}
    return {
        cover.operators: graph.subgraph([named[name] for name in cover.operators], cover.inputs, cover.outputs)
        for cover in covers(graph, ["torch_casts"])
    }


def test_casts_of_parameters_and_of_their_gradients_are_made_at_once() -> None:
    found = casts_at_once()
    assert set(found) == {("up_low", "up_bias_low"), ("grad_up_bias", "grad_up")}
    for names, one in found.items():
        row = tuple(one.tensors[number].axes for number in one.boundary)
        assert faults([Call(one, Candidate("torch_casts", row))]) == {}, names


def test_casts_at_once_want_each_tensor_to_lie_as_its_cast() -> None:
    one = casts_at_once()["up_low", "up_bias_low"]
    reason = KERNELS["torch_casts"].refuses(one, Candidate("torch_casts", ("ab", "a", "ba", "a")))
    assert reason == "it casts tensors as they lie; one lies as ab, and its cast as ba"
