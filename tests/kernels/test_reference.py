"""The reference kernels, and by them the training graph, against torch autograd in float64."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autotuner.errors import GraphError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.graph import Tensor as GraphTensor
from autotuner.ir.kinds import KINDS
from autotuner.ir.models import load_model
from autotuner.ir.records import Node, Scalar, Subgraph, TensorType
from autotuner.kernels.reference import REFERENCE, evaluate

SMALL = {"b": 2, "l": 5, "h": 6, "n": 2, "p": 3, "f": 8}
ODD = {"b": 1, "l": 7, "h": 11, "n": 3, "p": 5, "f": 13}
DROPOUT_SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")
NO_DROPOUT: dict[str, Scalar] = dict.fromkeys(DROPOUT_SITES, 0.0)


def layer(extents: Mapping[str, int], options: Mapping[str, Scalar]) -> Graph:
    """Return the training graph of an encoder layer in float64."""
    return training_graph(load_model("bert-encoder").instantiate(None, extents, options, "float64").graph())


def values(graph: Graph, p: Mapping[str, float]) -> dict[str, Tensor]:
    """Return random inputs, parameters and given gradients, and drawn masks."""
    generator = torch.Generator().manual_seed(1)
    given = [name for name, t in graph.tensors.items() if t.role in ("input", "parameter")]
    made = {
        name: torch.randn(graph.shape(name), generator=generator, dtype=torch.float64)
        for name in (*given, *graph.given_gradients)
    }
    for operator in graph.operators:
        if operator.kind == "dropout_mask":
            (mask,) = operator.outputs
            drop = p[mask.removesuffix("_mask")]
            kept = torch.rand(graph.shape(mask), generator=generator, dtype=torch.float64) >= drop
            made[mask] = kept / (1 - drop)
    if "attention_mask" in made:
        made["attention_mask"][:, -2:] = -math.inf
    return made


def run_whole(graph: Graph, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the training graph as one subgraph, masks given."""
    masks = [o.outputs[0] for o in graph.operators if o.kind == "dropout_mask"]
    inputs = [name for name in known if name not in masks]
    outputs = [*graph.outputs, *masks]
    subgraph = graph.subgraph(graph.operators, inputs, outputs)
    numbers = dict(zip(outputs, subgraph.outputs, strict=True))
    made = evaluate(subgraph, [known[name] for name in inputs], {numbers[mask]: known[mask] for mask in masks})
    return {name: tensor for name, tensor in zip(outputs, made, strict=True) if tensor is not None}


