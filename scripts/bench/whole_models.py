"""Whole models for the benchmark: what is trained, as people configure it, with a batch of made-up data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class WholeModel:
    """One row of the page.

    Args:
        name: of the row.
        make: returns a model in float32, in train mode; given the number of its layers, or None for all.
        batch: returns what it is called with, labels among it.
        dtype: of its parameters.
        autocast: the type that autocast computes in; None without it.
        stack: puts one product for query, key and value in place of three, for a peer; None where it has one already,
            or none is written.
    """

    name: str
    make: Callable[[int | None], nn.Module]
    batch: Callable[[str], Batch]
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None
    stack: Callable[[nn.Module], None] | None = None


def tokens(device: str, batch: int, length: int, vocabulary: int, padded: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(1, vocabulary, (2, batch, length), generator=generator)
    made = {"input_ids": ids, "labels": labels}
    if padded:
        lengths = torch.randint(length // 4, length + 1, (batch,), generator=generator)
        lengths[0] = length
        mask = (torch.arange(length) < lengths[:, None]).long()
        made |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in made.items()}


def _bert(layers: int | None) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=layers or 24, num_attention_heads=16, intermediate_size=4096
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _gpt2(layers: int | None) -> nn.Module:
    config = transformers.GPT2Config(n_embd=1024, n_layer=layers or 24, n_head=16)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _llama(layers: int | None) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers or 16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, rms_norm_eps=1e-5,
        max_position_embeddings=8192,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _vit(layers: int | None) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=layers or 24, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000,
        problem_type="single_label_classification",  # otherwise the first step sets it, and the second compiles anew
    )  # fmt: skip
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def _t5(layers: int | None) -> nn.Module:
    config = transformers.T5Config(
        d_model=1024, d_kv=64, d_ff=4096, num_layers=layers or 24, num_heads=16, decoder_start_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def images(device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(64, 3, 224, 224, generator=generator)
    labels = torch.randint(0, 1000, (64,), generator=generator)
    return {"pixel_values": pixels.to(device, torch.bfloat16), "labels": labels.to(device)}


def _checkpointed(make: Callable[[int | None], nn.Module]) -> Callable[[int | None], nn.Module]:
    """Return what makes a model that checkpoints its layers."""

    def made(layers: int | None) -> nn.Module:
        model: Any = make(layers)
        model.gradient_checkpointing_enable()
        return model  # type: ignore[no-any-return]

    return made


def _of_bert(padded: bool) -> Callable[[str], Batch]:
    return lambda device: tokens(device, 8, 512, 30522, padded)


class StackedAttention(nn.Module):
    """BERT's self-attention with one product for query, key and value."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        parts = (original.query, original.key, original.value)
        self.heads, self.p = original.num_attention_heads, original.dropout.p
        self.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
        self.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        b, length, h = x.shape
        stacked = nn.functional.linear(x, self.weight, self.bias).view(b, length, 3, self.heads, h // self.heads)
        query, key, value = stacked.permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, p)
        return y.transpose(1, 2).reshape(b, length, h), None


def _stack_bert(model: nn.Module) -> None:
    for layer in model.bert.encoder.layer:  # type: ignore[union-attr]
        layer.attention.self = StackedAttention(layer.attention.self)


WHOLE_MODELS: Mapping[str, WholeModel] = {
    each.name: each
    for each in (
        WholeModel("bert-large", _bert, _of_bert(False), stack=_stack_bert),
        WholeModel("bert-large, padded", _bert, _of_bert(True), stack=_stack_bert),
        WholeModel("bert-large, autocast", _bert, _of_bert(False), torch.float32, torch.bfloat16, _stack_bert),
        WholeModel("bert-large, autocast, padded", _bert, _of_bert(True), torch.float32, torch.bfloat16, _stack_bert),
        WholeModel(
            "bert-large, autocast, checkpointed", _checkpointed(_bert), lambda device: tokens(device, 16, 512, 30522),
            torch.float32, torch.bfloat16, _stack_bert,
        ),
        WholeModel("gpt2-medium", _gpt2, lambda device: tokens(device, 4, 1024, 50257)),
        WholeModel("gpt2-medium, padded", _gpt2, lambda device: tokens(device, 4, 1024, 50257, padded=True)),
        WholeModel("llama-1b", _llama, lambda device: tokens(device, 4, 1024, 128256)),
        WholeModel("llama-1b, padded", _llama, lambda device: tokens(device, 4, 1024, 128256, padded=True)),
        WholeModel("llama-1b, checkpointed", _checkpointed(_llama), lambda device: tokens(device, 4, 1024, 128256)),
        WholeModel("vit-large", _vit, images),
        WholeModel("t5-large", _t5, lambda device: tokens(device, 8, 512, 32128)),
    )
}  # fmt: skip
