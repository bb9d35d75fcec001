"""Attention masks of the frameworks -> the graph's additive mask over keys, (b, l)."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autotuner.runtime.reason import Reason

MaskShape = tuple[tuple[int, int], torch.dtype]
"""Batch and sequence extents of a mask over keys, and its dtype."""


def additive_key_mask(mask: Tensor, expected: MaskShape | None, *, keeps: bool) -> Tensor | Reason:
    """Return what is added to the scores of each key, or the reason why a mask is not one over keys.

    Keys that do not count get the lowest finite number: next to any key that counts, their weight is 0, as with -inf.
    A sequence in which no key counts is refused, since frameworks differ in what they make of it. On CUDA nobody looks:
    reading an answer from the device would make every call wait for it. There, such a sequence weighs all keys alike.

    Rows that lie apart in memory must be compared, or a causal mask would pass for one over keys. On CUDA that waits
    for the device, once per mask and not once per layer; a mask of shape (b, 1, 1, l), or one that was expanded from
    it, needs no comparison.

    Args:
        mask: (b, l), or with `keeps` (b, 1, 1 or more, l) with equal rows; boolean, or floating point and additive.
        expected: of a configuration with a mask, None for one without.
        keeps: a boolean mask is true where a key counts, rather than where it does not.
    """
    if expected is None:
        return Reason("mask", "a mask is given, and the configuration was tuned without one")
    shape, dtype = expected
    if mask.requires_grad:
        return Reason("mask", "the mask wants a gradient, and the configuration has none for it")
    if keeps and mask.dim() == 4 and mask.shape[1] == 1:
        rows = mask[:, 0]
        if rows.shape[1] > 1 and rows.stride(1) != 0:
            if mask.is_cuda and torch.cuda.is_current_stream_capturing() and not _is_known(mask):
                return Reason(
                    "mask",
                    "a graph is being captured, in which the rows of a mask cannot be compared; give (b, 1, 1, l)",
                )
            if not _rows_are_equal(mask, rows):
                return Reason(
                    "mask", "the mask differs between queries, and the configuration was tuned for one over keys"
                )
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
        added = torch.zeros(shape, dtype=dtype, device=mask.device).masked_fill_(~mask if keeps else mask, lowest)
    elif mask.is_floating_point():
        added = mask.to(dtype).clamp_min(lowest)
        counts = added > lowest
    else:
        return Reason("mask", f"the mask is of {mask.dtype}; a boolean or a floating point one is expected")
    if mask.is_cpu and not bool(counts.any(1).all()):
        return Reason("mask", "a sequence has no key that counts")
    return added


_COMPARED: Any = WeakIdKeyDictionary()  # masks on CUDA: their version, and whether their rows are equal


def _is_known(mask: Tensor) -> bool:
    return not mask.is_inference() and mask in _COMPARED and _COMPARED[mask][0] == mask._version


def _rows_are_equal(mask: Tensor, rows: Tensor) -> bool:
    """Compare the rows of a mask; those of one on CUDA once for as long as nobody changes it."""
    if _is_known(mask):
        return bool(_COMPARED[mask][1])
    equal = bool((rows == rows[:, :1]).all())
    if mask.is_cuda and not mask.is_inference():
        _COMPARED[mask] = (mask._version, equal)
    return equal
