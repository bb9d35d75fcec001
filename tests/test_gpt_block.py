"""The decoder block: its numbers against a plain torch block, what it shares with the encoder, and its solution."""

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import load_model
from autotuner.ir.records import Measurement, Scalar
from autotuner.kernels.reference import evaluate
from autotuner.space import Space, build_space
from autotuner.tuner import build_configuration
from tests.made_up import CPU, HERE, times
from tests.solve.problem.walking import contradictions

pytestmark = pytest.mark.slow

GPT, BERT = load_model("gpt-block"), load_model("bert-encoder")
RECORDED = Path(__file__).parent / "data" / "bert_encoder_tiny_cpu.json.gz"
SMALL = {"b": 2, "l": 5, "h": 6, "n": 2, "p": 3, "f": 8}
ODD = {"b": 1, "l": 7, "h": 11, "n": 3, "p": 5, "f": 13}
SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")
PROJECTIONS = ("query", "key", "value")


def block(extents: Mapping[str, int], options: Mapping[str, Scalar]) -> Graph:
    """Return the training graph of a block in float64."""
    return training_graph(GPT.instantiate(None, extents, options, "float64").graph())


def values(graph: Graph, p: Mapping[str, float]) -> dict[str, Tensor]:
    """Return random inputs, parameters and given gradients, and drawn masks."""
    generator = torch.Generator().manual_seed(1)
    given = [name for name, tensor in graph.tensors.items() if tensor.role in ("input", "parameter")]
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
    return made


