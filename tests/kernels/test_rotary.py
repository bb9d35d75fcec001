"""Rotary embeddings: the numbers of LLaMA, gradients for any cosines and sines, and every layout row of the kernels."""

import pytest
import torch
from torch import Tensor

from autotuner.errors import GraphError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.graph import Tensor as GraphTensor
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.reference import evaluate
from autotuner.measure.operands import Values
from autotuner.measure.tolerance import terms
from tests.kernels.calls import copied, faults

KINDS = ("rotary", "rotary_grad")
ANGLES = ("bd", "abd", "db")
EXTENTS = {"a": 2, "b": 3, "c": 5, "d": 6}


def subgraph(kind: str, dtype: str, angle: str = "bd", features: int = 6) -> Subgraph:
    """Return one operator on a tensor of batch, position, head and feature."""
    extents = EXTENTS | {"d": features}
    specs = ("abcd", angle, angle, "abcd")
    types = tuple(TensorType(tuple(extents[axis] for axis in axes), dtype) for axes in specs)
    node = Node(kind, f"abcd,{angle},{angle}->abcd", (0, 1, 2), (3,), (("axis", "d"),))
    return Subgraph((node,), types, (0, 1, 2), (3,))


def calls(kind: str, dtype: str, angle: str = "bd") -> list[Call]:
    """Return every layout row that the kernel's rule admits."""
    kernel, one = KERNELS[f"torch_{kind}"], subgraph(kind, dtype, angle)
    rows = (Candidate(kernel.name, row) for row in kernel.layouts(one))
    return [Call(one, row) for row in rows if kernel.refuses(one, row) is None]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_row_equals_the_reference_and_allocates_nothing(kind: str, dtype: str) -> None:
    for angle in ANGLES:
        found = calls(kind, dtype, angle)
        assert len(found) == 24
        assert faults(found) == {}
        assert all((each.allocated, each.clones) == ((), 0) for _, each in copied(found[::5]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_generic_compiler_computes_it(kind: str) -> None:
    one = subgraph(kind, "float32")
    row = tuple(one.tensors[number].axes for number in one.boundary)
    assert faults([Call(one, Candidate("inductor", row))]) == {}


def graph(angle: str = "bd", features: int = 6) -> Graph:
    tensors = {
        "x": GraphTensor("x", "abcd", "float64", "input"),
        "cos": GraphTensor("cos", angle, "float64", "input"),
        "sin": GraphTensor("sin", angle, "float64", "input"),
        "y": GraphTensor("y", "abcd", "float64", "activation"),
    }
    operator = Operator("y", "rotary", f"abcd,{angle},{angle}->abcd", ("x", "cos", "sin"), ("y",), (("axis", "d"),))
    return training_graph(Graph("rotary", EXTENTS | {"d": features}, tensors, (operator,), ("y",)))


def rotate_half(x: Tensor) -> Tensor:
    """As LLaMA of Hugging Face has it."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def test_it_is_that_of_llama_and_its_gradient_that_of_autograd_whatever_the_sines_are() -> None:
    found, names = graph(), ["x", "cos", "sin", "grad_y"]
    assert found.outputs == ("y", "grad_x")
    draw = torch.Generator().manual_seed(0)
    known = {name: torch.randn(found.shape(name), generator=draw, dtype=torch.float64) for name in names}
    y, grad_x = evaluate(found.subgraph(found.operators, names, found.outputs), list(known.values()))
    x = known["x"].clone().requires_grad_()
    cos, sin = known["cos"][None, :, None, :], known["sin"][None, :, None, :]
    expected = x * cos + rotate_half(x) * sin
    (gradient,) = torch.autograd.grad(expected, [x], known["grad_y"])
    torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(grad_x, gradient)


def test_turning_back_by_the_same_angle_is_its_gradient() -> None:
    angles = torch.randn(3, 3, dtype=torch.float64)
    cos, sin = (torch.cat((made, made), -1) for made in (angles.cos(), angles.sin()))
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    (turned,) = evaluate(subgraph("rotary", "float64"), [x, cos, sin])
    (back,) = evaluate(subgraph("rotary_grad", "float64"), [turned, cos, sin])
    torch.testing.assert_close(back, x)


def test_an_odd_number_of_features_is_refused() -> None:
    with pytest.raises(GraphError, match=r"a rotary turns the halves of axis 'd' into each other, .* even, not 5"):
        graph(features=5)
    reason = KERNELS["torch_rotary"].refuses(
        subgraph("rotary", "float32", features=5), Candidate("torch_rotary", ("abcd", "ab", "ab", "abcd"))
    )
    assert reason == "an axis of 5 elements has no two halves"


def test_cosines_and_sines_are_made_up_as_such_and_no_sum_is_granted() -> None:
    one = subgraph("rotary", "float32")
    values = Values(one)
    assert all(float(values.inputs[number].abs().max()) <= 1 for number in (1, 2))
    assert terms(one, one.nodes[0]) == 1
