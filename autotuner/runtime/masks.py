"""Attention masks of the frameworks -> the graph's additive mask over keys, (b, l)."""

import torch
from torch import Tensor

from autotuner.runtime.reason import Reason


def additive_key_mask(
    mask: Tensor, expected: tuple[tuple[int, int], torch.dtype] | None, *, keeps: bool
) -> Tensor | Reason:
    """Return what is added to the scores of each key, or the reason why a mask is not one over keys.

    Keys that do not count get the lowest finite number: next to any key that counts, their weight is 0, as with -inf.
    A sequence in which no key counts is refused, since frameworks differ in what they make of it.

    Args:
        mask: (b, l), or with `keeps` (b, 1, 1 or more, l) with equal rows; boolean, or floating point and additive.
        expected: batch and sequence extents and dtype of a configuration with a mask, None for one without.
        keeps: a boolean mask is true where a key counts, rather than where it does not.
    """
    if expected is None:
        return Reason("mask", "a mask is given, and the configuration was tuned without one")
    shape, dtype = expected
    if mask.requires_grad:
        return Reason("mask", "the mask wants a gradient, and the configuration has none for it")
    if keeps and mask.dim() == 4 and mask.shape[1] == 1:
        rows = mask[:, 0]
        if rows.shape[1] > 1 and rows.stride(1) != 0 and not bool((rows == rows[:, :1]).all()):
            return Reason("mask", "the mask differs between queries, and the configuration was tuned for one over keys")
        mask = rows[:, 0].expand(shape[0], -1) if len(rows) == 1 else rows[:, 0]
    elif keeps:
        return Reason(
            "mask", f"the mask has shape {tuple(mask.shape)}, and one over keys is (b, 1, 1, l) or (b, 1, l, l)"
        )
    if tuple(mask.shape) != shape:
        return Reason(
            "mask",
            f"the mask has shape {tuple(mask.shape)}, and the configuration was tuned for one over keys, {shape}",
        )
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        counts = mask if keeps else ~mask
        added = torch.zeros(shape, dtype=dtype).masked_fill_(~mask if keeps else mask, lowest)
    elif mask.is_floating_point():
        added = mask.to(dtype).clamp_min(lowest)
        counts = added > lowest
    else:
        return Reason("mask", f"the mask is of {mask.dtype}; a boolean or a floating point one is expected")
    if not bool(counts.any(1).all()):
        return Reason("mask", "a sequence has no key that counts")
    return added
