"""Embeddings of ESM, which reads the mask of its padding there, for packed batches.

Imported only where a model of ESM's is packed, since it needs transformers.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.esm.modeling_esm import EsmEmbeddings

from autotuner.runtime.packing.bounds import is_packed

TRAINED_WITH = 0.15 * 0.8
"""The share of tokens that were masked when ESM's models were trained, in transformers' code a number too."""


class PackedEsmEmbeddings(EsmEmbeddings):  # type: ignore[misc]
    """ESM's embeddings, for which each packed sequence has its own share of masked tokens."""

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return the embeddings, (1, tokens, features) where a batch is packed."""
        if not is_packed(attention_mask):
            return super().forward(input_ids, attention_mask, position_ids, inputs_embeds)
        assert attention_mask is not None
        embedded = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if self.token_dropout and input_ids is not None:
            is_masked = input_ids[0] == self.mask_token_id
            start, end = attention_mask[0, 0].long().unbind(1)
            before = nn.functional.pad(is_masked.cumsum(0), (1, 0))
            share = (before[end] - before[start]).float() / (end - start)
            embedded = embedded.masked_fill(is_masked[None, :, None], 0.0)
            embedded = (embedded * (1 - TRAINED_WITH) / (1 - share)[None, :, None]).to(embedded.dtype)
        return super().forward(None, None, position_ids, embedded)


CLASSES = {EsmEmbeddings: PackedEsmEmbeddings}
ATTENDS = False
