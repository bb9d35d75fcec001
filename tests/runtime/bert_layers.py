"""Hugging Face's BertLayer of the tiny model's extents, and masks in its forms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

KEEPS = torch.arange(6) < torch.tensor([[4], [6]])


def bert_layer(**options: Any) -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    given = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5, **options}
    config = BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12, **given)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer: nn.Module = BertLayer(config).double()
    return layer


def additive(keeps: Tensor) -> Tensor:
    """Return the extended mask of the library: 0 where a key counts, the lowest number where it does not."""
    lowest = torch.finfo(torch.float64).min
    return torch.zeros(2, 1, 1, 6, dtype=torch.float64).masked_fill_(~keeps[:, None, None], lowest)
