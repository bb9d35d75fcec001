"""Hugging Face's BertLayer of the tiny model's extents, and masks in its forms."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

KEEPS = torch.arange(6) < torch.tensor([[4], [6]])


LIKE_BERT = {
    "bert": "BertLayer",
    "camembert": "CamembertLayer",
    "electra": "ElectraLayer",
    "roberta": "RobertaLayer",
    "xlm_roberta": "XLMRobertaLayer",
}
"""Layers of the library that compute the same, by the folder that defines them."""


def bert_layer(family: str = "bert", attention: str = "sdpa", **options: Any) -> nn.Module:
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(file, LIKE_BERT[family])
    config_of = getattr(file, LIKE_BERT[family].replace("Layer", "Config"))
    given = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5, **options}
    config = config_of(hidden_size=8, num_attention_heads=2, intermediate_size=12, **given)
    config._attn_implementation = attention
    torch.manual_seed(0)
    layer: nn.Module = kind(config).double()
    return layer


def additive(keeps: Tensor) -> Tensor:
    """Return the extended mask of the library: 0 where a key counts, the lowest number where it does not."""
    lowest = torch.finfo(torch.float64).min
    return torch.zeros(2, 1, 1, 6, dtype=torch.float64).masked_fill_(~keeps[:, None, None], lowest)
