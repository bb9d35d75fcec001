"""Relative biases of models: a number for each distance, in place of one for each pair of packed tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.runtime.packing.bounds import is_packed


def register_hooks(model: nn.Module) -> None:
    """Have modules that make a learned bias of pairs, as T5's, make one of distances for packed batches.

    Raises:
        InputError: a bias still changes behind the largest distance that the module names.
    """
    for module in makers_of(model):
        _check_reach(module)
        if bias_by_distances not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(bias_by_distances, with_kwargs=True)


def makers_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model that make a learned bias of pairs."""
    wanted = ("compute_bias", "relative_attention_bias", "relative_attention_max_distance")
    return [module for module in model.modules() if all(hasattr(module, name) for name in wanted)]


def bias_by_distances(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Give a module the bias of distances, which later layers get from it, where its batch is packed."""
    if not is_packed(named.get("mask")) or named.get("position_bias") is not None:
        return None
    return given, named | {"position_bias": of_distances(module)}


def of_distances(module: Any) -> Tensor:
    """Return a module's bias as if one query saw keys at all distances: (1, heads, 1, distances)."""
    reach = int(module.relative_attention_max_distance)
    device = module.relative_attention_bias.weight.device
    found: Tensor = module.compute_bias(1, 2 * reach + 1, device=device, past_seen_tokens=reach)
    return found


def _check_reach(module: Any) -> None:
    """Check that pairs that are further apart than the reach share a bucket, by the buckets that are looked up."""
    buckets: list[Tensor] = []
    noting = module.relative_attention_bias.register_forward_pre_hook(lambda _, given: buckets.append(given[0]))
    reach, far = int(module.relative_attention_max_distance), 4 * int(module.relative_attention_max_distance)
    try:
        with torch.no_grad():
            of_distances(module)
            module.compute_bias(1, 2 * far + 1, past_seen_tokens=far)
    finally:
        noting.remove()
    near, all_of_them = (each.flatten() for each in buckets)
    distance = torch.arange(-far, far + 1, device=near.device).clamp(-reach, reach)
    if not torch.equal(near[distance + reach], all_of_them):
        raise InputError(
            f"{type(module).__name__} has a relative bias that changes behind a distance of {reach}, its "
            "relative_attention_max_distance, so it cannot run packed"
        )


def table_of(module: nn.Module, bias: Tensor | None, heads: int) -> Tensor | None:
    """Return what attention was given as its bias, as (heads, distances).

    Raises:
        InputError: it is a bias of pairs.
    """
    if bias is None:
        return None
    if bias.dim() != 4 or bias.shape[:3] != (1, heads, 1) or bias.shape[3] % 2 == 0:
        raise InputError(
            f"{type(module).__name__} adds a bias of shape {list(bias.shape)} to its scores; packed attention knows "
            "those that follow from distances in a sequence, as T5's"
        )
    return bias[0, :, 0]
