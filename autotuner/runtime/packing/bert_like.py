"""Attention of Megatron-BERT and RemBERT, which is not transformers' to set, for packed batches.

Imported only where such a model is packed, since it needs transformers.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertSelfAttention
from transformers.models.rembert.modeling_rembert import RemBertSelfAttention

from autotuner.runtime.packing.bounds import is_packed
from autotuner.runtime.packing.interface import attend


class _PackedBertLike:
    """An attention that keeps to bounds where it is given these as its mask."""

    training: bool
    is_decoder: bool
    attention_head_size: int
    layer_idx: int | None
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    dropout: nn.Dropout

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None, output_attentions: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        """Return the output, and no weights where a batch is packed."""
        if not is_packed(attention_mask):
            return super().forward(  # type: ignore[misc]
                hidden_states, attention_mask, encoder_hidden_states, past_key_values, output_attentions, **named
            )
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, _ = attend(
            self, query, key, value, attention_mask,  # type: ignore[arg-type]
            dropout=self.dropout.p if self.training else 0.0, is_causal=self.is_decoder,
        )  # fmt: skip
        return out.flatten(2), None


class PackedMegatronBertSelfAttention(_PackedBertLike, MegatronBertSelfAttention):  # type: ignore[misc]
    """Megatron-BERT's attention."""


class PackedRemBertSelfAttention(_PackedBertLike, RemBertSelfAttention):  # type: ignore[misc]
    """RemBERT's attention."""


CLASSES = {
    MegatronBertSelfAttention: PackedMegatronBertSelfAttention,
    RemBertSelfAttention: PackedRemBertSelfAttention,
}
ATTENDS = True
