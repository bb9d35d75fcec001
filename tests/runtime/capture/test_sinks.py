"""Attention with sinks, as models write it, is products and one softmax with one more term."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from autotuner.api.survey import region_calls
from autotuner.ir.autodiff import training_graph
from autotuner.runtime.devices import device_runtime
from autotuner.space import build_space, space_file
from tests.kernels.calls import faults
from tests.kernels.test_program_kernels import declared
from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_autocast import autocast, check_close

HEADS, FEATURES, LENGTH, HIDDEN = 4, 8, 6, 32


def as_gpt_oss(scores: Tensor, sinks: Tensor) -> Tensor:
    sinks = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
    together = torch.cat([scores, sinks], dim=-1)
    together = together - together.max(dim=-1, keepdim=True).values
    return functional.softmax(together, dim=-1, dtype=together.dtype)[..., :-1]


def without_a_largest(scores: Tensor, sinks: Tensor) -> Tensor:
    sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return functional.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., : scores.shape[-1]]


def of_queries(scores: Tensor, sinks: Tensor) -> Tensor:
    """Each query has a sink of its own."""
    own = sinks.reshape(1, -1, 1, 1) + scores.mean(-1, keepdim=True)
    return torch.cat([scores, own], -1).softmax(-1)[..., :-1]


def sinks_first(scores: Tensor, sinks: Tensor) -> Tensor:
    sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([sinks, scores], -1).softmax(-1)[..., 1:]


def largest_of_keys(scores: Tensor, sinks: Tensor) -> Tensor:
    sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    together = torch.cat([scores, sinks], dim=-1) - scores.max(dim=-1, keepdim=True).values
    return together.softmax(-1)[..., :-1]


def first_keys_alone(scores: Tensor, sinks: Tensor) -> Tensor:
    sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)
    return functional.pad(weights[..., :-2], (0, 1))


def their_own_weight_is_read(scores: Tensor, sinks: Tensor) -> Tensor:
    sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)
    return weights[..., :-1] * (1 - weights[..., -1:])


class Layer(nn.Module):
    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor], p: float = 0.0) -> None:
        super().__init__()
        self.weigh, self.p = weigh, p
        self.norm = nn.LayerNorm(HIDDEN)
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, HEADS * FEATURES) for _ in range(3))
        self.out = nn.Linear(HEADS * FEATURES, HIDDEN)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (each(y).unflatten(-1, (HEADS, FEATURES)).transpose(1, 2) for each in self.projections)
        scores = query @ key.transpose(-1, -2) * FEATURES**-0.5
        later = torch.full((LENGTH, LENGTH), -torch.inf, dtype=x.dtype).triu(1)
        weights = functional.dropout(self.weigh(scores + later, self.sinks), self.p, self.training)
        found: Tensor = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return found


def kinds(model: nn.Module, x: Tensor | dict[str, Tensor]) -> list[list[str]]:
    """Return the kinds of operators of each region."""
    found = region_calls(model, [x]).models.values()
    return [[operator.kind for operator in each.graph().operators] for each in found]


def layers(weigh: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Layer(weigh), Layer(weigh)).double(), torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)


def check(model: nn.Module, x: Tensor) -> Compilation:
    """Check a model's gradients, its regions tuned, against eager's."""

    def loss(called: Callable[[Tensor], Tensor]) -> Tensor:
        found: Tensor = called(x).pow(2).sum()
        return found

    expected = gradients(model, loss)
    tuned = Compilation(model)
    assert_equal(gradients(model, loss, tuned.model), expected, 1e-12)
    return tuned


@pytest.mark.parametrize("weigh", [as_gpt_oss, without_a_largest])
def test_scores_beside_sinks_are_one_softmax(weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = layers(weigh)
    for found in kinds(model, x):
        assert (found.count("sink_softmax"), found.count("softmax"), found.count("contraction")) == (1, 0, 6)
        assert "program" not in found
    tuned = check(model, x)
    assert sum(graph.tuned_places for graph in tuned.compiled) == 2


@pytest.mark.parametrize(
    "weigh", [of_queries, sinks_first, largest_of_keys, first_keys_alone, their_own_weight_is_read]
)
def test_what_looks_like_it_computes_what_torch_does(weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = layers(weigh)
    check(model, x)


@pytest.mark.parametrize("weigh", [as_gpt_oss, sinks_first])
def test_under_autocast_both_ways_are_as_close_to_float64_as_torch(
    weigh: Callable[[Tensor, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """What a program multiplies has two types there, of which autocast makes one."""
    model, x = layers(weigh)
    model = model.float()

    def loss(called: nn.Module) -> Tensor:
        found: Tensor = called(x.to(next(called.parameters()).dtype)).double().pow(2).sum()
        return found

    compilation = Compilation(model)
    check_close(model, loss, autocast(loss), compilation)
    assert sum(graph.tuned_places for graph in compilation.compiled) == 2
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


def test_weights_are_dropped_behind_it() -> None:
    model, x = Layer(as_gpt_oss, 0.5), torch.randn(2, LENGTH, HIDDEN)
    (found,) = kinds(nn.Sequential(model, copy.deepcopy(model)), x)
    assert found.index("sink_softmax") < found.index("dropout")
    assert "program" not in found


@pytest.mark.slow
def test_kernels_of_sets_with_sinks_equal_the_reference_in_16_bits() -> None:
    layer, x = Layer(as_gpt_oss).bfloat16(), torch.randn(2, LENGTH, HIDDEN, dtype=torch.bfloat16)
    (model,) = region_calls(nn.Sequential(layer, copy.deepcopy(layer)), [x]).models.values()
    space = build_space(training_graph(model.graph()), space_file("cpu"))
    calls = [
        choice.call
        for choice in space.choices
        if {"sink_softmax", "sink_grad"} & set(choice.call.subgraph.kinds) and declared(choice.call)
    ]
    compiled = {choice.subgraph.kinds for choice in calls if choice.candidate.kernel == "inductor"}
    assert {("sink_softmax",), ("sink_grad",), ("scale", "causal_mask", "sink_softmax")} <= compiled
    assert faults(calls) == {}


def gpt_oss() -> transformers.GptOssForCausalLM:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=32, hidden_size=32, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        max_position_embeddings=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config).train()


def test_a_model_of_transformers_has_them() -> None:
    ids = torch.randint(0, 32, (2, 8))
    of_kinds = kinds(gpt_oss(), {"input_ids": ids})
    assert [each.count("sink_softmax") for each in of_kinds] == [1, 1]


@pytest.mark.parametrize("padded_first", [False, True])
def test_padding_is_a_mask_of_keys_and_a_query_that_sees_none_weighs_none(
    padded_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers adds the lowest number to scores, also to all of a query: without sinks, all keys would count."""
    monkeypatch.setattr(type(device_runtime(torch.device("cpu"))), "has_triton", True)
    model, ids = gpt_oss().double(), torch.randint(0, 32, (2, 8))
    model.set_experts_implementation("batched_mm")  # others multiply no experts in float64
    mask = (torch.arange(8) < torch.tensor([[8], [5]])).long()
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask.flip(1) if padded_first else mask}

    def loss(called: Callable[..., Any]) -> Tensor:
        found: Tensor = called(**batch).loss
        return found

    expected = gradients(model, loss)
    tuned = Compilation(model)
    assert_equal(gradients(model, loss, tuned.model), expected, 1e-12)
    assert sum(graph.tuned_places for graph in tuned.compiled) == 4
    masks = {tuple(kind for kind in each if kind.endswith("mask")) for each in kinds(model, batch)}
    assert masks == {("mask", "window_mask"), ("mask", "causal_mask")}
