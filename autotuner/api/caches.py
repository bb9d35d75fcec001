"""Outputs of transformers' models beside the loss: keys and values for a cache, and what hooks record."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch.torch_version import TorchVersion

CUTS_AT_COPIES = TorchVersion(torch.__version__) < "2.13"
"""Dynamo cuts a graph where a model copies its configuration: in torch 2.11, not in 2.13; 2.12 was not tried."""


def without_cache(model: Any) -> dict[str, bool]:
    """Return what tells a model not to return keys and values, where its configuration has it do so."""
    own = getattr(model, "_orig_mod", model)
    is_on = getattr(getattr(own, "config", None), "use_cache", None) is True
    return {"use_cache": False} if is_on and "use_cache" in signature(own.forward).parameters else {}


def both_ways(model: Any, batches: Iterable[Any], device_type: str) -> Iterator[Any]:
    """Return batches, and each of them once more for a call without a cache where that makes another region.

    `Trainer` and `training_step` call a model so, loops of one's own as it is. Under autocast, keys and values that are
    returned are not what attention reads: that is cast. An encoder with a decoder copies its configuration for a cache
    of two parts, where dynamo of an older torch cuts the graph. Otherwise a region shows them, and is the same.
    """
    config = getattr(getattr(model, "_orig_mod", model), "config", None)
    is_cut = CUTS_AT_COPIES and getattr(config, "is_encoder_decoder", False) is True
    differs = torch.is_autocast_enabled(device_type) or is_cut
    for batch in batches:
        yield batch
        told = without_cache(model) if isinstance(batch, Mapping) and differs else {}
        if told and "use_cache" not in batch:
            yield {**batch, **told}


def hook_recorders(model: Any) -> None:
    """Have a model of transformers install the hooks that record what its configuration says it returns beside.

    With `output_router_logits=True`, say, it would do so in its first call, under a lock, where dynamo cuts the graph,
    and the head would be apart from its loss.
    """
    install: Any = getattr(
        sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None
    )
    own = getattr(model, "_orig_mod", model)
    for module in own.modules() if install is not None else ():
        kinds = getattr(module, "_can_record_outputs", None) or {}
        config = getattr(module, "config", None)
        if any(getattr(config, f"output_{kind}", False) for kind in kinds) and _records(type(module).forward):
            install(module)


def _records(forward: Any) -> bool:
    """Say whether a function, or one that it wraps, installs hooks in its first call."""
    while forward is not None:
        if "maybe_install_capturing_hooks" in getattr(getattr(forward, "__code__", None), "co_names", ()):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
