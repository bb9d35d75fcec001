"""torch.nn.TransformerEncoderLayer: post-norm a bert-encoder, pre-norm and called with a causal mask a gpt-block."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from autotuner.runtime.adapter import Adapter, Description, Parts, dtype_name, linear, norm
from autotuner.runtime.fallbacks import Reason
from autotuner.runtime.framework import causal_mask
from autotuner.runtime.module import TunedModule


def activation_kind(activation: Any) -> str | None:
    """Return the operator kind of an activation function or module, or None for one that has none."""
    if activation is functional.relu or activation is torch.relu or type(activation) is nn.ReLU:
        return "relu"
    if activation is functional.gelu:
        return "gelu_erf"
    if type(activation) is nn.GELU:
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu_erf"
    return None


def refuses(module: nn.Module) -> str | None:
    assert isinstance(module, nn.TransformerEncoderLayer)
    attention = module.self_attn
    if getattr(attention, "in_proj_weight", None) is None:
        return "query, key and value of different widths"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "its attention adds keys of its own (add_bias_kv or add_zero_attn)"
    if activation_kind(module.activation) is None:
        return f"activation {module.activation!r}: it is none of relu, gelu (erf) and nn.GELU('tanh')"
    if module.norm1.eps != module.norm2.eps:
        return f"epsilon is {module.norm1.eps} in norm1 and {module.norm2.eps} in norm2; the model has one"
    return None


def describe(module: nn.Module) -> Description:
    assert isinstance(module, nn.TransformerEncoderLayer)
    attention = module.self_attn
    return Description(
        "gpt-block" if module.norm_first else "bert-encoder",
        {
            "h": attention.embed_dim,
            "n": attention.num_heads,
            "p": attention.head_dim,
            "f": module.linear1.out_features,
        },
        {
            "activation": str(activation_kind(module.activation)),
            "attention_dropout": float(attention.dropout),
            "output_dropout": float(module.dropout1.p),
            "activation_dropout": float(module.dropout.p),
            "feed_forward_dropout": float(module.dropout2.p),
            "epsilon": float(module.norm1.eps),
        },
        dtype_name(module.linear1.weight.dtype),
    )


def parts(module: nn.Module) -> Parts:
    own = module._modules
    attention = own["self_attn"]
    assert attention is not None
    activation = own["activation"] if "activation" in own else module.__dict__.get("activation")
    return (
        attention, attention._modules.get("out_proj"), own.get("linear1"), own.get("dropout"), own.get("linear2"),
        own.get("norm1"), own.get("norm2"), own.get("dropout1"), own.get("dropout2"), activation,
    )  # fmt: skip


def settings(found: Parts) -> tuple[float, ...]:
    attention, _, _, dropout, _, norm1, norm2, dropout1, dropout2, _ = found
    return (
        attention.dropout if attention.training else 0.0,
        dropout1.p if dropout1.training else 0.0,
        dropout.p if dropout.training else 0.0,
        dropout2.p if dropout2.training else 0.0,
        norm1.eps,
        norm2.eps,
    )


class TunedTransformerEncoderLayer(TunedModule, nn.TransformerEncoderLayer):
    """Runs a configuration where it covers the call, and the layer that it was made from elsewhere."""

    original = nn.TransformerEncoderLayer
    keeps = False

    def call_original(self, x: Tensor, mask: Tensor | None) -> Tensor:
        causal = causal_mask(x, self.self_attn.batch_first) if self.norm_first else None
        return nn.TransformerEncoderLayer.forward(self, x, causal, mask, is_causal=self.norm_first)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        original = partial(
            nn.TransformerEncoderLayer.forward,
            self,
            src_mask=src_mask,
            src_key_padding_mask=src_key_padding_mask,
            is_causal=is_causal,
        )
        mask: Tensor | Reason | None = src_key_padding_mask
        if self.norm_first and (src_mask is None or not is_causal):
            mask = Reason(
                "src_mask", "src_mask and is_causal=True are not both given, and the configuration is of a causal block"
            )
        elif not self.norm_first and (src_mask is not None or is_causal):
            mask = Reason(
                "src_mask", "src_mask or is_causal is given, and no configuration has a mask between positions"
            )
        return self.run(src, mask, original)


TunedTransformerEncoderLayer.adapter = Adapter(
    kinds={
        "self_attn": (nn.MultiheadAttention,),
        "self_attn.out_proj": (NonDynamicallyQuantizableLinear, nn.Linear),
        **dict.fromkeys(("linear1", "linear2"), (nn.Linear,)),
        **dict.fromkeys(("norm1", "norm2"), (nn.LayerNorm,)),
        **dict.fromkeys(("dropout", "dropout1", "dropout2"), (nn.Dropout,)),
    },
    ports=(
        *linear("self_attn.in_proj_", ("query", "key", "value"), "np", "h"),
        *linear("self_attn.out_proj.", ("output",), "h", "np"),
        *linear("linear1.", ("linear1",), "f", "h"),
        *linear("linear2.", ("linear2",), "h", "f"),
        *norm("norm1", "norm1"),
        *norm("norm2", "norm2"),
    ),
    refuses=refuses,
    describe=describe,
    parts=parts,
    settings=settings,
    batch_first=lambda module: bool(module.self_attn.batch_first),  # type: ignore[union-attr]
)

DROP_INS = {nn.TransformerEncoderLayer: TunedTransformerEncoderLayer}
