"""Norms that lack a bias, or scale and bias: numbers against torch's own, and every layout row of their kernels."""

import pytest
import torch
from torch import Tensor

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.reference import evaluate
from autotuner.space import build_space
from tests.kernels.calls import faults
from tests.made_up import CPU

EXTENTS = {"a": 3, "b": 4, "c": 5}
EPSILON = {"epsilon": 0.5}
SPECS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("layer_norm", "abc,c->abc,ab,ab", EPSILON),
    ("layer_norm", "abc->abc,ab,ab", EPSILON),
    ("layer_norm_grad_input", "abc,abc,ab,ab->abc", {}),
    ("layer_norm_grad_parameters", "abc,abc,ab,ab->c", {}),
    ("rms_norm", "abc->abc,ab", EPSILON),
    ("rms_norm_grad_input", "abc,abc,ab->abc", {}),
)


def subgraph(kind: str, spec: str, attributes: dict[str, float], dtype: str) -> Subgraph:
    left, right = (side.split(",") for side in spec.split("->"))
    wide = "float64" if dtype == "float64" else "float32"
    types = [TensorType(tuple(EXTENTS[x] for x in axes), wide if axes == "ab" else dtype) for axes in left + right]
    inputs, outputs = tuple(range(len(left))), tuple(range(len(left), len(types)))
    return Subgraph((Node(kind, spec, inputs, outputs, tuple(attributes.items())),), tuple(types), inputs, outputs)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("kind", "spec", "attributes"), SPECS)
def test_every_layout_row_equals_the_reference(kind: str, spec: str, attributes: dict[str, float], dtype: str) -> None:
    kernel, one = KERNELS[f"torch_{kind}"], subgraph(kind, spec, attributes, dtype)
    rows = (Candidate(kernel.name, row) for row in kernel.layouts(one))
    found = [Call(one, row) for row in rows if kernel.refuses(one, row) is None]
    assert len(found) == (6 if kind.startswith("rms") else 2)  # the library's layer norm wants rows that are contiguous
    assert faults(found) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec", "attributes"), SPECS)
def test_the_generic_compiler_computes_it(kind: str, spec: str, attributes: dict[str, float]) -> None:
    one = subgraph(kind, spec, attributes, "float32")
    row = tuple(one.tensors[number].axes for number in one.boundary)
    assert faults([Call(one, Candidate("inductor", row))]) == {}


def norm(kind: str, affine: int) -> Graph:
    """Return the training graph of x with a bias of its own, and a norm of that with so many vectors."""
    vectors = ["scale", "shift"][:affine]
    statistics = {"layer_norm": ["mean", "deviation"], "rms_norm": ["root"]}[kind]
    spec = ",".join(["blh", *("h" for _ in vectors)]) + "->" + ",".join(["blh", *("bl" for _ in statistics)])
    definition = {
        "version": 1,
        "name": "norm",
        "dtype": "float64",
        "axes": dict.fromkeys("blh", "some"),
        "inputs": {"x": {"axes": "blh"}},
        "parameters": {"offset": "h", **dict.fromkeys(vectors, "h")},
        "operators": [
            {"name": "moved", "kind": "bias", "spec": "blh,h->blh", "inputs": ["x", "offset"], "outputs": ["moved"]},
            {"name": "y", "kind": kind, "spec": spec, "inputs": ["moved", *vectors], "outputs": ["y", *statistics],
             "attributes": {"epsilon": 0.5}},
        ],
        "outputs": ["y"],
    }  # fmt: skip
    file = ModelFile("norm", parse_definition(definition, "norm"))
    model = file.instantiate(None, extents={"b": 2, "l": 3, "h": 5}, options={}, dtype="float64")
    return training_graph(model.graph())


def of_torch(kind: str, x: Tensor, vectors: list[Tensor]) -> Tensor:
    scale, shift = (*vectors, None, None)[:2]
    if kind == "layer_norm":
        return torch.nn.functional.layer_norm(x, (5,), scale, shift, eps=0.5)
    return torch.nn.functional.rms_norm(x, (5,), scale, eps=0.5)


@pytest.mark.parametrize(("kind", "affine"), [("layer_norm", 0), ("layer_norm", 1), ("layer_norm", 2),
                                              ("rms_norm", 0), ("rms_norm", 1)])  # fmt: skip
def test_gradients_are_those_of_autograd(kind: str, affine: int) -> None:
    graph = norm(kind, affine)
    torch.manual_seed(0)
    given = {
        name: torch.randn(graph.shape(name), dtype=torch.float64, requires_grad=True)
        for name, tensor in graph.tensors.items() if tensor.role in ("input", "parameter")
    }  # fmt: skip
    x, offset, *vectors = given.values()
    y = of_torch(kind, x + offset, vectors)
    grad = torch.randn_like(y)
    y.backward(grad)  # type: ignore[no-untyped-call]
    tensors = {name: value.detach() for name, value in given.items()} | {"grad_y": grad}
    for operator in graph.operators:
        numbers = {name: place for place, name in enumerate(dict.fromkeys((*operator.inputs, *operator.outputs)))}
        types = [TensorType(graph.shape(name), graph.tensors[name].dtype) for name in numbers]
        read, made = ([numbers[name] for name in names] for names in (operator.inputs, operator.outputs))
        node = Node(operator.kind, operator.spec, tuple(read), tuple(made), operator.attributes)
        inputs = tuple(dict.fromkeys(read))
        names = list(numbers)
        results = evaluate(Subgraph((node,), tuple(types), inputs, tuple(made)), [tensors[names[i]] for i in inputs])
        tensors |= {name: value for name, value in zip(operator.outputs, results, strict=True) if value is not None}
    torch.testing.assert_close(tensors["y"], y.detach())
    for name, value in given.items():
        torch.testing.assert_close(tensors[f"grad_{name}"], value.grad)


def fused(kind: str, affine: int) -> set[frozenset[str]]:
    """Return the kinds that the generic compiler covers at once, without gradients of what norms are scaled by."""
    space = build_space(norm(kind, affine), CPU)
    covers = (call.subgraph.kinds for call in space.calls.values() if call.candidate.kernel == "inductor")
    return {frozenset(cover) - {f"{kind}_grad_parameters"} for cover in covers} - {frozenset()}


@pytest.mark.parametrize(("kind", "affine", "whole"), [("layer_norm", 0, 2), ("layer_norm", 1, 2), ("rms_norm", 0, 1)])
def test_they_are_fused_as_norms_with_a_scale_and_a_bias_are(kind: str, affine: int, whole: int) -> None:
    found = fused(kind, affine)
    assert found == fused(kind, whole)
    assert frozenset({"bias", kind}) in found