def run_one_by_one(graph: Graph, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run every operator as a subgraph of its own; optional tensors stay absent."""
    found = dict(known)
    for operator in graph.operators:
        if operator.outputs[0] in found:
            continue
        outputs = [name for name in operator.outputs if not graph.tensors[name].optional]
        inputs = list(dict.fromkeys(operator.inputs))
        made = evaluate(graph.subgraph([operator], inputs, outputs), [found.get(name) for name in inputs])
        found.update((name, tensor) for name, tensor in zip(outputs, made, strict=True) if tensor is not None)
    return found


def autograd(graph: Graph, known: Mapping[str, Tensor], activation: str, epsilon: float = 1e-5) -> dict[str, Tensor]:
    """Run the layer as torch's own functions and differentiate it."""
    functional = torch.nn.functional
    leaf = {
        name: tensor.clone().requires_grad_() for name, tensor in known.items()
        if graph.tensors[name].role in ("input", "parameter") and name != "attention_mask"
    }  # fmt: skip
    h, n, p = graph.extents["h"], graph.extents["n"], graph.extents["p"]

    def dropped(x: Tensor, site: str) -> Tensor:
        return x * known[f"{site}_mask"] if f"{site}_mask" in known else x

    def heads(name: str) -> Tensor:
        weight, bias = leaf[f"{name}_weight"].reshape(n * p, h), leaf[f"{name}_bias"].reshape(n * p)
        return functional.linear(leaf["x"], weight, bias).reshape(*leaf["x"].shape[:2], n, p).transpose(1, 2)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = query @ key.transpose(-1, -2) / math.sqrt(p)
    if "attention_mask" in known:
        scores = scores + known["attention_mask"][:, None, None, :]
    context = dropped(scores.softmax(-1), "attention_dropout") @ value
    out = functional.linear(
        context.transpose(1, 2).flatten(2), leaf["output_weight"].reshape(h, n * p), leaf["output_bias"]
    )
    residual = leaf["x"] + dropped(out, "output_dropout")
    norm = functional.layer_norm(residual, (h,), leaf["norm1_scale"], leaf["norm1_bias"], epsilon)
    hidden = functional.linear(norm, leaf["linear1_weight"], leaf["linear1_bias"])
    active = {
        "gelu_erf": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }[activation](hidden)
    out = functional.linear(dropped(active, "activation_dropout"), leaf["linear2_weight"], leaf["linear2_bias"])
    residual = norm + dropped(out, "feed_forward_dropout")
    y = functional.layer_norm(residual, (h,), leaf["norm2_scale"], leaf["norm2_bias"], epsilon)
    gradients = torch.autograd.grad(y, list(leaf.values()), known["grad_y"])
    return {"y": y.detach(), **{f"grad_{name}": grad for name, grad in zip(leaf, gradients, strict=True)}}


@pytest.mark.slow
@pytest.mark.parametrize("extents", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("drop", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("activation", ["gelu_erf", "gelu_tanh", "relu"])
def test_the_training_graph_equals_autograd(
    activation: str, drop: float, masked: bool, extents: Mapping[str, int]
) -> None:
    options: dict[str, Scalar] = {"activation": activation, "attention_mask": masked}
    graph = layer(extents, options | dict.fromkeys(DROPOUT_SITES, drop))
    known = values(graph, dict.fromkeys(DROPOUT_SITES, drop))
    assert sum(name.endswith("dropout_mask") for name in known) == (4 if drop else 0)
    expected = autograd(graph, known, activation)
    assert set(graph.outputs) == set(expected)
    assert len(expected) == 18
    for found in (run_whole(graph, known), run_one_by_one(graph, known)):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)


def test_each_dropout_site_has_its_own_p() -> None:
    p = dict(zip(DROPOUT_SITES, (0.1, 0.0, 0.5, 0.2), strict=True))
    graph = layer(SMALL, p)
    known = values(graph, p)
    assert "output_dropout_mask" not in known
    expected = autograd(graph, known, "gelu_erf")
    found = run_whole(graph, known)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)


def one(
    kind: str, spec: str, shapes: list[tuple[int, ...]], outputs: list[tuple[int, ...]], **attributes: Scalar
) -> Subgraph:
    """Return a subgraph of one node, over as many tensors as shapes are given."""
    tensors = tuple(TensorType(shape, "float64") for shape in [*shapes, *outputs])
    inputs = tuple(range(len(shapes)))
    made = tuple(range(len(shapes), len(tensors)))
    return Subgraph((Node(kind, spec, inputs, made, tuple(attributes.items())),), tensors, inputs, made)


def test_a_bias_may_lie_on_any_axes_in_any_order() -> None:
    x, bias = torch.randn(2, 3, 4), torch.randn(4, 2)
    (y,) = evaluate(one("bias", "abc,ca->abc", [(2, 3, 4), (4, 2)], [(2, 3, 4)]), [x, bias])
    assert y is not None
    torch.testing.assert_close(y, x + bias.T[:, None, :])
    (grad,) = evaluate(one("bias_grad", "abc->ca", [(2, 3, 4)], [(4, 2)]), [x])
    assert grad is not None
    torch.testing.assert_close(grad, x.sum(1).T)


def test_a_causal_mask_keeps_the_keys_up_to_each_query() -> None:
    x = torch.arange(6.0).reshape(2, 3).double()
    causal = one("causal_mask", "ab->ab", [(2, 3)], [(2, 3)], query_axis="a", key_axis="b")
    turned = one("causal_mask", "ba->ba", [(3, 2)], [(3, 2)], query_axis="a", key_axis="b")
    (y,), (z,) = evaluate(causal, [x]), evaluate(turned, [x.T])
    assert y is not None
    assert z is not None
    assert y.tolist() == [[0.0, -math.inf, -math.inf], [3.0, 4.0, -math.inf]]
    assert torch.equal(z, y.T)


def test_softmax_runs_along_the_axis_that_it_names() -> None:
    x = torch.randn(2, 3, 4)
    weights, sums = evaluate(one("softmax", "abc->abc,ac", [(2, 3, 4)], [(2, 3, 4), (2, 4)], axis="b"), [x])
    assert weights is not None
    assert sums is not None
    torch.testing.assert_close(weights, x.softmax(1))
    torch.testing.assert_close(sums, x.logsumexp(1))


def test_sinks_are_one_more_term_of_a_softmax_and_get_the_gradient_that_autograd_gives_them() -> None:
    x, sink = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(3, dtype=torch.float64).requires_grad_()
    beside = torch.cat([x, sink[:, None, None].expand(2, 3, 4, 1)], -1)
    shapes = [(2, 3, 4, 5), (2, 3, 4)]
    weights, sums = evaluate(one("sink_softmax", "abcd,b->abcd,abc", [shapes[0], (3,)], shapes, axis="d"), [x, sink])
    torch.testing.assert_close(weights, beside.softmax(-1)[..., :-1])
    torch.testing.assert_close(sums, beside.logsumexp(-1))
    grad = torch.randn_like(x)
    (wanted,) = torch.autograd.grad(beside.softmax(-1)[..., :-1], sink, grad)
    gradient = one("sink_grad", "abcd,abcd,abc,b->b", [shapes[0], *shapes, (3,)], [(3,)], axis="d")
    (found,) = evaluate(gradient, [grad, *(each.detach() for each in (weights, sums, sink) if each is not None)])
    torch.testing.assert_close(found, wanted)


def test_the_log_sum_exp_is_computed_only_when_asked_for() -> None:
    whole = one("softmax", "ab->ab,a", [(2, 3)], [(2, 3), (2,)], axis="b")
    weights_only = Subgraph(whole.nodes, whole.tensors, whole.inputs, whole.outputs[:1])

    def traced_operators(subgraph: Subgraph) -> str:
        return str(make_fx(lambda x: evaluate(subgraph, [x]))(torch.randn(2, 3)).code)

    assert "logsumexp" in traced_operators(whole)
    assert "logsumexp" not in traced_operators(weights_only)


def test_layer_norm_may_normalise_two_axes_and_keeps_its_statistics() -> None:
    x, scale, bias = torch.randn(2, 3, 4).double(), torch.randn(2, 4).double(), torch.randn(2, 4).double()
    shapes = [(2, 3, 4), (2, 4), (2, 4)]
    norm = one("layer_norm", "abc,ac,ac->abc,b,b", shapes, [(2, 3, 4), (3,), (3,)], epsilon=0.5)
    y, mean, deviation = evaluate(norm, [x, scale, bias])
    wanted = torch.nn.functional.layer_norm(x.transpose(0, 1), (2, 4), scale, bias, 0.5).transpose(0, 1)
    assert y is not None
    assert mean is not None
    assert deviation is not None
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(mean, x.mean((0, 2)))
    torch.testing.assert_close(deviation, (x.var((0, 2), unbiased=False) + 0.5).rsqrt())


def test_a_byte_mask_and_a_raw_mask_give_the_same_dropout() -> None:
    x = torch.randn(64).double()
    kept = torch.arange(64) % 3 > 0
    node = one("dropout", "a,a->a", [(64,), (64,)], [(64,)], p=0.25)
    (raw,), (byte,) = evaluate(node, [x, kept / 0.75]), evaluate(node, [x, kept])
    assert raw is not None
    assert byte is not None
    assert raw[1] == pytest.approx(float(x[1]) / 0.75)
    torch.testing.assert_close(raw, byte, rtol=1e-6, atol=0)


def test_a_drawn_mask_keeps_the_right_share_at_the_right_scale() -> None:
    torch.manual_seed(0)
    (mask,) = evaluate(one("dropout_mask", "->ab", [], [(400, 250)], p=0.2), [])
    assert mask is not None
    assert mask.dtype == torch.float64
    assert set(mask.flatten().tolist()) == {0.0, 1.25}
    # 100,000 draws: a standard deviation is 0.0013.
    assert (mask == 0).double().mean().item() == pytest.approx(0.2, abs=0.007)


def test_a_given_mask_is_not_drawn() -> None:
    mask = torch.tensor([True, False])
    (found,) = evaluate(one("dropout_mask", "->a", [], [(2,)], p=0.5), [], {0: mask})
    assert found is mask


def test_relu_passes_no_gradient_at_zero() -> None:
    y, grad = torch.tensor([0.0, 2.0]), torch.tensor([3.0, 3.0])
    (found,) = evaluate(one("relu_grad", "a,a->a", [(2,), (2,)], [(2,)]), [grad, y])
    assert found is not None
    assert found.tolist() == [0.0, 3.0]


@pytest.mark.slow
def test_the_whole_training_graph_can_be_traced() -> None:
    graph = layer(SMALL, NO_DROPOUT)
    known = values(graph, {})
    subgraph = graph.subgraph(graph.operators, list(known), graph.outputs)
    operands = list(known.values())
    traced = make_fx(lambda *inputs: evaluate(subgraph, inputs))(*operands)
    for found, wanted in zip(traced(*operands), evaluate(subgraph, operands), strict=True):
        torch.testing.assert_close(found, wanted)


def test_terms_of_a_gradient_are_summed_whatever_reads_the_tensor() -> None:
    """x is read twice by one operator, twice by others, and is handed a gradient unchanged."""
    tensors = {t.name: t for t in (
        GraphTensor("x", "ab", "float64", "input"), GraphTensor("w", "b", "float64", "parameter"),
        GraphTensor("square", "ac", "float64", "activation"), GraphTensor("twice", "ab", "float64", "activation"),
        GraphTensor("biased", "ab", "float64", "activation"), GraphTensor("active", "ab", "float64", "activation"),
        GraphTensor("y", "ab", "float64", "activation"), GraphTensor("z", "ab", "float64", "activation"),
    )}  # fmt: skip
    graph = training_graph(
        Graph("many readers", {"a": 3, "b": 4, "c": 3}, tensors, (
            Operator("square", "contraction", "ab,cb->ac", ("x", "x"), ("square",)),
            Operator("twice", "contraction", "ac,cb->ab", ("square", "x"), ("twice",)),
            Operator("biased", "bias", "ab,b->ab", ("x", "w"), ("biased",)),
            Operator("active", "gelu_erf", "ab->ab", ("x",), ("active",)),
            Operator("y", "add", "ab,ab->ab", ("twice", "biased"), ("y",)),
            Operator("z", "add", "ab,ab->ab", ("y", "active"), ("z",)),
        ), ("z", "y"))
    )  # fmt: skip
    x, w = torch.randn(3, 4).double().requires_grad_(), torch.randn(4).double().requires_grad_()
    grad_z, grad_y = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    y = x @ x.T @ x + x + w
    z = y + torch.nn.functional.gelu(x)
    grad_x, grad_w = torch.autograd.grad([z, y], [x, w], [grad_z, grad_y])
    found = run_whole(graph, {"x": x.detach(), "w": w.detach(), "grad_z": grad_z, "grad_y": grad_y})
    assert graph.outputs == ("z", "y", "grad_x", "grad_w")
    torch.testing.assert_close(found["grad_x"], grad_x)
    torch.testing.assert_close(found["grad_w"], grad_w)


def test_a_gated_feed_forward_and_a_square_equal_autograd() -> None:
    """A product of two tensors, and of one with itself."""
    axes = {"x": "ab", "gate": "ac", "wide": "ac", "active": "ac", "gated": "ac", "y": "ac"}
    roles = {"x": "input"}
    tensors = {name: GraphTensor(name, own, "float64", roles.get(name, "activation"))  # type: ignore[arg-type]
               for name, own in axes.items()}  # fmt: skip
    for name in ("gate_weight", "wide_weight"):
        tensors[name] = GraphTensor(name, "cb", "float64", "parameter")
    graph = training_graph(
        Graph("gated", {"a": 3, "b": 4, "c": 5}, tensors, (
            Operator("gate", "contraction", "ab,cb->ac", ("x", "gate_weight"), ("gate",)),
            Operator("wide", "contraction", "ab,cb->ac", ("x", "wide_weight"), ("wide",)),
            Operator("active", "silu", "ac->ac", ("gate",), ("active",)),
            Operator("gated", "multiply", "ac,ac->ac", ("active", "wide"), ("gated",)),
            Operator("y", "multiply", "ac,ac->ac", ("gated", "gated"), ("y",)),
        ), ("y",))
    )  # fmt: skip
    names = ["x", "gate_weight", "wide_weight", "grad_y"]
    known = {name: torch.randn(graph.shape(name)).double() for name in names}
    x, gate, wide = (known[name].clone().requires_grad_() for name in names[:3])
    y = (torch.nn.functional.silu(x @ gate.T) * (x @ wide.T)) ** 2
    expected = torch.autograd.grad(y, [x, gate, wide], known["grad_y"])
    found = run_whole(graph, known)
    torch.testing.assert_close(found["y"], y.detach())
    for name, gradient in zip(names, expected, strict=False):
        torch.testing.assert_close(found[f"grad_{name}"], gradient)


def test_every_kind_has_a_reference() -> None:
    assert set(KINDS) <= set(REFERENCE)


def test_a_kind_without_reference_is_named() -> None:
    with pytest.raises(GraphError, match="'swish' has no reference; known: contraction"):
        evaluate(one("swish", "a->a", [(2,)], [(2,)]), [torch.ones(2)])
