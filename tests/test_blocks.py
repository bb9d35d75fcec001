"""Blocks of LLaMA, T5 and ViT: their numbers against plain torch, and small ones tuned and run as a training step."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autotuner.database import open_database
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, load_model
from autotuner.ir.records import Call, Candidate
from autotuner.kernels.reference import evaluate
from autotuner.runtime import TrainingStep
from autotuner.space import build_space, load_space, space_file
from autotuner.tuner import TuningPolicy
from tests.kernels.calls import faults, subgraphs
from tests.made_up import times, without_compilers
from tests.tuner.asking import Asking, tune

pytestmark = pytest.mark.slow

Values = Mapping[str, Tensor]
SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Project onto heads: batch, head, position, feature."""
    count, features, hidden = weight.shape
    projected = functional.linear(x, weight.reshape(-1, hidden))
    return projected.reshape(*x.shape[:2], count, features).transpose(1, 2)


def turned(x: Tensor, known: Values) -> Tensor:
    """Rotate as LLaMA of Hugging Face does."""
    half = x.shape[-1] // 2
    return x * known["cos"] + torch.cat((-x[..., half:], x[..., :half]), -1) * known["sin"]


def gated(x: Tensor, known: Values, activation: Callable[[Tensor], Tensor]) -> Tensor:
    active = activation(functional.linear(x, known["gate_weight"])) * functional.linear(x, known["up_weight"])
    return functional.linear(active, known["down_weight"])


def rms_norm(x: Tensor, known: Values, name: str, epsilon: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], known[f"{name}_scale"], epsilon)


def merged(context: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(context.transpose(1, 2).flatten(2), weight.flatten(1))


def llama(known: Values) -> Tensor:
    x = known["x"]
    norm = rms_norm(x, known, "norm1", 1e-5)
    query = turned(heads(norm, known["query_weight"].flatten(0, 1)), known)
    key, value = turned(heads(norm, known["key_weight"]), known), heads(norm, known["value_weight"])
    context = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    x = x + merged(context, known["output_weight"])
    return x + gated(rms_norm(x, known, "norm2", 1e-5), known, functional.silu)


def t5(known: Values) -> Tensor:
    x = known["x"]
    norm = rms_norm(x, known, "norm1", 1e-6)
    query, key, value = (heads(norm, known[f"{name}_weight"]) for name in ("query", "key", "value"))
    weights = (query @ key.transpose(-1, -2) + known["position_bias"]).softmax(-1)
    x = x + merged(weights @ value, known["output_weight"])
    active = lambda x: functional.gelu(x, approximate="tanh")  # noqa: E731
    return x + gated(rms_norm(x, known, "norm2", 1e-6), known, active)


def vit(known: Values) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], known[f"{name}_scale"], known[f"{name}_bias"], 1e-6)

    def projected(name: str) -> Tensor:
        return heads(normal, known[f"{name}_weight"]) + known[f"{name}_bias"][:, None]

    x = known["x"]
    normal = norm(x, "norm1")
    context = functional.scaled_dot_product_attention(projected("query"), projected("key"), projected("value"))
    x = x + merged(context, known["output_weight"]) + known["output_bias"]
    wide = functional.gelu(functional.linear(norm(x, "norm2"), known["linear1_weight"], known["linear1_bias"]))
    return x + functional.linear(wide, known["linear2_weight"], known["linear2_bias"])


BLOCKS: Mapping[str, Callable[[Values], Tensor]] = {"llama-block": llama, "t5-block": t5, "vit-block": vit}
ODD = {
    "llama-block": {"b": 2, "l": 5, "h": 7, "g": 2, "r": 3, "p": 4, "f": 9},
    "t5-block": {"b": 2, "l": 5, "q": 5, "k": 5, "h": 7, "n": 3, "p": 2, "f": 9},
    "vit-block": {"b": 2, "l": 5, "h": 7, "n": 3, "p": 2, "f": 9},
}
CONSTANTS = ("cos", "sin")


def block(name: str, extents: Mapping[str, int] | None = None) -> Model:
    file = load_model(name)
    options = {site: 0.0 for site in SITES if site in file.definition.options}
    return file.instantiate(None if extents else "tiny", extents, options, "float64")


def values(model: Model) -> dict[str, Tensor]:
    """Return inputs, parameters and the given gradient: scales near 1, weights that keep the variance."""
    graph = training_graph(model.graph())
    draw = torch.Generator().manual_seed(0)
    known = {}
    for name, tensor in graph.tensors.items():
        if tensor.role in ("input", "parameter") or name in graph.given_gradients:
            value = torch.randn(graph.shape(name), generator=draw, dtype=torch.float64)
            known[name] = 1 + value / 4 if name.endswith("scale") else value
            if name.endswith("weight"):
                known[name] = value / math.sqrt(graph.extents["h"])
    return known


