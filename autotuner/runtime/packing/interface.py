"""Attention for models of transformers that keeps to bounds, where a batch is packed; else it is that of torch."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.runtime.packing.bounds import bounds_of, is_packed, mask_of, visible
from autotuner.runtime.packing.operator import packed_attention
from autotuner.runtime.packing.relative_bias import bias_by_distances, table_of

NAME = "autotuner_packed"
"""Of this implementation of attention, in a model's configuration."""
_BLOOM = ("autotuner.runtime.packing.bloom", "transformers.models.bloom.modeling_bloom")
"""Modules of a model with an attention of its own: this project's, and transformers'."""


@dataclass(eq=False)
class Record:
    """Arguments of calls of attention, while they are noted.

    Args:
        windows: the sliding window of each call, or None.
    """

    windows: list[int | None] = field(default_factory=list)


_RECORDS: list[Record] = []


@contextmanager
def recorded() -> Iterator[Record]:
    """Note calls of packed attention."""
    record = Record()
    _RECORDS.append(record)
    try:
        yield record
    finally:
        _RECORDS.remove(record)


def register() -> None:
    """Have transformers know this implementation, and give it the masks of torch's attention for padded batches."""
    utils: Any = importlib.import_module("transformers.modeling_utils")
    masks: Any = importlib.import_module("transformers.masking_utils")
    utils.AttentionInterface.register(NAME, attend)
    masks.AttentionMaskInterface.register(NAME, masks.sdpa_mask)


def attention_of(model: Any) -> dict[str, Any]:
    """Return the attention of a model of transformers, and that of its parts by name; nothing of another model."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return {}
    own = _own_attention(model)
    if own is not None and own.is_set(model):
        return {"": NAME}
    parts = {name: getattr(getattr(config, name, None), "_attn_implementation", None) for name in config.sub_configs}
    return {"": config._attn_implementation, **{name: found for name, found in parts.items() if found is not None}}


def set_attention(model: Any, attention: str | dict[str, Any]) -> None:
    """Have a model use an implementation of attention: a name, or what `attention_of` returned."""
    own = _own_attention(model)
    if own is None:
        model.set_attn_implementation(attention)
    else:
        own.set_packed(model, attention == NAME or attention == {"": NAME})


def _own_attention(model: nn.Module) -> Any:
    """Return the module that packs a model whose attention is its own, or None."""
    is_bloom = any(type(module).__module__ in _BLOOM for module in model.modules())
    return importlib.import_module(_BLOOM[0]) if is_bloom else None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        query: with key and value, (1, heads, tokens, features) of a packed batch.
        attention_mask: (1, 1, tokens, 2), bounds; or anything that a padded batch has.
        sliding_window: so many tokens are seen, the own one among them; to both sides where it is not causal.

    Returns:
        The output, (1, tokens, heads, features), and None.

    Raises:
        InputError: something is asked for that packed attention does not do.
    """
    if not is_packed(attention_mask):
        known = {"is_causal": is_causal, "sliding_window": sliding_window, "softcap": softcap}
        return _padded(module, query, key, value, attention_mask, dropout, scaling, known | others)
    assert attention_mask is not None
    if others.get("s_aux") is not None:
        raise InputError(f"{type(module).__name__} adds a sink to its scores, which packed attention does not know")
    bias = table_of(module, others.get("position_bias"), query.shape[1])
    bounds = attention_mask[0, 0]
    if len(query) != 1 or len(key) != 1 or query.shape[2] != bounds.shape[0] or key.shape[2] != bounds.shape[0]:
        raise InputError(
            f"{type(module).__name__} has queries of shape {list(query.shape)} and keys of shape {list(key.shape)} for "
            f"{bounds.shape[0]} packed tokens: packed, a batch is one row, and attention is of its tokens alone, "
            "without a cache of earlier ones"
        )
    if value.shape[-1] != query.shape[-1]:
        raise InputError(
            f"{type(module).__name__} has {value.shape[-1]} features of values and {query.shape[-1]} of queries, which "
            "packed attention does not know"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    bounds = visible(bounds, causal, sliding_window)
    for record in _RECORDS:
        record.windows.append(sliding_window)
    factor = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = packed_attention(query[0], key[0], value[0], bounds, factor, dropout, softcap or 0.0, bias)
    return out.transpose(0, 1)[None], None


def bounds_by_positions(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Give a model bounds where it is called with one row of positions and no mask, as flattened batches are.

    With a cache, which models make by default, transformers does not look at positions: sequences would see each other.
    """
    positions, tokens = named.get("position_ids"), named.get("input_ids", named.get("inputs_embeds"))
    if positions is None or tokens is None or positions.dim() != 2 or positions.shape[0] != 1 or tokens.shape[0] != 1:
        return None
    if named.get("attention_mask") is not None or named.get("past_key_values") is not None:
        return None
    return given, named | {"attention_mask": mask_of(bounds_of(positions[0]))}


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of packed batches from a model and its modules."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for number in [number for number, hook in hooks.items() if hook in (bounds_by_positions, bias_by_distances)]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float,
    scaling: float | None, others: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of a batch that is not packed."""
    if others["softcap"] is None:
        sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention")
        found: tuple[Tensor, None] = sdpa.sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = others["softcap"] * torch.tanh(scores / others["softcap"])
    if mask is None and getattr(module, "is_causal", True) and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = nn.functional.dropout(scores.float().softmax(-1).to(value.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None