def run(graph: Graph, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the training graph with the reference kernels, masks given."""
    masks = [operator.outputs[0] for operator in graph.operators if operator.kind == "dropout_mask"]
    inputs = [name for name in known if name not in masks]
    outputs = [*graph.outputs, *masks]
    subgraph = graph.subgraph(graph.operators, inputs, outputs)
    numbers = dict(zip(outputs, subgraph.outputs, strict=True))
    made = evaluate(subgraph, [known[name] for name in inputs], {numbers[mask]: known[mask] for mask in masks})
    return {name: tensor for name, tensor in zip(outputs, made, strict=True) if tensor is not None}


class PlainBlock(torch.nn.Module):
    """GPT-2's block written as one would without the project; dropout multiplies by given masks."""

    def __init__(self, extents: Mapping[str, int], activation: torch.nn.Module) -> None:
        super().__init__()
        hidden, self.heads, features, wide = (extents[axis] for axis in "hnpf")
        inner = self.heads * features
        self.before_attention = torch.nn.LayerNorm(hidden, dtype=torch.float64)
        self.projections = torch.nn.Linear(hidden, 3 * inner, dtype=torch.float64)
        self.output = torch.nn.Linear(inner, hidden, dtype=torch.float64)
        self.before_feed_forward = torch.nn.LayerNorm(hidden, dtype=torch.float64)
        self.widen = torch.nn.Linear(hidden, wide, dtype=torch.float64)
        self.activation = activation
        self.narrow = torch.nn.Linear(wide, hidden, dtype=torch.float64)

    def forward(self, x: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
        attended = x + self.attention(self.before_attention(x), masks) * masks.get("output_dropout_mask", 1.0)
        hidden = self.activation(self.widen(self.before_feed_forward(attended)))
        hidden = self.narrow(hidden * masks.get("activation_dropout_mask", 1.0))
        result: Tensor = attended + hidden * masks.get("feed_forward_dropout_mask", 1.0)
        return result

    def attention(self, x: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        stacked = self.projections(x).reshape(batch, length, 3, self.heads, -1)
        query, key, value = stacked.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        context = (weights * masks.get("attention_dropout_mask", 1.0)) @ value
        result: Tensor = self.output(context.transpose(1, 2).reshape(batch, length, -1))
        return result


ACTIVATIONS: Mapping[str, torch.nn.Module] = {
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "gelu_erf": torch.nn.GELU(),
    "relu": torch.nn.ReLU(),
}


def placed(module: PlainBlock, known: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return what the module's parameters hold for the graph's (or, with a prefix, for their gradients)."""

    def flat(name: str, suffix: str) -> Tensor:
        tensor = known[f"{prefix}{name}_{suffix}"]
        return tensor.flatten(0, 1) if suffix == "weight" else tensor.flatten()

    found = {f"projections.{suffix}": torch.cat([flat(name, suffix) for name in PROJECTIONS])
             for suffix in ("weight", "bias")}  # fmt: skip
    for layer, name in (("before_attention", "norm1"), ("before_feed_forward", "norm2")):
        found[f"{layer}.weight"] = known[f"{prefix}{name}_scale"]
        found[f"{layer}.bias"] = known[f"{prefix}{name}_bias"]
    for layer, name in (("output", "output"), ("widen", "linear1"), ("narrow", "linear2")):
        found[f"{layer}.weight"] = known[f"{prefix}{name}_weight"].flatten(1)
        found[f"{layer}.bias"] = known[f"{prefix}{name}_bias"]
    assert set(found) == set(dict(module.named_parameters()))
    return found


def autograd(extents: Mapping[str, int], known: Mapping[str, Tensor], activation: str) -> dict[str, Tensor]:
    """Return the plain block's output, and the gradients of its input and its parameters."""
    module = PlainBlock(extents, ACTIVATIONS[activation])
    module.load_state_dict(placed(module, known))
    x = known["x"].clone().requires_grad_()
    y = module(x, {name: tensor for name, tensor in known.items() if name.endswith("_mask")})
    y.backward(known["grad_y"])
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {"y": y.detach(), "grad_x": x.grad, **gradients}


@pytest.mark.parametrize("extents", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("drop", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_training_graph_equals_autograd_of_a_plain_block(
    activation: str, drop: float, extents: Mapping[str, int]
) -> None:
    p = dict.fromkeys(SITES, drop)
    graph = block(extents, {"activation": activation, **p})
    known = values(graph, p)
    assert sum(name.endswith("dropout_mask") for name in known) == (4 if drop else 0)
    found, expected = run(graph, known), autograd(extents, known, activation)
    assert len(graph.outputs) == 2 + len(GPT.definition.parameters)
    mine = {"y": found["y"], "grad_x": found["grad_x"]}
    mine |= placed(PlainBlock(extents, ACTIVATIONS[activation]), found, "grad_")
    assert set(mine) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-9, atol=1e-10)


def test_by_default_dropout_is_where_gpt_2_has_it_and_gelu_is_by_tanh() -> None:
    graph = GPT.instantiate("tiny").graph()
    masks = [operator.name for operator in graph.operators if operator.kind == "dropout_mask"]
    assert masks == ["attention_dropout_mask", "output_dropout_mask", "feed_forward_dropout_mask"]
    assert graph.producers["activation"].kind == "gelu_tanh"
    assert graph.producers["linear2"].inputs == ("activation", "linear2_weight")


def test_what_comes_later_changes_nothing_before() -> None:
    graph = block(SMALL, dict.fromkeys(SITES, 0.0))
    known = values(graph, {})
    before = run(graph, known)["y"]
    known["x"][:, 3:] += 1.0
    after = run(graph, known)["y"]
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


# What it shares with the encoder


@dataclass(frozen=True)
class Spaces:
    """The spaces of both models with the same extents."""

    block: Space
    encoder: Space


@pytest.fixture(scope="module")
def tiny() -> Spaces:
    """Spaces of the kernels that were recorded."""
    kernels = json.loads(gzip.decompress(RECORDED.read_bytes()))["kernels"]
    space = CPU.model_copy(update={"kernels": {name: CPU.kernels[name] for name in kernels}})
    block, encoder = (build_space(training_graph(file.instantiate("tiny").graph()), space) for file in (GPT, BERT))
    return Spaces(block, encoder)


def test_presets_have_the_extents_of_the_encoder_and_of_gpt_2() -> None:
    extents = {preset: GPT.instantiate(preset).extents for preset in GPT.definition.presets}
    for preset, same in (("tiny", "tiny"), ("small", "base"), ("medium", "large")):
        assert extents[preset] == BERT.instantiate(same).extents
    widths = {preset: tuple(own[axis] for axis in "hnpf") for preset, own in extents.items() if preset != "tiny"}
    assert widths == {
        "small": (768, 12, 64, 3072), "medium": (1024, 16, 64, 4096), "large": (1280, 20, 64, 5120),
    }  # fmt: skip


def test_operators_with_the_same_extents_have_the_encoders_signatures(tiny: Spaces) -> None:
    def signatures(graph: Graph) -> dict[str, str]:
        return {o.name: graph.subgraph([o], dict.fromkeys(o.inputs), o.outputs).signature for o in graph.operators}

    mine, theirs = signatures(tiny.block.graph), set(signatures(tiny.encoder.graph).values())
    new = [name for name, signature in mine.items() if signature not in theirs]
    assert new == ["masked_scores", "activation", "grad_linear1_biased"]


def test_of_what_there_is_to_measure_of_a_tiny_block_96_percent_is_known_from_a_tiny_encoder(tiny: Spaces) -> None:
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))
    calls = set(tiny.block.calls)
    assert recorded["model"] == "bert-encoder:tiny"
    assert calls & set(recorded["measurements"]) == calls & set(tiny.encoder.calls)
    assert (len(calls & set(tiny.encoder.calls)), len(calls)) == (1061, 1110)


def test_what_is_new_has_a_causal_mask_a_tanh_or_another_neighbour(tiny: Spaces) -> None:
    new = [call for key, call in tiny.block.calls.items() if key not in tiny.encoder.calls]
    alone = {call.subgraph.kinds for call in new if len(call.subgraph.nodes) == 1}
    assert alone == {("causal_mask",), ("gelu_tanh",), ("gelu_tanh_grad",)}


def test_a_block_is_solved_with_what_the_encoder_left_and_the_rest_made_up(tiny: Spaces) -> None:
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))["measurements"]
    known = times(tiny.block.calls)
    for key in known.keys() & recorded.keys():
        status, median, low, high, *_ = recorded[key]
        known[key] = Measurement(status, median, low, high, message="" if status == "ok" else "as recorded")
    found = build_configuration(GPT.instantiate("tiny"), tiny.block, known, HERE, {})
    assert found.certificate.solver == "exact"
    assert 0 < found.certificate.lower_bound_us <= found.certificate.predicted_us
    assert contradictions(tiny.block.graph, tiny.block.given, found.steps) == []


@pytest.mark.parametrize("drop", [0.0, 0.1], ids=["", "dropout"])
def test_a_small_block_is_solved(drop: float) -> None:
    model = GPT.instantiate(None, SMALL, dict.fromkeys(SITES, drop))
    space = build_space(training_graph(model.graph()), CPU)
    found = build_configuration(model, space, times(space.calls), HERE, {})
    covered = [name for step in found.steps for name in step.operators]
    assert sorted(covered) == sorted(operator.name for operator in space.graph.operators)
    assert contradictions(space.graph, space.given, found.steps) == []


def test_causal_attention_is_chosen_as_one_kernel_where_that_is_cheap() -> None:
    model = GPT.instantiate(None, SMALL, dict.fromkeys(SITES, 0.0))
    space = build_space(training_graph(model.graph()), CPU)
    known = times(space.calls)
    for key, call in space.calls.items():
        if "causal" in call.candidate.kernel and "flash" in call.candidate.kernel:
            known[key] = Measurement("ok", median_us=0.1)
    found = build_configuration(model, space, known, HERE, {})
    chosen = {step.kernel: step for step in found.steps if "flash" in step.kernel}
    assert set(chosen) == {"torch_flash_attention_causal", "torch_flash_attention_causal_grad"}
    assert "masked_scores" in chosen["torch_flash_attention_causal"].operators
    assert "masked_scores" in chosen["torch_flash_attention_causal_grad"].recomputed