def autograd(name: str, known: Values) -> dict[str, Tensor]:
    """Return the output and every gradient of the same block, written as one would without the project."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in known.items()
              if name not in (*CONSTANTS, "grad_y")}  # fmt: skip
    y = BLOCKS[name](dict(known) | leaves)
    gradients = torch.autograd.grad(y, list(leaves.values()), known["grad_y"])
    return {"y": y.detach()} | {f"grad_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}


def assert_same(found: Values, expected: Values) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_training_graph_equals_autograd_of_a_plain_block(name: str) -> None:
    model = block(name, ODD[name])
    graph, known = training_graph(model.graph()), values(model)
    made = evaluate(graph.subgraph(graph.operators, list(known), graph.outputs), list(known.values()))
    found = {name: tensor for name, tensor in zip(graph.outputs, made, strict=True) if tensor is not None}
    assert_same(found, autograd(name, known))


def trained(model: Model, known: Values, folder: Path) -> dict[str, Tensor]:
    """Return output and gradients of a training step that runs what is tuned with made-up times."""
    file = load_space(without_compilers(folder))
    calls = build_space(training_graph(model.graph()), file).calls
    with open_database(folder / "tuned.sqlite") as database:
        configuration = tune(
            model, file, database, Asking(times(calls)), policy=TuningPolicy(explaining_s=0.1), exhaustive=True
        )
    step = TrainingStep(configuration, known)
    given = [known[name] for name, tensor in model.graph().tensors.items() if tensor.role == "input"]
    return {"y": step.forward(*given).clone()} | step.backward(known["grad_y"])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_tiny_block_is_tuned_and_trains_as_autograd_does(name: str, tmp_path: Path) -> None:
    """With made-up times; the training step runs for real."""
    model = block(name)
    known = values(model)
    found = trained(model, known, tmp_path)
    assert_same(found, autograd(name, known))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_operator_of_a_large_block_has_a_kernel(name: str, device_type: str) -> None:
    file = load_model(name)
    graph = training_graph(file.instantiate(list(file.definition.presets)[-1], dtype="bfloat16").graph())
    space = build_space(graph, space_file(device_type))
    covered = {operator for choice in space.choices for operator in choice.cover.operators}
    assert covered == {operator.name for operator in graph.operators}


@pytest.mark.parametrize("name", ["llama-block", "t5-block"])
def test_every_set_that_the_generic_compiler_is_given_equals_the_reference(name: str) -> None:
    file = load_model(name)
    options = {site: 0.25 for site in SITES if site in file.definition.options}
    graph = training_graph(file.instantiate(None, ODD[name] | {"p": 4}, options).graph())
    found = {subgraph.kinds: subgraph for kernel, subgraph in subgraphs(graph) if kernel == "inductor"}
    declared = {kinds: tuple(one.tensors[number].axes for number in one.boundary) for kinds, one in found.items()}
    assert len(found) > 12
    assert faults([Call(one, Candidate("inductor", declared[kinds])) for kinds, one in found.items()]) == {}


FROZEN = """
version: 1
name: frozen
axes: {b: row, h: hidden, f: feature}
presets:
  small: {b: 6, h: 8, f: 12}
inputs:
  x: {axes: bh, requires_grad: false}
  weight2: {axes: hf, requires_grad: false}
parameters: {weight1: fh}
operators:
  - {name: wide, kind: contraction, spec: "bh,fh->bf", inputs: [x, weight1], outputs: [wide]}
  - {name: active, kind: silu, spec: "bf->bf", inputs: [wide], outputs: [active]}
  - {name: y, kind: contraction, spec: "bf,hf->bh", inputs: [active, weight2], outputs: [y]}
outputs: [y]
"""


def test_frozen_parameters_get_no_gradient_and_the_others_that_of_autograd(tmp_path: Path) -> None:
    path = tmp_path / "frozen.yaml"
    path.write_text(FROZEN)
    model = load_model(str(path)).instantiate("small", dtype="float64")
    known = values(model)
    found = trained(model, known, tmp_path)
    weight = known["weight1"].clone().requires_grad_()
    y = functional.silu(known["x"] @ weight.T) @ known["weight2"].T
    (gradient,) = torch.autograd.grad(y, [weight], known["grad_y"])
    assert_same(found, {"y": y.detach(), "grad_weight1": gradient})
