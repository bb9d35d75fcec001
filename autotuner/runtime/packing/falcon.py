"""Attention of Falcon, which is not transformers' to set, for packed batches.

Imported only where a model of Falcon's is packed, since it needs transformers.
"""

from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from autotuner.runtime.packing.bounds import is_packed
from autotuner.runtime.packing.interface import attend


class PackedFalconAttention(FalconAttention):  # type: ignore[misc]
    """Falcon's attention, which keeps to bounds where it is given these as its mask."""

    def forward(
        self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Tensor | None, position_ids: Any = None,
        layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None, **named: Any,
    ) -> Any:  # fmt: skip
        """Return the output, and no weights where a batch is packed."""
        if not is_packed(attention_mask):
            return super().forward(
                hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions,
                position_embeddings, **named,
            )  # fmt: skip
        assert position_embeddings is not None
        heads = (each.transpose(1, 2) for each in self._split_heads(self.query_key_value(hidden_states)))
        query, key, value = heads
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, is_causal=True)
        return self.dense(out.flatten(2)), None  # transformers drops no weights beside rotary positions


def reason_against(module: Any) -> str | None:
    """Say why an attention cannot keep to bounds, or None if it can."""
    if getattr(module.config, "alibi", False):
        return "Falcon rounds its ALiBi to bfloat16 by the place of a key in its batch, not by distance"
    return None


CLASSES = {FalconAttention: PackedFalconAttention}
ATTENDS = True
