"""Attention for models of transformers that keeps to bounds, where a batch is packed; else it is that of torch."""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.runtime.packing import own_modules
from autotuner.runtime.packing.bounds import bounds_of, is_packed, mask_of, visible
from autotuner.runtime.packing.operator import packed_attention
from autotuner.runtime.packing.relative_bias import bias_by_distances, table_of

NAME = "autotuner_packed"
"""Of this implementation of attention, in a model's configuration."""
_OF_AN_ENCODER = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")
"""Arguments of models that see something else than their tokens."""


@dataclass(eq=False)
class Record:
    """Arguments of calls of attention, while they are noted.

    Args:
        windows: the sliding window of each call, or None.
        unbounded: modules that attention was called for without bounds.
    """

    windows: list[int | None] = field(default_factory=list)
    unbounded: list[nn.Module] = field(default_factory=list)


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
    if own_modules.is_set(model):
        return {"": NAME}
    parts = {name: getattr(getattr(config, name, None), "_attn_implementation", None) for name in config.sub_configs}
    return {"": config._attn_implementation, **{name: found for name, found in parts.items() if found is not None}}


def set_attention(model: Any, attention: str | dict[str, Any]) -> None:
    """Have a model use an implementation of attention: a name, or what `attention_of` returned."""
    own_modules.set_packed(model, attention == NAME or (isinstance(attention, dict) and attention.get("") == NAME))
    if not own_modules.attends(model):
        model.set_attn_implementation(attention)


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
        for record in _RECORDS:
            record.unbounded.append(module)
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
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    bounds = visible(bounds, causal, sliding_window)
    for record in _RECORDS:
        record.windows.append(sliding_window)
    factor = scaling if scaling is not None else query.shape[-1] ** -0.5
    features = value.shape[-1]  # fewer than those of queries where positions have some of their own (DeepSeek-V3)
    query, key, value = _of_equal_width(query, key, value)
    out = packed_attention(query[0], key[0], value[0], bounds, factor, dropout, softcap or 0.0, bias)
    return out[..., :features].transpose(0, 1)[None], None


def _of_equal_width(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with zeros behind their features, up to the widest one's; products stay what they are."""
    widest = max(each.shape[-1] for each in tensors)
    return [
        nn.functional.pad(each, (0, widest - each.shape[-1])) if each.shape[-1] < widest else each for each in tensors
    ]


def bounds_by_positions(model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Give a model bounds where it is called with one row of positions and no mask, as flattened batches are.

    With a cache, which models make by default, transformers does not look at positions: sequences would see each other.

    Raises:
        InputError: a packed batch comes with what reads its mask as one of padding, or with states of an encoder.
    """
    known = named | _by_name(model, given) if given else named
    _check_call(model, known)
    positions, tokens = known.get("position_ids"), known.get("input_ids")
    tokens = known.get("inputs_embeds") if tokens is None else tokens
    if positions is None or tokens is None or positions.dim() != 2 or positions.shape[0] != 1 or tokens.shape[0] != 1:
        return None
    if known.get("attention_mask") is not None or known.get("past_key_values") is not None:
        return None
    bounds = {"attention_mask": mask_of(bounds_of(positions[0]))}
    return ((), known | bounds) if "attention_mask" in _by_name(model, given) else (given, named | bounds)


def _by_name(model: nn.Module, given: tuple[Any, ...]) -> dict[str, Any]:
    """Return arguments that a model is given by their place."""
    places = [
        name for name, each in inspect.signature(model.forward).parameters.items()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    return dict(zip(places, given, strict=False))


def _check_call(model: nn.Module, named: dict[str, Any]) -> None:
    """Check that nothing of a packed batch is asked for that would be of something else, without a sign of it."""
    if not is_packed(named.get("attention_mask")):
        return
    for name in _OF_AN_ENCODER:
        if named.get(name) is not None:
            raise InputError(
                f"{type(model).__name__} is given packed tokens and {name}: each sequence would see those of all"
            )
    if named.get("output_router_logits"):
        raise InputError(
            f"{type(model).__name__} is given packed tokens and output_router_logits: its loss that balances experts "
            "reads attention_mask as one of padding; leave it out"
        )


def add_hooks(model: nn.Module) -> None:
    """Have a model look at positions of flattened batches, and each model within it, which may be called alone."""
    for module in model.modules():
        is_model = module is model or hasattr(module, "set_attn_implementation")
        if is_model and bounds_by_positions not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(bounds_by_positions, with_kwargs=True)


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
