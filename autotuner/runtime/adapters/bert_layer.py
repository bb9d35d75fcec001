"""Hugging Face's BertLayer, and those layers of the library that are BertLayer by another name; this file imports
transformers."""

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.camembert.modeling_camembert import CamembertLayer
from transformers.models.electra.modeling_electra import ElectraLayer
from transformers.models.roberta.modeling_roberta import RobertaLayer
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaLayer

from autotuner.runtime.adapter import Adapter, Description, Parts, dtype_name, linear, norm
from autotuner.runtime.fallbacks import Reason
from autotuner.runtime.module import TunedModule

# Keyword arguments that change nothing of what the layer returns.
HARMLESS = frozenset({"output_hidden_states", "return_dict", "use_cache", "num_items_in_batch", "position_ids"})


def activation_kind(activation: Any) -> str | None:
    """Return the operator kind of an activation module, or None for one that has none."""
    if type(activation) is GELUActivation:
        return "gelu_erf"
    if type(activation) in (GELUTanh, NewGELUActivation):
        return "gelu_tanh"
    return "relu" if type(activation) is nn.ReLU else None


def refuses(module: Any) -> str | None:
    if module.is_decoder or module.add_cross_attention:
        return "it is a decoder's layer: the model is an encoder's, without causal mask, cache and cross attention"
    if activation_kind(module.intermediate.intermediate_act_fn) is None:
        found = type(module.intermediate.intermediate_act_fn).__name__
        return f"activation {found}: it is none of gelu (erf), gelu_new or gelu_pytorch_tanh (tanh) and relu"
    first, second = module.attention.output.LayerNorm.eps, module.output.LayerNorm.eps
    if first != second:
        return f"epsilon is {first} in the first layer norm and {second} in the second; the model has one"
    chosen = attention_of(module.attention.self)
    function = ALL_ATTENTION_FUNCTIONS.get(chosen)
    if not getattr(getattr(function, "func", function), "__module__", "transformers.").startswith("transformers."):
        return f"its attention is {chosen!r}, which is none of the library's own: choose sdpa or eager"
    return None


def attention_of(attention: Any) -> str | None:
    """Return the name of the function that computes attention."""
    config = getattr(attention, "config", None)
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def describe(module: Any) -> Description:
    attention = module.attention.self
    return Description(
        "bert-encoder",
        {
            "h": attention.query.in_features,
            "n": attention.num_attention_heads,
            "p": attention.attention_head_size,
            "f": module.intermediate.dense.out_features,
        },
        {
            "activation": str(activation_kind(module.intermediate.intermediate_act_fn)),
            "attention_dropout": float(attention.dropout.p),
            "output_dropout": float(module.attention.output.dropout.p),
            "activation_dropout": 0.0,
            "feed_forward_dropout": float(module.output.dropout.p),
            "epsilon": float(module.output.LayerNorm.eps),
        },
        dtype_name(module.output.dense.weight.dtype),
    )


def parts(module: nn.Module) -> Parts:
    own: dict[str, Any] = module._modules
    attention, intermediate, output = own.get("attention"), own.get("intermediate"), own.get("output")
    inside = _inside(attention)
    inner, after = inside.get("self"), inside.get("output")
    projections, dense, last = _inside(inner), _inside(after), _inside(output)
    return (
        attention, intermediate, output, inner, after,
        projections.get("query"), projections.get("key"), projections.get("value"), projections.get("dropout"),
        dense.get("dense"), dense.get("LayerNorm"), dense.get("dropout"),
        _inside(intermediate).get("dense"), _inside(intermediate).get("intermediate_act_fn"),
        last.get("dense"), last.get("LayerNorm"), last.get("dropout"), attention_of(inner),
    )  # fmt: skip


def _inside(part: Any) -> dict[str, Any]:
    """Return a module's submodules; a part that was replaced may have others, or be missing."""
    found: dict[str, Any] = {} if part is None else part._modules
    return found


def settings(found: Parts) -> tuple[float, ...]:
    attention, dropped, last = found[3], found[11], found[16]
    return (
        found[8].p if attention.training else 0.0,
        dropped.p if dropped.training else 0.0,
        0.0,
        last.p if last.training else 0.0,
        found[10].eps,
        found[15].eps,
    )


class TunedLikeBert(TunedModule):
    """Runs a configuration where it covers the call, and the layer that it was made from elsewhere."""

    keeps = True

    def call_original(self, x: Tensor, mask: Tensor | None) -> Tensor:
        made: Tensor = self.original.forward(self, x, attention_mask=mask)
        return made

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        original = partial(
            self.original.forward,
            self,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        mask: Tensor | Reason | None = attention_mask
        unknown = [n for n, value in kwargs.items() if value is not None and value is not False and n not in HARMLESS]
        if past_key_values is not None:
            unknown.append("past_key_values")
        if unknown:
            mask = Reason(unknown[0], f"{unknown[0]} is given, and no configuration has it")
        return self.run(hidden_states, mask, original)


class TunedBertLayer(TunedLikeBert, BertLayer):  # type: ignore[misc]
    original = BertLayer


class TunedCamembertLayer(TunedLikeBert, CamembertLayer):  # type: ignore[misc]
    original = CamembertLayer


class TunedElectraLayer(TunedLikeBert, ElectraLayer):  # type: ignore[misc]
    original = ElectraLayer


class TunedRobertaLayer(TunedLikeBert, RobertaLayer):  # type: ignore[misc]
    original = RobertaLayer


class TunedXLMRobertaLayer(TunedLikeBert, XLMRobertaLayer):  # type: ignore[misc]
    original = XLMRobertaLayer


def _adapter(tuned: type[TunedModule]) -> Adapter:
    """Return the adapter of a class whose submodules are called as BertLayer's, but for the beginning."""
    original = tuned.original
    beginning, file = original.__name__.removesuffix("Layer"), sys.modules[original.__module__]
    own = {
        "attention": "Attention",
        "attention.self": "SelfAttention",
        "attention.output": "SelfOutput",
        "intermediate": "Intermediate",
        "output": "Output",
    }
    linears = [f"attention.self.{name}" for name in ("query", "key", "value")]
    linears += [f"{name}.dense" for name in ("attention.output", "intermediate", "output")]
    return Adapter(
        kinds={
            **{path: (getattr(file, beginning + name),) for path, name in own.items()},
            **dict.fromkeys(linears, (nn.Linear,)),
            **dict.fromkeys(("attention.output.LayerNorm", "output.LayerNorm"), (nn.LayerNorm,)),
            **dict.fromkeys(("attention.self.dropout", "attention.output.dropout", "output.dropout"), (nn.Dropout,)),
        },
        ports=(
            *linear("attention.self.query.", ("query",), "np", "h"),
            *linear("attention.self.key.", ("key",), "np", "h"),
            *linear("attention.self.value.", ("value",), "np", "h"),
            *linear("attention.output.dense.", ("output",), "h", "np"),
            *norm("attention.output.LayerNorm", "norm1"),
            *linear("intermediate.dense.", ("linear1",), "f", "h"),
            *linear("output.dense.", ("linear2",), "h", "f"),
            *norm("output.LayerNorm", "norm2"),
        ),
        refuses=refuses,
        describe=describe,
        parts=parts,
        settings=settings,
        batch_first=lambda _: True,
    )


DROP_INS = {
    tuned.original: tuned
    for tuned in (TunedBertLayer, TunedCamembertLayer, TunedElectraLayer, TunedRobertaLayer, TunedXLMRobertaLayer)
}
for _tuned in DROP_INS.values():
    _tuned.adapter = _adapter(_tuned)
