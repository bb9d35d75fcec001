"""Whole models: every layer of those that people train runs tuned, and computes what it did."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.runtime.capture.known import Compilation, assert_equal, gradients

VOCABULARY, LENGTH, LAYERS, DECODER_LAYERS = 64, 12, 2, 4
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
         "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip


def tokens(**more: Any) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (2, 2, LENGTH))
    return {"input_ids": ids[0], "labels": ids[1], **more}


def padding() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 7:] = 0
    return mask


def bert(**more: Any) -> tuple[nn.Module, dict[str, Any]]:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **off)), tokens(**more)


def padded_bert() -> tuple[nn.Module, dict[str, Any]]:
    return bert(attention_mask=padding())


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), tokens(use_cache=False)


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), tokens(use_cache=False)


def padded_llama() -> tuple[nn.Module, dict[str, Any]]:
    """Return a decoder whose first queries see nothing but what is padded."""
    model, arguments = llama()
    return model, arguments | {"attention_mask": padding().flip(-1)}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return transformers.ViTForImageClassification(config), images


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """Return an encoder and a decoder, whose queries are fewer than the keys that they look at in the encoder."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4,
        num_decoder_layers=DECODER_LAYERS, feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    arguments = tokens(use_cache=False, attention_mask=padding())
    return transformers.T5ForConditionalGeneration(config), arguments | {"labels": arguments["labels"][:, :8].clone()}


def loss_of(arguments: dict[str, Any]) -> Callable[[Any], Tensor]:
    def loss(model: Any) -> Tensor:
        found: Tensor = model(**arguments).loss
        return found

    return loss


# And how many regions of each run tuned.
MODELS = (
    (bert, LAYERS),
    (padded_bert, LAYERS),
    (gpt2, LAYERS),
    (llama, LAYERS),
    (vit, LAYERS),
    (t5, LAYERS + DECODER_LAYERS),
)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tuned"), MODELS)
def test_layers_of_a_model_run_tuned_and_compute_what_it_computed(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], tuned: int
) -> None:
    torch.manual_seed(0)
    model, arguments = make()
    loss = loss_of(arguments)
    wanted = gradients(model, loss)
    compilation = Compilation(model)
    for _ in range(2):
        found = gradients(model, loss, compilation.model)
    assert_equal(found, wanted, 2e-6)
    assert sum(graph.tuned_places for graph in compilation.compiled) == tuned
    assert [region.calls for region in compilation.regions][:tuned] == [2] * tuned


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_layers_of_torchs_own_run_tuned_whatever_comes_first(first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=first, norm_first=not first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, weights = torch.randn(2, 2, LENGTH, 32) if first else torch.randn(2, LENGTH, 2, 32)

    def loss(called: Any) -> Tensor:
        found: Tensor = (called(x) * weights).sum()
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), wanted, 2e-6)
    (compiled,) = compilation.compiled
    assert compiled.headline == "2 of 2 regions run tuned (1 of 1 kinds): 100% of the flop of the model's forward"
