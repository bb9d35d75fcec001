"""Heads of Hugging Face's language models: each is one operator with its loss, where only the loss is returned."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autotuner.api.caches import hook_recorders, without_cache
from autotuner.api.training import called, trace_past_notes
from autotuner.runtime.capture import heads
from scripts.bench.architectures import CAUSAL, ENCODER, GROUPED, MASKED, SEQUENCES, WHISPER, of_transformers
from tests.runtime.capture.known import Compilation, Known, assert_equal, gradients

WORDS, ROWS, LENGTH = 64, 2, 8
SAID = f"the loss of {ROWS * LENGTH} rows of {WORDS} logits is computed with its head, 16 rows at a time"
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3, capped": ("Gemma3ForCausalLM", CAUSAL["Gemma 3"][1] | {"final_logit_softcapping": 5.0}),
    "Mixtral, loss of its routers": ("MixtralForCausalLM", GROUPED | ROUTED | {"num_local_experts": 4}),
    "OLMoE, loss of its routers": ("OlmoeForCausalLM", GROUPED | ROUTED | {"num_experts": 4}),
    "DeBERTa": ("DebertaForMaskedLM", ENCODER),
    "DeBERTa, head by matmul": ("DebertaForMaskedLM", ENCODER | {"legacy": False}),
    "DeBERTa-v2, head by matmul": ("DebertaV2ForMaskedLM", ENCODER | {"legacy": False}),
    "MobileBERT": ("MobileBertForMaskedLM", ENCODER | {"embedding_size": 32, "intra_bottleneck_size": 64}),
    "Marian": ("MarianMTModel", SEQUENCES["BART"][1]),
    "mBART": ("MBartForConditionalGeneration", SEQUENCES["BART"][1]),
    "Qwen3-Next": ("Qwen3NextForCausalLM", CAUSAL["Qwen3-Next"][1] | {"layer_types": ["full_attention"]}),
    "Whisper": (
        "WhisperForConditionalGeneration",
        WHISPER | {"max_source_positions": 4, "max_target_positions": 64, "num_mel_bins": 8},
    ),
}
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
MODELS = {**CAUSAL, **MASKED, **SEQUENCES, **OTHERS}


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LOGITS_MIN", 1)
    monkeypatch.setattr(heads, "GRADIENTS", 0)


def made(name: str) -> Any:
    """Return a model of one layer, without dropout, whose biases are not zeros."""
    class_name, sizes = MODELS[name]
    torch.manual_seed(0)
    model = of_transformers(class_name, sizes | {key: 1 for key in LAYERS if key in sizes}).double().eval()
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # others multiply no experts in float64
    with torch.no_grad():
        for key, parameter in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("bias") or key == "final_logits_bias":
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def compilation_of(model: Any) -> Compilation:
    """Return a model's compiled call for its loss, as `training_step` compiles it."""
    keywords = without_cache(model)
    trace_past_notes(model)
    hook_recorders(model)
    return Compilation(lambda each: called(model, each, **keywords), Known(()))  # type: ignore[arg-type]


def said(compilation: Compilation) -> list[str]:
    return [sentence for graph in compilation.compiled for sentence in graph.heads]


def batch(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(5, WORDS, (2, ROWS, LENGTH), generator=generator)
    labels[:, ::4] = -100
    if "input_features" in model.main_input_name:
        return {"input_features": torch.randn(ROWS, 8, 8, generator=generator).double(), "labels": labels}
    return {"input_ids": ids, "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_one_operator_with_its_loss(name: str) -> None:
    model = made(name)
    given, compilation = batch(model), compilation_of(model)
    found = gradients(model, lambda each: each(given), compilation.model)
    assert said(compilation) == [SAID]
    assert_equal(found, gradients(model, lambda each: called(each, given)), 1e-6)  # many of their losses are float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LLaMA", "Gemma 2", "Mixtral, loss of its routers"])
def test_the_sum_of_a_batch_that_is_divided_by_the_items_of_several_is_one_operator_too(name: str) -> None:
    model = made(name)
    given, compilation = batch(model) | {"num_items_in_batch": torch.tensor(37)}, compilation_of(model)
    found = gradients(model, lambda each: each(given), compilation.model)
    assert said(compilation) == [SAID]
    assert_equal(found, gradients(model, lambda each: called(each, given)), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "ESM", "BART", "DeBERTa, head by matmul"])
def test_a_batch_whose_labels_are_all_ignored_gives_what_the_plain_call_gives(name: str) -> None:
    model = made(name)
    given, compilation = batch(model), compilation_of(model)
    given["labels"].fill_(-100)
    found = gradients(model, lambda each: each(given), compilation.model)
    wanted = gradients(model, lambda each: called(each, given))
    assert said(compilation) == [SAID]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_hooks_that_record_are_installed_once_and_only_where_the_configuration_has_them_record() -> None:
    model, plain = made("Mixtral, loss of its routers"), made("Mixtral")
    for each in (model, model, plain):
        hook_recorders(each)
    hooks = [sum(len(module._forward_hooks) for module in each.modules()) for each in (model, plain)]
    assert hooks[1] == 0
    once = hooks[0]
    called(model, batch(model))
    assert once == sum(len(module._forward_hooks) for module in model.modules()) > 0
