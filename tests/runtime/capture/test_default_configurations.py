"""Models of transformers as their configurations make them, caches of keys and values among it: whole layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autotuner.api.caches import both_ways, without_cache
from autotuner.api.survey import region_calls
from autotuner.api.training import called
from autotuner.ir.models import Model
from tests.runtime.capture.known import Compilation, assert_equal, gradients

VOCABULARY, LENGTH, LAYERS = 64, 12, 2
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0,
         "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 1}  # fmt: skip
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": LAYERS,
       "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 32}  # fmt: skip

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8)),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL)),
}


def made(name: str, dropout: bool = True) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    if not dropout:  # where it draws masks, no two runs are equal
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0  # type: ignore[assignment]
    return model


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def kinds(model: Model) -> list[str]:
    return [operator.kind for operator in model.graph().operators]


def is_whole(model: Model) -> bool:
    """Say whether a region has an attention, its four projections, and a feed-forward of two or three products."""
    found = kinds(model)
    return found.count("softmax") == 1 and found.count("contraction") in (8, 9) and found.count("add") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_whole_and_the_same_with_a_cache_and_without(name: str) -> None:
    model = made(name)
    found = region_calls(model, [tokens()])
    ((key, region),) = found.models.items()
    assert found.runs[key] == LAYERS
    assert is_whole(region)
    assert len(region.graph().outputs) == 1
    torch._dynamo.reset()
    assert region_calls(model, [{**tokens(), "use_cache": False}]).models.keys() == {key}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_tuning_under_autocast_is_for_calls_with_a_cache_and_without(name: str) -> None:
    model, given, told = made(name), [tokens()], {**tokens(), "use_cache": True}
    assert list(both_ways(model, given, "cpu")) == given
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = []
        for batch in both_ways(model, given, "cpu"):
            torch._dynamo.reset()
            found.append(region_calls(model, [batch]).models.keys())
        torch._dynamo.reset()
        assert region_calls(model, both_ways(model, given, "cpu")).models.keys() == found[0] | found[1]
        torch._dynamo.reset()
        assert region_calls(model, [tokens() | without_cache(model)]).models.keys() == found[1]
        assert list(both_ways(model, [told], "cpu")) == [told]
    assert len(found[0] | found[1]) == (2 if name == "llama" else 1)  # casts lie behind rotary positions


def test_a_tuning_of_an_encoder_with_a_decoder_is_for_calls_with_a_cache_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo of torch 2.11 cuts the graph where the model copies its configuration for a cache."""
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
                                   decoder_start_token_id=0)  # fmt: skip
    model, batch = transformers.T5ForConditionalGeneration(config), tokens()
    for cuts, given in ((False, [batch]), (True, [batch, batch | {"use_cache": False}])):
        monkeypatch.setattr("autotuner.api.caches.CUTS_AT_COPIES", cuts)
        assert list(both_ways(model, [batch], "cpu")) == given
    model.config.use_cache = False
    assert list(both_ways(model, [batch], "cpu")) == [batch]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager_and_caches_hold_what_they_held(name: str) -> None:
    model, batch = made(name, dropout=False).double(), tokens()

    def loss(called: Any) -> Tensor:
        found: Tensor = called(**batch).loss
        return found

    wanted, cached = gradients(model, loss), model(**batch).past_key_values
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) == LAYERS
    assert [region.calls for region in compilation.regions][:LAYERS] == [2] * LAYERS
    found = compilation.model(**batch).past_key_values
    for one, other in zip(found.layers, cached.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox"])
def test_a_loss_of_what_a_cache_holds_has_its_gradients(name: str) -> None:
    model, batch = made(name, dropout=False).double(), tokens()

    def loss(called: Any) -> Tensor:
        out = called(**batch)
        total: Tensor = out.loss
        for place, layer in enumerate(out.past_key_values.layers, 1):
            total = total + place * layer.keys.square().mean() + layer.values.sin().mean()
        return total

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) == LAYERS


@pytest.mark.slow
def test_a_cache_that_holds_keys_already_is_not_left_out() -> None:
    model = made("llama", dropout=False).double()
    first, second = torch.split(tokens()["input_ids"], LENGTH // 2, 1)
    wanted = model(second, past_key_values=model(first).past_key_values).logits
    compilation = Compilation(model)
    found = compilation.model(second, past_key_values=compilation.model(first).past_key_values).logits
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_an_encoder_with_a_decoder_and_its_cache_is_whole_layers() -> None:
    """The layers before the last are no pieces of one product each."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4,
                                   num_decoder_layers=4, decoder_start_token_id=0)  # fmt: skip
    calls = region_calls(transformers.T5ForConditionalGeneration(config), [tokens()])
    found = {calls.runs[key]: kinds(model) for key, model in calls.models.items()}
    assert {runs: (each.count("softmax"), each.count("contraction"), each.count("add"))
            for runs, each in found.items()} == {3: (1, 8, 2), 4: (2, 14, 3)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("padded_first", [False, True])
def test_a_relative_bias_and_padding_are_added_one_after_the_other(padded_first: bool) -> None:
    """transformers has each layer choose between both for each sequence and head: a tensor as large as the scores."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                   dropout_rate=0.0, decoder_start_token_id=0)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH // 2]])).long()
    batch = tokens() | {"attention_mask": mask.flip(1) if padded_first else mask}

    def added(of: Model) -> list[tuple[str, int]]:
        graph = of.graph()
        return [
            (each.kind, len(graph.tensors[each.inputs[-1]].axes) if len(each.inputs) > 1 else 0)
            for each in graph.operators if each.kind in ("bias", "mask", "causal_mask", "softmax")
        ]  # fmt: skip

    heads_queries_and_keys, sequences_and_keys = 3, 2
    of_encoder = [("bias", heads_queries_and_keys), ("mask", sequences_and_keys), ("softmax", 0)]
    of_decoder = [("bias", heads_queries_and_keys), ("causal_mask", 0), ("softmax", 0), *of_encoder[1:]]
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            calls = region_calls(model, [batch])
        found = [(calls.runs[key], added(each)) for key, each in calls.models.items()]
        assert found == [(2, of_encoder), (2, of_decoder)]

    def loss(called: Any) -> Tensor:
        found: Tensor = called(**batch).loss
        return found

    wanted = gradients(model.double(), loss)
    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert [graph.tuned_places for graph in compilation.compiled] == [4]


@pytest.mark.slow
def test_sums_of_embeddings_are_no_regions() -> None:
    config = transformers.RobertaConfig(**(SMALL | {"max_position_embeddings": 64}))
    calls = region_calls(transformers.RobertaForMaskedLM(config), [tokens()])
    assert [(calls.runs[key], len(kinds(model))) for key, model in calls.models.items()] == [(LAYERS, 27)]


def test_a_training_step_asks_for_no_cache_since_nobody_reads_it_unless_the_batch_does() -> None:
    asked: list[bool | None] = []
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    model.register_forward_pre_hook(lambda _model, _args, given: asked.append(given.get("use_cache")), with_kwargs=True)
    assert model.config.use_cache
    keywords = without_cache(model)
    called(model, tokens(), **keywords)
    called(model, {**tokens(), "use_cache": True}, **keywords)
    model.config.use_cache = False
    called(model, tokens(), **without_cache(model))
    assert asked == [False, True, None]
    compiled: Any = torch.compile(made("llama"))
    assert without_cache(compiled) == {"use_cache": False}
    assert without_cache(nn.Linear(2, 2)) == {}
