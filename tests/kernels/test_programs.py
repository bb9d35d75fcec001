"""Programs of ATen calls: what they compute, and their gradients, against torch's autograd in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as aot
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from autotuner.errors import GraphError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.program import parse_program
from autotuner.kernels.reference import evaluate
from autotuner.kernels.torch.programs import acts_by_element, check_calls, function_of, gradients, refusal
from tests.programs import expression, graph_of, written

EXTENTS = {"b": 2, "l": 5, "n": 3, "p": 4, "h": 12}
CAP = [("div.Tensor", ["%0", 5.0]), ("tanh.default", ["%1"]), ("mul.Tensor", ["%2", 5.0])]
MODULATED = [("add.Tensor", ["%1", 1.0]), ("mul.Tensor", ["%0", "%3"]), ("add.Tensor", ["%4", "%2"])]
TURNED = [("view.default", ["%0", [2, 5, 3, 4]]), ("permute.default", ["%1", [0, 2, 1, 3]])]
ROLLED = [("roll.default", ["%0", [1], [1]]), ("constant_pad_nd.default", ["%2", [0, 0, 0, 0]]),
          ("cumsum.default", ["%3", 1]), ("split.Tensor", ["%4", 6, 2]), ("getitem", ["%5", 1]),
          ("mul.Tensor", ["%6", "%1"])]  # fmt: skip
MIXTURE = [("softmax.int", ["%0", -1]), ("topk.default", ["%2", 2]), ("getitem", ["%3", 0]),
           ("sum.dim_IntList", ["%4", [-1], True]), ("div.Tensor", ["%4", "%5"]),
           ("mul.Tensor", ["%6", "%1"])]  # fmt: skip


def of_graph(graph: Graph, given: Sequence[Tensor]) -> list[Tensor | None]:
    inputs = [*(name for name, tensor in graph.tensors.items() if tensor.role == "input"), *graph.given_gradients]
    return evaluate(graph.subgraph(graph.operators, inputs, graph.outputs), given)


def equal_to_autograd(kind: str, spec: str, text: str, eager: Callable[..., Tensor], extents: dict[str, int]) -> None:
    """Compare an operator and its gradients, operands in float64, with eager's."""
    forward = graph_of(kind, spec, text, extents)
    graph = training_graph(forward)
    generator = torch.Generator().manual_seed(2)
    wanted = [each.wanted for each in parse_program(text).inputs]
    inputs = [torch.randn(graph.shape(f"x{place}"), generator=generator, dtype=torch.float64).requires_grad_(needs)
              for place, needs in enumerate(wanted)]  # fmt: skip
    y = eager(*inputs)
    grad = torch.randn(graph.shape("y"), generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(y, [x for x in inputs if x.requires_grad], grad.reshape(y.shape))
    found = of_graph(graph, [*(x.detach() for x in inputs), grad])
    assert len(found) == 1 + sum(wanted)
    for made, expected in zip(found, (y.detach(), *gradients), strict=True):
        assert made is not None
        torch.testing.assert_close(made.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "calls, spec, eager",
    [
        (CAP, "blh->blh", lambda x: torch.tanh(x / 5.0) * 5.0),
        (MODULATED, "blh,bh,bh->blh", lambda x, s, t: x * (1 + s[:, None]) + t[:, None]),
        ([("mul.Tensor", ["%0", "%1"])], "blnp,nb->blnp", lambda x, s: x * s.T[:, None, :, None]),
        ([("mul.Tensor", ["%0", "%1"])], "bl,h->blh", lambda x, s: x[..., None] * s),
        ([("add.Tensor", ["%0", "%1"])], "blh,h->blh", lambda x, s: x + s),
        ([("relu.default", ["%0"]), ("square.default", ["%1"])], "blh->blh", lambda x: torch.relu(x) ** 2),
        ([("gt.Scalar", ["%1", 0]), ("where.self", ["%2", "%0", "%1"])], "blh,blh->blh",
         lambda x, y: torch.where(y > 0, x, y)),
    ],
    ids=["soft cap", "modulation", "turned", "outer", "bias", "squared relu", "where"],
)  # fmt: skip
def test_an_expression_and_its_gradients_equal_autograd(
    calls: Any, spec: str, eager: Callable[..., Tensor], dtype: str
) -> None:
    text = expression(calls, *[dtype] * (spec.count(",") + 1), output=dtype)
    check_calls(parse_program(text), "pointwise")
    equal_to_autograd("pointwise", spec, text, eager, EXTENTS)


def test_casts_inside_of_an_expression_are_read_wide() -> None:
    calls: Any = [("_to_copy.default", ["%0"], {"dtype": "dtype:float32"}), ("mul.Tensor", ["%1", "%1"]),
                  ("_to_copy.default", ["%2"], {"dtype": "dtype:bfloat16"}), ("sigmoid.default", ["%3"])]  # fmt: skip
    text = expression(calls, "bfloat16")
    equal_to_autograd("pointwise", "blh->blh", text, lambda x: torch.sigmoid(x * x), EXTENTS)


@pytest.mark.parametrize(
    "calls, inputs, output, spec, eager",
    [
        (TURNED, [[2, 5, 12]], [2, 3, 5, 4], "blh->bnlp", lambda x: x.reshape(2, 5, 3, 4).transpose(1, 2)),
        (ROLLED, [[2, 5, 12], [2, 5, 6]], [2, 5, 6], "abc,abd->abd",
         lambda x, w: x.roll(1, 1).cumsum(1)[..., 6:] * w),
        (MIXTURE, [[10, 4], [10, 2]], [10, 2], "blp,ac->blc",
         lambda x, w: (t := x.reshape(10, 4).softmax(-1).topk(2)[0]) / t.sum(-1, keepdim=True) * w),
        ([("baddbmm.default", ["%0", "%1", "%2"], {"beta": 0.5})], [[2, 5, 3], [2, 5, 4], [2, 4, 3]], [2, 5, 3],
         "bln,blp,bpn->bln", lambda x, y, z: torch.baddbmm(x, y, z, beta=0.5)),
        ([("arange.start_step", [0, 5, 1]), ("arange.default", [5]), ("unsqueeze.default", ["%1", 1]),
          ("le.Tensor", ["%2", "%3"]), ("logical_not.default", ["%4"]),
          ("masked_fill.Scalar", ["%0", "%5", "float:-inf"]), ("_softmax.default", ["%6", -1, False])],
         [[2, 5, 5]], [2, 5, 5], "blk->blk",
         lambda x: x.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)),
        ([("native_layer_norm.default", ["%0", [12], "%1", None, 1e-5]), ("getitem", ["%2", 0])],
         [[2, 5, 12], [12]], [2, 5, 12], "blh,h->blh", lambda x, w: functional.layer_norm(x, (12,), w)),
    ],
    ids=["view", "rolled window", "routing", "baddbmm", "mask of positions", "norm"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_program_and_its_gradients_equal_autograd(
    calls: Any, inputs: Any, output: Any, spec: str, eager: Callable[..., Tensor], dtype: str
) -> None:
    text = written(calls, [[dtype, shape, True] for shape in inputs], [dtype, output])
    check_calls(parse_program(text))
    letters = spec.replace("->", ",").split(",")
    extents: dict[str, int] = dict(EXTENTS)
    for axes, shape in zip(letters, [*inputs, output], strict=True):
        if len(axes) == len(shape):
            extents |= dict(zip(axes, shape, strict=True))
    if spec == "blp,ac->blc":
        extents = {"b": 2, "l": 5, "p": 4, "a": 10, "c": 2}
    equal_to_autograd("program", spec, text, eager, extents)


GRADIENT_OF_A_SINE = expression([("sin.default", ["%0"])], "float64")


@torch.library.custom_op("autotuner_tests::gradient_of_a_sine", mutates_args=())
def gradient_of_a_sine(x: Tensor) -> Tensor:
    function = function_of(parse_program(GRADIENT_OF_A_SINE))
    (found,) = gradients(function, [0], torch.ones_like(x), [x])
    traced = make_fx(lambda *given: gradients(function, [0], *given))(torch.ones_like(x), [x])
    assert torch.equal(traced(torch.ones_like(x), [x])[0], found)
    return found


@gradient_of_a_sine.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_found_inside_of_an_operator_whose_aliases_torch_checks(autocast: bool) -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    with aot.patch(check_custom_op_aliasing=True), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = torch.compile(lambda x: gradient_of_a_sine(x * 2) * 2, backend="aot_eager")(x)
    torch.testing.assert_close(found, 2 * torch.cos(2 * x), rtol=0, atol=1e-15)


def test_inputs_that_no_gradient_reads_are_not_saved() -> None:
    assert parse_program(written(TURNED, [["float32", [2, 5, 12], True]], ["float32", [2, 3, 5, 4]])).saved == ()
    assert parse_program(expression([("mul.Tensor", ["%0", "%1"])], "float32", "float32", wanted=[0])).saved == (1,)
    assert parse_program(expression([("add.Tensor", ["%0", "%1"])], "float32", "float32")).saved == ()
    text = expression([("mul.Tensor", ["%0", "%1"])], "float32", "float32")
    graph = training_graph(graph_of("pointwise", "bl,l->bl", text, EXTENTS))
    backward = [(o.kind, o.spec, o.inputs) for o in graph.operators if o.phase == "backward"]
    assert backward == [("pointwise_grad", "bl,bl,l->bl", ("grad_y", "x0", "x1")),
                        ("pointwise_sum", "bl,bl,l->l", ("grad_y", "x0", "x1"))]  # fmt: skip


def test_types_inside_are_kept_unless_inputs_come_in_float64() -> None:
    text = expression([("_to_copy.default", ["%0"], {"dtype": "dtype:float32"})], "bfloat16", output="float32")
    graph = graph_of("pointwise", "l->l", text, {"l": 3})
    subgraph = graph.subgraph(graph.operators, ["x0"], ["y"])
    low = torch.full((3,), 1.0 + 2**-7, dtype=torch.bfloat16)
    (narrow,), (wide,) = (evaluate(subgraph, [given]) for given in (low, low.double() + 1e-12))
    assert narrow is not None
    assert narrow.dtype == torch.float32
    assert wide is not None
    assert wide.dtype == torch.float64
    assert float(wide[0]) == 1.0 + 2**-7 + 1e-12


def test_a_tensor_may_be_read_twice() -> None:
    text = written([("matmul.default", ["%0", "%1"])], [["float32", [3, 3], True]] * 2, ["float32", [3, 3]])
    forward = graph_of("program", "ab,ab->ab", text, {"a": 3, "b": 3})
    tensors = {name: tensor for name, tensor in forward.tensors.items() if name != "x1"}
    (operator,) = forward.operators
    graph = training_graph(replace(forward, tensors=tensors, operators=(replace(operator, inputs=("x0", "x0")),)))
    x, grad = torch.randn(3, 3).double().requires_grad_(), torch.randn(3, 3).double()
    (expected,) = torch.autograd.grad(x @ x, [x], grad)
    made = of_graph(graph, [x.detach(), grad])[1]
    assert made is not None
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(
    "name, said",
    [
        ("mul_.Tensor", "it changes its operands"), ("mul.out", "it changes its operands"),
        ("rand_like.default", "random"), ("dropout.default", "random"), ("nonzero.default", "shape of its result"),
        ("item.default", "waits"), ("equal.default", "waits"), ("from_file.default", "reads a file"),
        ("empty_like.default", "not written"), ("mule.Tensor", "no such overload"), ("mul.Tensors", "no such"),
        ("native_batch_norm.default", "statistics"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_follow_from_its_arguments_alone_is_refused(name: str, said: str) -> None:
    assert said in (refusal(name) or "")
    assert not acts_by_element(name)


def test_calls_that_do_not_fit_are_refused() -> None:
    with pytest.raises(GraphError, match=r"call 0 of a pointwise, cumsum.default, is not possible: it does not act"):
        check_calls(parse_program(expression([("cumsum.default", ["%0", 0])], "float32", wanted=[])), "pointwise")
    with pytest.raises(GraphError, match=r"a program makes float32 of shape \[3, 2\]; its text says float32, \[2, 3\]"):
        check_calls(parse_program(written([("t.default", ["%0"])], [["float32", [2, 3], True]], ["float32", [2, 3]])))
    wrong = written([("index.Tensor", ["%0", ["%1"]])], [["float32", [4], True]] * 2, ["float32", [2]], saved=[])
    with pytest.raises(GraphError, match="a program cannot run: "):
        check_calls(parse_program(wrong))
