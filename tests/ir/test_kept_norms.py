"""Norms in float32 between products in 16 bits: they leave their normalised input for backward, in 16 bits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autotuner.ir.autodiff import norms_that_keep, training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Node, Subgraph, TensorType
from autotuner.kernels.reference import evaluate
from tests.mixed import definition, mixed, operator

EXTENTS = {"b": 8, "l": 16, "h": 64, "f": 32}
EPSILON = 1e-5


def block(kind: str = "layer_norm", low: str = "bfloat16", *before: Any, wide: str = "float32") -> Graph:
    """Return the forward graph of x, what `before` makes of it, a norm of that, and a product of the norm."""
    of = before[-1]["outputs"][0] if before else "x"
    statistics = {"layer_norm": ("mean", "deviation"), "rms_norm": ("root",)}[kind]
    vectors = ("scale", "shift")[: len(statistics)]
    spec = ",".join(["blh", *("h" for _ in vectors)]) + "->" + ",".join(["blh", *("bl" for _ in statistics)])
    given = {
        "version": 1,
        "name": "block",
        "dtype": wide,
        "axes": dict.fromkeys("blhf", "some"),
        "inputs": {"x": {"axes": "blh"}},
        "parameters": {**dict.fromkeys(vectors, "h"), "weight": {"axes": "fh", "dtype": low}},
        "operators": [
            *before,
            operator("norm", kind, spec, of, *vectors, made=("norm", *statistics), epsilon=EPSILON),
            operator("norm_low", "cast", "blh->blh", "norm", dtype=low),
            operator("y", "contraction", "blh,fh->blf", "norm_low", "weight"),
        ],
        "outputs": ["y"],
    }
    return ModelFile("block", parse_definition(given, "block")).instantiate(extents=EXTENTS).graph()


def run(graph: Graph, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute a training graph operator by operator, each result rounded to its type."""
    for each in graph.operators:
        numbers = {name: place for place, name in enumerate(dict.fromkeys((*each.inputs, *each.outputs)))}
        types = [TensorType(graph.shape(name), graph.tensors[name].dtype) for name in numbers]
        read, made = (tuple(numbers[name] for name in names) for names in (each.inputs, each.outputs))
        node = Node(each.kind, each.spec, read, made, each.attributes)
        inputs = tuple(dict.fromkeys(read))
        names = list(numbers)
        results = evaluate(Subgraph((node,), tuple(types), inputs, made), [tensors[names[i]] for i in inputs])
        tensors |= {name: value for name, value in zip(each.outputs, results, strict=True) if value is not None}
    return tensors


def kept(graph: Graph) -> list[tuple[str, str]]:
    """Return what is left for backward of three axes, with its type."""
    return [(name, graph.tensors[name].dtype) for name in graph.saved if len(graph.tensors[name].axes) == 3]


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_leaves_what_it_normalised_in_the_type_of_the_products(kind: str, low: str) -> None:
    graph = training_graph(block(kind, low))
    assert kept(graph) == [("norm_low", low), ("norm_normalised", low)]
    assert graph.outputs[1] == "grad_x"
    whole = training_graph(mixed().graph())
    assert "sum" not in whole.saved
    assert "y_normalised" in whole.saved


@pytest.mark.parametrize(
    "graph",
    [
        block(wide="bfloat16"),
        block(low="float32"),
    ],
    ids=["norm in 16 bits", "products in float32"],
)  # fmt: skip
def test_other_graphs_leave_the_input(graph: Graph) -> None:
    assert norms_that_keep(graph) == {}
    assert "x" in training_graph(graph).saved


def test_an_input_that_was_in_16_bits_or_that_others_read_in_backward_is_left_itself() -> None:
    low = operator("low", "cast", "blh->blh", "x", dtype="bfloat16")
    wide = operator("wide", "cast", "blh->blh", "low", dtype="float32")
    assert norms_that_keep(block("rms_norm", "bfloat16", low, wide)) == {}
    given = definition()
    given["operators"][-1] |= {"name": "norm", "outputs": ["norm", "mean", "deviation"]}
    given["operators"].append(operator("y", "multiply", "blh,blh->blh", "norm", "sum"))
    graph = ModelFile("gated", parse_definition(given, "gated")).instantiate(extents=EXTENTS).graph()
    assert norms_that_keep(graph) == {}
    assert "sum" in training_graph(graph).saved


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_gradients_are_as_near_to_float64_as_products_in_16_bits_let_them_be(kind: str, mean: float) -> None:
    """Rounding the input itself would leave nothing of it where its mean is 1,000."""
    graph = training_graph(block(kind))
    torch.manual_seed(0)
    given = {
        name: torch.randn(graph.shape(name)).to(getattr(torch, tensor.dtype))
        for name, tensor in graph.tensors.items() if tensor.role in ("input", "parameter")
    }  # fmt: skip
    given["x"] += mean
    grad = torch.randn(graph.shape("y")).bfloat16()
    found = run(graph, given | {"grad_y": grad})
    leaves = {name: value.double().requires_grad_() for name, value in given.items()}
    if kind == "layer_norm":
        normed = functional.layer_norm(leaves["x"], (64,), leaves["scale"], leaves["shift"], EPSILON)
    else:
        normed = functional.rms_norm(leaves["x"], (64,), leaves["scale"], EPSILON)
    (normed @ leaves["weight"].T).backward(grad.double())  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        off = (found[f"grad_{name}"].double() - leaf.grad).norm() / leaf.grad.norm()
        assert off < 5e-3, name
