"""Layers with routed experts: attention, router, experts and sums are one region, and gradients are eager's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_autocast import autocast, distance
from tests.runtime.capture.test_unread import Finding

VOCABULARY, LENGTH, LAYERS = 64, 12, 2
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0,
         "eos_token_id": 1, "pad_token_id": 2, "num_experts_per_tok": 2}  # fmt: skip

MODELS: dict[str, Callable[..., Any]] = {
    "mixtral": lambda **given: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=4, **given)
    ),
    "olmoe": lambda **given: transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SMALL, num_experts=4, **given)),
    "qwen3 moe": lambda **given: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16, head_dim=8, **given)
    ),
    "gpt-oss": lambda **given: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, num_local_experts=4, head_dim=8, **given)
    ),
}


def made(name: str, num_hidden_layers: int = LAYERS, **given: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS[name](num_hidden_layers=num_hidden_layers, **given)
    with torch.no_grad():
        for parameter in model.parameters():  # routers and biases begin with zeros, which are ties
            if parameter.std() == 0 or parameter.ndim == 3:
                parameter.normal_(std=0.1)
    return model


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def loss(called: Any) -> Tensor:
    found: Tensor = called(**tokens()).loss
    return found


def eager_gradients(model: nn.Module, of: Callable[[Any], Tensor] = loss) -> dict[str, Tensor]:
    """Return gradients of a loop over experts, which knows float64."""
    model.set_experts_implementation("eager")  # type: ignore[operator]
    found = gradients(model, of)
    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_one_region(name: str) -> None:
    model = made(name, num_hidden_layers=3)
    found = region_calls(model, [tokens()])
    ((_, region),) = found.models.items()
    assert sum(found.runs.values()) == 3
    calls = [str(operator.attribute("program")) for operator in region.graph().operators if operator.kind == "program"]
    assert sum('"_grouped_mm.default"' in text for text in calls) == 2
    choices = [str(each.attribute("program")) for each in region.graph().operators if each.kind == "choice"]
    assert [text.count("sort.stable") for text in choices] == [0, 1]  # experts of each token, and the order of tokens
    assert not any("sort.stable" in text for text in calls)
    (coverage,) = found.coverage
    outside = [each.module for each in coverage.left_out if each.flop]
    assert outside == ["lm_head"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_loop_over_experts(name: str) -> None:
    model = made(name).double()
    wanted = eager_gradients(model)
    assert len(wanted) == len(list(model.parameters())) + 1  # and the loss
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-11)
    (graph,) = compilation.compiled
    assert graph.coverage is not None
    left_out = {each.module for each in graph.coverage.left_out if each.flop}
    assert left_out == {"lm_head"}
    assert all(region.calls == 2 for region in compilation.regions)


class Sorted(nn.Module):
    """A layer whose rows go through a product in the order of numbers that follow from what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).reshape(-1, 16)
        keys = (rows[:, 0] * 4).to(torch.int64)
        order = keys.sort(stable=True).indices
        back = torch.zeros_like(order).index_put((order,), torch.arange(len(order)))
        made = torch.tanh(self.second(rows[order] * 2 + rows[order].square()))
        found: Tensor = x + made[back].reshape(x.shape)
        return found


@pytest.mark.slow
def test_the_order_of_a_row_of_integers_is_found_once_and_read_by_backward() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Sorted(), Sorted()).double(), torch.randn(2, 6, 16).double()
    (region,) = region_calls(model, [(x,)]).models.values()
    programs = [str(o.attribute("program")) for o in region.graph().operators if o.kind in ("choice", "program")]
    assert len(programs) > 2
    assert sum(text.count("sort.stable") for text in programs) == 1

    def loss_of(called: Any) -> Tensor:
        found: Tensor = called(x).square().mean()
        return found

    compilation = Compilation(model)
    assert_equal(gradients(model, loss_of, compilation.model), gradients(model, loss_of), 1e-12)
    assert all(region.calls == 1 for region in compilation.regions)
    assert len(compilation.regions) == 2


@pytest.mark.slow
def test_router_logits_are_read_outside_and_an_auxiliary_loss_stays_torchs() -> None:
    model = made("mixtral", num_hidden_layers=3, output_router_logits=True, router_aux_loss_coef=0.5)

    def of_logits(called: Any) -> Tensor:
        out = called(**tokens())
        found: Tensor = out.loss + sum(place * each.square().mean() for place, each in enumerate(out.router_logits, 1))
        return found

    wanted = eager_gradients(model, of_logits)
    knowledge = Finding()
    compilation = Compilation(model, knowledge)
    found = [gradients(model, of_logits, compilation.model) for _ in range(2)]
    assert_equal(found[0], wanted, 1e-5)
    assert all(torch.equal(found[0][name], found[1][name]) for name in wanted)
    assert sum(graph.tuned_places for graph in compilation.compiled) == 3
    assert all(len(region.graph().outputs) == 2 for region in knowledge.found)


@pytest.mark.slow
def test_a_layer_is_whole_where_attention_drops_weights() -> None:
    model = made("mixtral", num_hidden_layers=3, attention_dropout=0.25)
    compilation = Compilation(model)
    torch.manual_seed(1)
    found = gradients(model, loss, compilation.model)
    torch.manual_seed(1)
    again = gradients(model, loss, compilation.model)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert sum(graph.tuned_places for graph in compilation.compiled) == 3
    other = gradients(model, loss, compilation.model)
    assert not torch.equal(found["loss"], other["loss"])
    assert all(bool(each.isfinite().all()) for each in other.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_layers_under_autocast_are_as_close_to_float64_as_torch(name: str) -> None:
    model = made(name, num_hidden_layers=3)
    compilation = Compilation(model)
    wanted = eager_gradients(copy.deepcopy(model).double())
    eager = gradients(model, autocast(loss))
    found = gradients(model, autocast(loss), compilation.model)
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in eager.items()}
    assert distance(found, wanted) <= 1.25 * distance(eager, wanted)
    assert sum(graph.tuned_places for graph in compilation.compiled) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3 moe"])
def test_layers_on_a_cuda_device_are_as_close_to_float64_as_torch(name: str) -> None:
    """There models count the rows of experts as integers, and torch's grouped product is one kernel in bfloat16."""
    model = made(name, num_hidden_layers=3).to("cuda", torch.bfloat16)
    given = {name: each.to("cuda") for name, each in tokens().items()}

    def on_device(called: Any) -> Tensor:
        found: Tensor = called(**given).loss
        return found

    compilation = Compilation(model)
    wanted = eager_gradients(copy.deepcopy(model).double(), on_device)
    eager = gradients(model, on_device)
    found = [gradients(model, on_device, compilation.model) for _ in range(3)]
    assert sum(graph.tuned_places for graph in compilation.compiled) == 3
    assert distance(found[-1], wanted) <= 1.25 * distance(eager, wanted)
    assert all(torch.equal(found[1][name], found[2][name]) for name in found[1])
