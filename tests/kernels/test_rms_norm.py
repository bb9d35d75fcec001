"""RMS norm: its numbers against torch's own, its gradients against autograd, and every layout row of its kernels."""

import pytest
import torch

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.models.build import build_graph
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.reference import evaluate
from tests.kernels.calls import copied, faults

EXTENTS = {"a": 3, "b": 4, "c": 5}
SPECS = {
    "rms_norm": ("abc,c->abc,ab", {"epsilon": 1e-6}),
    "rms_norm_grad_input": ("abc,abc,c,ab->abc", {}),
    "rms_norm_grad_parameters": ("abc,abc,ab->c", {}),
}
STATISTIC = "ab"


def subgraph(kind: str, dtype: str, spec: str = "") -> Subgraph:
    """Return one operator, its statistic in float32 at least."""
    known, attributes = SPECS[kind]
    left, right = ((side.split(",")) for side in (spec or known).split("->"))
    wide = "float64" if dtype == "float64" else "float32"
    types = [
        TensorType(tuple(EXTENTS[axis] for axis in axes), wide if axes == STATISTIC else dtype) for axes in left + right
    ]
    inputs, outputs = tuple(range(len(left))), tuple(range(len(left), len(types)))
    node = Node(kind, spec or known, inputs, outputs, tuple(attributes.items()))
    return Subgraph((node,), tuple(types), inputs, outputs)


def calls(kind: str, dtype: str) -> list[Call]:
    """Return every layout row that the kernel's rule admits."""
    kernel, one = KERNELS[f"torch_{kind}"], subgraph(kind, dtype)
    rows = (Candidate(kernel.name, row) for row in kernel.layouts(one))
    return [Call(one, row) for row in rows if kernel.refuses(one, row) is None]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", SPECS)
def test_every_layout_row_equals_the_reference(kind: str, dtype: str) -> None:
    found = calls(kind, dtype)
    assert len(found) == 6
    assert faults(found) == {}


def test_a_norm_of_float32_allocates_nothing_and_its_gradients_their_products_only() -> None:
    elements = 3 * 4 * 5
    for call, found in copied(calls("rms_norm", "float32")):
        assert (found.allocated, found.clones) == ((), 0), call.candidate
    for call, found in copied(calls("rms_norm_grad_parameters", "float32")):
        assert (found.allocated, found.clones) == ((4 * elements,), 0), call.candidate
    for call, found in copied(calls("rms_norm_grad_input", "float32")):
        assert sorted(found.allocated) == [4 * 12, 4 * elements], call.candidate
        assert found.clones == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_the_generic_compiler_computes_it(kind: str) -> None:
    one = subgraph(kind, "float32")
    row = tuple(one.tensors[number].axes for number in one.boundary)
    assert faults([Call(one, Candidate("inductor", row))]) == {}


def norm(axes: str, scale: str, rest: str) -> Graph:
    """Return the training graph of one norm."""
    tensors = {
        "x": Tensor("x", axes, "float64", "input"),
        "scale": Tensor("scale", scale, "float64", "parameter"),
        "y": Tensor("y", axes, "float64", "activation"),
        "reciprocal_root": Tensor("reciprocal_root", rest, "float64", "auxiliary"),
    }
    operator = Operator("y", "rms_norm", f"{axes},{scale}->{axes},{rest}", ("x", "scale"), ("y", "reciprocal_root"),
                        (("epsilon", 0.5),))  # fmt: skip
    return training_graph(Graph("norm", EXTENTS, tensors, (operator,), ("y",)))


@pytest.mark.parametrize("scale, rest", [("c", "ab"), ("ac", "b"), ("a", "bc")])
def test_it_normalises_any_axes_and_differentiates_as_autograd_does(scale: str, rest: str) -> None:
    graph = norm("abc", scale, rest)
    names = ["x", "scale", "grad_y"]
    draw = torch.Generator().manual_seed(0)
    known = {name: torch.randn(graph.shape(name), generator=draw, dtype=torch.float64) for name in names}
    made = evaluate(graph.subgraph(graph.operators, names, graph.outputs), list(known.values()))
    found = dict(zip(graph.outputs, made, strict=True))
    x, weight = known["x"].clone().requires_grad_(), known["scale"].clone().requires_grad_()
    left = "".join(axis for axis in "abc" if axis not in scale)
    turned = x.permute(["abc".index(axis) for axis in left + scale])
    normal = torch.nn.functional.rms_norm(turned, weight.shape, weight, 0.5)
    y = normal.permute([(left + scale).index(axis) for axis in "abc"])
    grad_x, grad_scale = torch.autograd.grad(y, [x, weight], known["grad_y"])
    for name, expected in {"y": y, "grad_x": grad_x, "grad_scale": grad_scale}.items():
        torch.testing.assert_close(found[name], expected)


def test_its_statistic_is_in_float32_where_the_model_is_in_bfloat16() -> None:
    definition = parse_definition(
        {
            "version": 1,
            "name": "norm",
            "axes": {"a": "row", "b": "column"},
            "inputs": {"x": {"axes": "ab"}},
            "parameters": {"scale": "b"},
            "operators": [
                {"name": "y", "kind": "rms_norm", "spec": "ab,b->ab,a", "inputs": ["x", "scale"],
                 "outputs": ["y", "reciprocal_root"], "attributes": {"epsilon": 1e-6}},
            ],
            "outputs": ["y"],
        },
        "norm",
    )  # fmt: skip
    graph = build_graph(definition, name="norm", extents={"a": 2, "b": 3}, options={}, dtype="bfloat16", origin="norm")
    assert graph.tensors["reciprocal_root"].dtype == "float32"
    assert graph.tensors["y"].dtype == "bfloat16"
