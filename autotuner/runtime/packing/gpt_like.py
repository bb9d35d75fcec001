"""Attention of GPT-J, CodeGen, GPT-Neo and GPT-NeoX-Japanese, which is not transformers' to set, for packed batches.

Imported only where such a model is packed, since it needs transformers.
"""

from abc import abstractmethod
from typing import Any

from torch import Tensor
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention

from autotuner.runtime.packing.bounds import is_packed
from autotuner.runtime.packing.interface import attend


class _PackedGPTLike:
    """An attention that keeps to bounds where it is given these as its mask."""

    training: bool

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Return the output, (1, heads, tokens, features), and no weights where a batch is packed."""
        if not is_packed(attention_mask):
            return super()._attn(query, key, value, attention_mask)  # type: ignore[misc]
        scaling, share, window = self._settings()
        out, _ = attend(
            self, query, key.to(query.dtype), value.to(query.dtype), attention_mask,  # type: ignore[arg-type]
            dropout=share if self.training else 0.0, scaling=scaling, is_causal=True, sliding_window=window,
        )  # fmt: skip
        return out.transpose(1, 2).to(value.dtype), None

    @abstractmethod
    def _settings(self) -> tuple[float, float, int | None]:
        """Return the factor of scores, the share of weights that is dropped, and the window."""


class PackedGPTJAttention(_PackedGPTLike, GPTJAttention):  # type: ignore[misc]
    """GPT-J's attention."""

    def _settings(self) -> tuple[float, float, int | None]:
        return 1 / self.scale_attn, self.attn_dropout.p, None


class PackedCodeGenAttention(_PackedGPTLike, CodeGenAttention):  # type: ignore[misc]
    """CodeGen's attention."""

    def _settings(self) -> tuple[float, float, int | None]:
        return 1 / float(self.scale_attn), self.attn_dropout.p, None


class PackedGPTNeoSelfAttention(_PackedGPTLike, GPTNeoSelfAttention):  # type: ignore[misc]
    """GPT-Neo's attention, whose scores have no factor; every other layer has a window."""

    def _settings(self) -> tuple[float, float, int | None]:
        is_local = self.config.attention_layers[self.layer_id] == "local"
        return 1.0, self.attn_dropout.p, self.config.window_size if is_local else None


class PackedGPTNeoXJapaneseAttention(_PackedGPTLike, GPTNeoXJapaneseAttention):  # type: ignore[misc]
    """GPT-NeoX-Japanese's attention."""

    def _settings(self) -> tuple[float, float, int | None]:
        return 1 / float(self.norm_factor), self.attention_dropout.p, None


CLASSES = {
    GPTJAttention: PackedGPTJAttention, CodeGenAttention: PackedCodeGenAttention,
    GPTNeoSelfAttention: PackedGPTNeoSelfAttention, GPTNeoXJapaneseAttention: PackedGPTNeoXJapaneseAttention,
}  # fmt: skip
ATTENDS = True
