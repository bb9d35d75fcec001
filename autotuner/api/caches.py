"""Keys and values that models of transformers return for a cache, unless they are told not to."""

from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch


def without_cache(model: Any) -> dict[str, bool]:
    """Return what tells a model not to return keys and values, where its configuration has it do so."""
    own = getattr(model, "_orig_mod", model)
    is_on = getattr(getattr(own, "config", None), "use_cache", None) is True
    return {"use_cache": False} if is_on and "use_cache" in signature(own.forward).parameters else {}


def both_ways(model: Any, batches: Iterable[Any], device_type: str) -> Iterator[Any]:
    """Return batches, and each of them once more for a call without a cache where that makes another region.

    `Trainer` and `training_step` call a model so, loops of one's own as it is. Under autocast, keys and values that are
    returned are not what attention reads: that is cast. Otherwise a region shows them, and is the same.
    """
    for batch in batches:
        yield batch
        told = without_cache(model) if isinstance(batch, Mapping) and torch.is_autocast_enabled(device_type) else {}
        if told and "use_cache" not in batch:
            yield {**batch, **told}
