"""Attention of MPNet, which is not transformers' to set, for packed batches: its learned bias as one of distances.

Imported only where a model of MPNet's is packed, since it needs transformers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from autotuner.runtime.packing.bounds import is_packed
from autotuner.runtime.packing.interface import attend

REACH = 128
"""Pairs that are further apart share a bucket: `max_distance` of MPNet's buckets, which no configuration changes."""


class PackedMPNetSelfAttention(MPNetSelfAttention):  # type: ignore[misc]
    """MPNet's attention, which keeps to bounds where it is given these as its mask."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None,
        output_attentions: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        """Return the output, and no weights where a batch is packed."""
        if not is_packed(attention_mask):
            return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **named)
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (each(hidden_states).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        out, _ = attend(
            self, query, key, value, attention_mask, dropout=self.dropout.p if self.training else 0.0,
            is_causal=False, position_bias=position_bias,
        )  # fmt: skip
        made = self.o(out.flatten(2))
        return (made, None) if output_attentions else (made,)


class PackedMPNetEncoder(MPNetEncoder):  # type: ignore[misc]
    """MPNet's layers, which get a bias of distances where a batch is packed."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False,
        output_hidden_states: bool = False, return_dict: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        """Return the last hidden states, without weights of attention where a batch is packed."""
        if not is_packed(attention_mask):
            return super().forward(
                hidden_states, attention_mask, output_attentions, output_hidden_states, return_dict, **named
            )
        bias, states = self._bias_of_distances(hidden_states), [hidden_states]
        for layer in self.layer:
            states.append(layer(states[-1], attention_mask, bias, **named)[0])
        all_states = tuple(states) if output_hidden_states else None
        if not return_dict:
            return tuple(each for each in (states[-1], all_states) if each is not None)
        return BaseModelOutput(last_hidden_state=states[-1], hidden_states=all_states)

    def _bias_of_distances(self, hidden: Tensor) -> Tensor:
        """Return the learned bias of distances from -REACH to REACH, (1, heads, 1, distances)."""
        distances = torch.arange(-REACH, REACH + 1, device=hidden.device)
        found: Tensor = self.relative_attention_bias(self.relative_position_bucket(distances))
        return found.T[None, :, None]


CLASSES = {MPNetSelfAttention: PackedMPNetSelfAttention, MPNetEncoder: PackedMPNetEncoder}
ATTENDS = True
