"""The framework's encoder layer as one would write it for speed: the strongest plain peer on a GPU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotuner.ir.models import Model
from autotuner.runtime.framework import encoder_layer

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class StackedLayer(nn.Module):
    """One product for query, key and value, and scaled_dot_product_attention with dropout inside.

    It has the parameters of an nn.TransformerEncoderLayer, post-norm or pre-norm, and computes the same.
    """

    def __init__(self, layer: nn.TransformerEncoderLayer, backend: SDPBackend | None = None) -> None:
        """Take over a layer's parts.

        Args:
            backend: which attention kernel runs, or none does; None leaves it to torch.
        """
        super().__init__()
        attention = layer.self_attn
        self.in_proj_weight, self.in_proj_bias = attention.in_proj_weight, attention.in_proj_bias
        self.heads, self.attention_dropout = attention.num_heads, attention.dropout
        self.out_proj = attention.out_proj
        self.linear1, self.linear2 = layer.linear1, layer.linear2
        self.norm1, self.norm2 = layer.norm1, layer.norm2
        self.dropout, self.dropout1, self.dropout2 = layer.dropout, layer.dropout1, layer.dropout2
        self.activation: Any = layer.activation
        self.norm_first = layer.norm_first
        self.backend = backend

    def forward(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,  # noqa: ARG002
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return y of x, both (b, l, h).

        Args:
            src_mask: is not read: beside is_causal it is the causal mask.
            src_key_padding_mask: (b, l), true where a key does not count; not beside is_causal.
            is_causal: whether a query sees no later keys.
        """
        y: Tensor
        if self.norm_first:
            x = x + self.dropout1(self._attention(self.norm1(x), src_key_padding_mask, is_causal))
            y = x + self.dropout2(self._feed_forward(self.norm2(x)))
        else:
            x = self.norm1(x + self.dropout1(self._attention(x, src_key_padding_mask, is_causal)))
            y = self.norm2(x + self.dropout2(self._feed_forward(x)))
        return y

    def _attention(self, x: Tensor, padding: Tensor | None, is_causal: bool) -> Tensor:
        batch, length, hidden = x.shape
        stacked = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        parts = stacked.view(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        keeps = None if padding is None else ~padding[:, None, None, :]
        p = self.attention_dropout if self.training else 0.0
        if self.backend is None:
            context = functional.scaled_dot_product_attention(query, key, value, keeps, p, is_causal)
        else:
            with sdpa_kernel(self.backend):
                context = functional.scaled_dot_product_attention(query, key, value, keeps, p, is_causal)
        joined: Tensor = self.out_proj(context.transpose(1, 2).reshape(batch, length, hidden))
        return joined

    def _feed_forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return y


def stacked_layer(model: Model, backend: str | None = None, *, device: str) -> StackedLayer:
    """Return a stacked layer with the values of `encoder_layer(model)`.

    Args:
        backend: "flash", "cudnn" or "efficient"; None leaves it to torch.

    Raises:
        ConfigurationError: the framework has no layer for this model.
    """
    layer = encoder_layer(model, device=device)
    with torch.no_grad():
        return StackedLayer(layer, None if backend is None else BACKENDS[backend])
