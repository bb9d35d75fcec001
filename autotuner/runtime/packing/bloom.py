"""Attention of BLOOM, which is not transformers' to set, for packed batches: its ALiBi as a bias of distances.

Imported only where a model of BLOOM's is packed, since it needs transformers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, dropout_add

from autotuner.runtime.packing.bounds import is_packed
from autotuner.runtime.packing.interface import attend


class PackedBloomAttention(BloomAttention):  # type: ignore[misc]
    """BLOOM's attention, which keeps to bounds where it is given these as its mask."""

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None,
        layer_past: Any = None, **named: Any,
    ) -> Any:  # fmt: skip
        """Return the output with its residual, and no weights where a batch is packed."""
        if not is_packed(attention_mask):
            return super().forward(hidden_states, residual, alibi, attention_mask, layer_past, **named)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out, _ = attend(
            self, query, key, value, attention_mask, dropout=self.attention_dropout.p if self.training else 0.0,
            scaling=self.inv_norm_factor, is_causal=True, position_bias=alibi,
        )  # fmt: skip
        return dropout_add(self.dense(out.flatten(2)), residual, self.hidden_dropout, self.training), None


class PackedBloomModel(BloomModel):  # type: ignore[misc]
    """BLOOM's layers, which get ALiBi as a bias of distances where a batch is packed."""

    def build_alibi_tensor(self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Return ALiBi as BLOOM makes it; for a packed batch of distances, (1, heads, 1, distances), in float32."""
        if not is_packed(attention_mask):
            found: Tensor = super().build_alibi_tensor(attention_mask, num_heads, dtype)
            return found
        tokens = torch.ones_like(attention_mask[:, 0, :, 0])
        behind: Tensor = super().build_alibi_tensor(tokens, num_heads, torch.float32)[:, 0]
        return torch.cat((-behind.flip(1), behind[:, 1:]), 1)[None, :, None]


PackedBloomModel.__name__ = BloomModel.__name__  # which a saved configuration names
CLASSES = {BloomAttention: PackedBloomAttention, BloomModel: PackedBloomModel}
ATTENDS = True
