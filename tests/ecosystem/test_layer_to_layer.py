"""Hugging Face's models, as they are made, layer to layer beside plain accumulation."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autotuner
from autotuner.api.backend import COMPILED
from autotuner.api.training import called
from tests.ecosystem.known import Tuned, assert_same, remember, use

LENGTH, WORDS = 12, 50
OF_ALL = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = OF_ALL | {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32,
}  # fmt: skip
OF_BOTH = OF_ALL | {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
HEADS = WIDTHS | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "bert": ("BertForMaskedLM", WIDTHS, 3),
    "llama": ("LlamaForCausalLM", HEADS, 3),
    "gemma 2": ("Gemma2ForCausalLM", HEADS, 3),
    "mixtral": ("MixtralForCausalLM", HEADS | {"num_local_experts": 3}, 3),
    "gpt-2": ("GPT2LMHeadModel", OF_ALL | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}, 3),
    "gpt-neox": ("GPTNeoXForCausalLM", WIDTHS, 3),
    "modernbert": ("ModernBertForMaskedLM", WIDTHS | {"cls_token_id": 1, "sep_token_id": 2}, 3),
    "bloom": ("BloomForCausalLM", OF_ALL | {"hidden_size": 32, "n_layer": 3, "n_head": 4}, 3),
    "t5": ("T5ForConditionalGeneration", OF_ALL | T5, 6),
    "bart": ("BartForConditionalGeneration", OF_BOTH | {"max_position_embeddings": 32}, 4),
}
"""By name: class, sizes, and how many layers are on the host."""


def made(name: str) -> Any:
    """Return a model without dropout: micro-batches draw in another order, layer to layer."""
    kind, sizes, _ = KINDS[name]
    of: Any = getattr(transformers, kind)
    config = of.config_class(**sizes)
    for option, value in vars(config).items():
        if ("drop" in option or "pdrop" in option) and isinstance(value, float):
            setattr(config, option, 0.0)
    torch.manual_seed(0)
    return of(config).train()


def batch(seed: int) -> dict[str, Tensor]:
    """Return sequences, one of which is padded."""
    tokens = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def whole(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([each[name] for each in batches]) for name in batches[0]}


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> Tensor:
    total = torch.zeros(())
    for each in batches:
        loss = called(model, each) / len(batches)
        torch.autograd.backward(loss)
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", KINDS)
def test_models_as_they_are_made_train_as_plainly(name: str) -> None:
    model = made(name)
    twin = copy.deepcopy(model)
    optimizer = sgd(model)
    step = autotuner.layer_to_layer(twin, sgd(twin), compiler=None)
    assert len(step.layers) == KINDS[name][2]
    for number in range(3):
        batches = [batch(10 * number), batch(10 * number + 1)]
        torch.testing.assert_close(step(*batches), plainly(model, optimizer, batches), rtol=1e-6, atol=1e-6)
    # Embeddings that are tied to the head get their two gradients in another order.
    assert_same(twin, model, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name, kinds, places, rows", [("bert", 1, 1, None), ("llama", 1, 1, 2), ("t5", 4, 6, None)])
def test_layers_run_tuned_and_are_compiled_once_for_all_that_are_alike(
    name: str, kinds: int, places: int, rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuned by made-up times, in the place of a tuning; with a number of rows, of batches that the step takes apart."""
    asked: list[Any] = []

    def planned_calls(run: Any, batches: Any, *_: Any) -> None:
        asked.append(type(run))
        remember(tmp_path / "known.sqlite", run, batches)

    monkeypatch.setattr("autotuner.api.tuning.tune_calls", planned_calls)
    use(tmp_path / "known.sqlite", monkeypatch)
    model = made(name)
    twin, tuned, optimizer = copy.deepcopy(model), Tuned(), sgd(model)
    before = torch.get_rng_state()
    step = autotuner.layer_to_layer(
        twin, sgd(twin), example_inputs=batch(0) if rows is None else whole([batch(0), batch(1)]),
        micro_batch_size=rows, compiler="aot_eager",
    )  # fmt: skip
    assert len(asked) == kinds
    assert torch.equal(torch.get_rng_state(), before)
    for number in range(3):
        batches = [batch(10 * number), batch(10 * number + 1)]
        found = step(*batches) if rows is None else step(whole(batches))
        torch.testing.assert_close(found, plainly(model, optimizer, batches), rtol=1e-4, atol=1e-5)
    assert tuned.places == places
    assert_same(twin, model, 1e-4)
    assert sum(graph.tuned_places for graph in autotuner.summary(twin).graphs) == places


def test_what_is_saved_is_loaded_by_transformers(tmp_path: Path) -> None:
    model = made("llama")
    step = autotuner.layer_to_layer(model, sgd(model), compiler=None)
    step(batch(0))
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert_same(loaded, model, 0.0)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch(1)).loss, model.eval()(**batch(1)).loss)
        assert torch.equal(
            loaded.generate(batch(1)["input_ids"][:1], max_new_tokens=4, do_sample=False),
            model.generate(batch(1)["input_ids"][:1], max_new_tokens=4, do_sample=False),
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_within_layers_changes_no_value(reentrant: bool) -> None:
    model, twin = made("llama"), made("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    step, optimizer = autotuner.layer_to_layer(model, sgd(model), compiler=None), sgd(twin)
    for number in range(2):
        assert torch.equal(step(batch(number)), plainly(twin, optimizer, [batch(number)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
def test_logits_are_never_whole_where_they_are_large(kind: str) -> None:
    sizes = OF_ALL | T5 if kind.startswith("T5") else KINDS["gpt-2"][1] if kind.startswith("GPT2") else WIDTHS
    of: Any = getattr(transformers, kind)
    words = 40_000
    torch.manual_seed(0)
    model = of(
        of.config_class(**sizes | {"vocab_size": words, "max_position_embeddings": 64, "n_positions": 64})
    ).train()
    ids = torch.randint(3, words, (2, 64))
    before = len(COMPILED)
    step = autotuner.layer_to_layer(model, sgd(model), compiler="aot_eager")
    step({"input_ids": ids, "labels": ids})
    (told,) = [each for graph in COMPILED[before:] for each in graph.heads]
    assert f"rows of {words:,} logits is computed with its head" in told
