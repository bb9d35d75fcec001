"""Attention of MPT, which is not transformers' to set, for packed batches: its ALiBi as a bias of distances.

Imported only where a model of MPT's is packed, since it needs transformers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel

from autotuner.errors import InputError
from autotuner.runtime.packing.bounds import is_packed
from autotuner.runtime.packing.interface import attend


class PackedMptAttention(MptAttention):  # type: ignore[misc]
    """MPT's attention, which keeps to bounds where it is given these as its mask."""

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor, past_key_values: Any = None,
        attention_mask: Tensor | None = None, **named: Any,
    ) -> Any:  # fmt: skip
        """Return the output, and no weights where a batch is packed."""
        if not is_packed(attention_mask):
            return super().forward(hidden_states, position_bias, past_key_values, attention_mask, **named)
        made = self.Wqkv(hidden_states)
        if self.clip_qkv:
            made = made.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (each.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for each in made.chunk(3, dim=2))
        out, _ = attend(
            self, query, key, value, attention_mask, dropout=self.attn_dropout_p if self.training else 0.0,
            scaling=self.softmax_scale, is_causal=True, position_bias=position_bias,
        )  # fmt: skip
        return self.out_proj(out.flatten(2)), None


class PackedMptModel(MptModel):  # type: ignore[misc]
    """MPT's layers, which get bounds, and ALiBi as a bias of distances, where a batch is packed."""

    def forward(
        self, input_ids: Tensor | None = None, past_key_values: Any = None, attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None, use_cache: bool | None = None, output_attentions: bool | None = None,
        output_hidden_states: bool | None = None, return_dict: bool | None = None, **named: Any,
    ) -> Any:  # fmt: skip
        """Return the last hidden states, without a cache where a batch is packed: MPT would make bounds boolean.

        Raises:
            InputError: a packed batch comes with a cache of earlier tokens.
        """
        if not is_packed(attention_mask):
            return super().forward(
                input_ids, past_key_values, attention_mask, inputs_embeds, use_cache, output_attentions,
                output_hidden_states, return_dict, **named,
            )  # fmt: skip
        assert attention_mask is not None
        if past_key_values is not None:
            raise InputError("MptModel is given packed tokens and a cache: attention is of its tokens alone")
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with_names = self.config.return_dict if return_dict is None else return_dict
        hidden = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        bias, states = self._bias_of_distances(hidden), []
        for block in self.blocks:
            states.append(hidden)
            hidden, _ = block(hidden, position_bias=bias, attention_mask=attention_mask)
        hidden = self.norm_f(hidden)
        all_states = (*states, hidden) if wanted else None
        if not with_names:
            return tuple(each for each in (hidden, all_states) if each is not None)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden, hidden_states=all_states)

    def _bias_of_distances(self, hidden: Tensor) -> Tensor:
        """Return ALiBi of all distances between packed tokens, (1, heads, 1, distances), in float32."""
        behind = self.build_mpt_alibi_tensor(self.num_heads, hidden.shape[1], device=hidden.device)
        return torch.cat((behind, behind[..., :-1].flip(-1)), -1)[None]


PackedMptModel.__name__ = MptModel.__name__  # which a saved configuration names
CLASSES = {MptAttention: PackedMptAttention, MptModel: PackedMptModel}
ATTENDS = True
