"""Cases of the benchmark on a GPU: models, and the framework's layer that each is measured against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autotuner.ir.models import Model, named_model
from autotuner.ir.records import Scalar
from autotuner.runtime import DROPOUTS
from autotuner.runtime.adapters import adapter_for
from autotuner.runtime.framework import encoder_layer

ACTIVATIONS = {"gelu_erf": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}

Make = Callable[..., nn.Module]  # of a model, a seed and a device


@dataclass(frozen=True)
class Case:
    """One row of the page; `layer` is a name in `LAYERS`."""

    name: str
    layer: str
    model: Model

    @property
    def make(self) -> Make:
        return LAYERS[self.layer]


def bert_layer(model: Model, seed: int = 0, device: str = "cpu") -> nn.Module:
    """Return Hugging Face's BertLayer in train mode, with the values of `encoder_layer(model)`."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    extents, options = model.extents, model.options
    if options["activation_dropout"] or options["output_dropout"] != options["feed_forward_dropout"]:
        raise ValueError("a BertLayer has no dropout behind its activation, and one p for both others")
    config = BertConfig(
        hidden_size=extents["h"],
        num_attention_heads=extents["n"],
        intermediate_size=extents["f"],
        hidden_act=ACTIVATIONS[str(options["activation"])],
        hidden_dropout_prob=float(options["output_dropout"]),
        attention_probs_dropout_prob=float(options["attention_dropout"]),
        layer_norm_eps=float(options["epsilon"]),
    )
    config._attn_implementation = "sdpa"
    layer: nn.Module = BertLayer(config).to(getattr(torch, model.dtype))
    plain = encoder_layer(model, seed)
    values = {
        member: part
        for port in adapter_for(plain).ports
        for member, part in zip(
            port.members, plain.get_parameter(port.name).detach().chunk(len(port.members)), strict=True
        )
    }
    with torch.no_grad():
        for port in adapter_for(layer).ports:
            layer.get_parameter(port.name).copy_(values[port.members[0]])
    return layer.train().to(device)


ENCODER, BERT_LAYER = "nn.TransformerEncoderLayer", "BertLayer"
LAYERS: Mapping[str, Make] = {ENCODER: encoder_layer, BERT_LAYER: bert_layer}


def _encoder(preset: str, dtype: str = "bfloat16", **options: Scalar) -> Model:
    return named_model(f"bert-encoder:{preset}", dtype=dtype, options=dict.fromkeys(DROPOUTS, 0.1) | options)


# "large-relu" is the paper's own layer, in bfloat16; "wide" has the width of GPT-2 large. BertLayer has BERT's own
# epsilon. GPT-2 has no dropout behind its activation; its context is 1,024 tokens, and four of
# them are the 4,096 tokens of "large".
CASES = {
    case.name: case
    for case in (
        Case("large", ENCODER, _encoder("large")),
        Case("large-short", ENCODER, _encoder("large-short")),
        Case(
            "base-512",
            ENCODER,
            named_model(
                "bert-encoder:base", extents={"l": 512}, dtype="bfloat16", options=dict.fromkeys(DROPOUTS, 0.1)
            ),
        ),
        Case("base", ENCODER, _encoder("base")),
        Case("large-float16", ENCODER, _encoder("large", "float16")),
        Case("bert-layer", BERT_LAYER, _encoder("large", activation_dropout=0.0, epsilon=1e-12)),
        Case("large-relu", ENCODER, _encoder("large", activation="relu")),
        Case(
            "wide",
            ENCODER,
            named_model(
                "bert-encoder:large",
                extents={"b": 12, "l": 384, "h": 1280, "n": 20, "p": 64, "f": 5120},
                dtype="bfloat16",
                options=dict.fromkeys(DROPOUTS, 0.1),
            ),
        ),
        Case("gpt-block", ENCODER, named_model("gpt-block:medium", extents={"b": 4, "l": 1024}, dtype="bfloat16")),
    )
}
