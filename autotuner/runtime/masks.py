"""Attention masks of the frameworks -> the graph's additive mask over keys, (b, l).

Three questions depend on a mask's values: does it mask anything, is it the same for all queries, and has every sequence
a key. On the CPU they are answered for every call. Where calls are queued, an answer makes the host wait for the
device, so it is read only where it is needed, once for all layers of a model. A mask that the same module gets a second
time is read anew, since memory can change unnoticed. While a graph is captured nothing can be read: the graph asserts
on the device, in every replay, the answer that the plan relies on.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autotuner.runtime.devices import device_runtime
from autotuner.runtime.fallbacks import Reason, warn

NOT_TUNED = "a mask is given that masks something, and the configuration was tuned without one"
DIFFERS = "the mask differs between queries, and the configuration was tuned for one over keys"
ALL_PADDING = "a sequence is all padding: it has no key that counts"


def additive_key_mask(
    mask: Tensor, keys: tuple[int, int], dtype: torch.dtype | None, *, keeps: bool, asker: object
) -> Tensor | Reason | None:
    """Return what is added to the scores of each key, None for nothing, or the reason why a mask is not one over keys.

    Keys that do not count get the lowest finite number: next to any key that counts, their weight is 0, as with -inf.
    A mask that leaves a sequence no key is refused: torch's attention makes zeros of it, the softmax of a model that is
    written out makes means or NaN, and no configuration makes any of them.

    Args:
        mask: (b, l), or with `keeps` 4 dimensions that broadcast to (b, heads, queries, l); boolean, or floating point
            and additive.
        keys: batch and sequence extents.
        dtype: of the mask that the configuration takes; None where it was tuned without one: then only a mask that
            masks nothing is covered.
        keeps: a boolean mask is true where a key counts, rather than where it does not.
        asker: who is given the mask.
    """
    if mask.requires_grad:
        return Reason("mask", "the mask wants a gradient, and the configuration has none for it")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return Reason("mask", f"the mask is of {mask.dtype}; a boolean or a floating point one is expected")
    if keeps:
        fits = mask.dim() == 4 and all(n in (1, m) for n, m in zip((mask.shape[0], mask.shape[3]), keys, strict=True))
    else:
        fits = tuple(mask.shape) == keys
    if not fits:
        wanted = "(b, 1, 1, l) or (b, 1, l, l)" if keeps else "(b, l)"
        return Reason(
            "mask", f"the mask has shape {tuple(mask.shape)}, and one over keys is {wanted} with (b, l) = {keys}"
        )
    distinct = _distinct(mask)
    facts = _Facts(mask, distinct, keeps, dtype)
    if dtype is None or (mask.is_cpu and facts.masks_nothing()):
        return None if facts.masks_nothing(asker) else Reason("mask", NOT_TUNED)
    if distinct.dim() == 4:
        if (distinct.shape[1] > 1 or distinct.shape[2] > 1) and not facts.rows_are_equal(asker):
            return None if facts.masks_nothing(asker) else Reason("mask", DIFFERS)
        distinct = distinct[:, 0, 0]
    if not facts.leaves_keys(asker):
        return Reason("padding", ALL_PADDING)
    over_keys = distinct.expand(keys)
    lowest = torch.finfo(dtype).min
    if mask.dtype != torch.bool:
        return over_keys.to(dtype).clamp_min(lowest)
    counts = over_keys if keeps else ~over_keys
    return torch.zeros(keys, dtype=dtype, device=mask.device).masked_fill_(~counts, lowest)


def _distinct(mask: Tensor) -> Tensor:
    """Return a mask without its repetitions: dimensions that were expanded have one element."""
    for dim, (extent, step) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if extent > 1 and step == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


class _Facts:
    """Answers that depend on a mask's values."""

    def __init__(self, mask: Tensor, distinct: Tensor, keeps: bool, dtype: torch.dtype | None) -> None:
        self._mask, self._distinct, self._keeps, self._dtype = mask, distinct, keeps, dtype

    def masks_nothing(self, asker: object = None) -> bool:
        return self._answer("masks nothing", asker)

    def rows_are_equal(self, asker: object) -> bool:
        return self._answer("rows are equal", asker)

    def leaves_keys(self, asker: object) -> bool:
        return self._answer("leaves keys", asker)

    def _computed(self, question: str) -> Tensor:
        mask = self._distinct
        if question == "leaves keys":
            if mask.dtype == torch.bool:
                counts = mask if self._keeps else ~mask
            else:
                dtype = self._dtype or mask.dtype
                counts = mask.to(dtype) > torch.finfo(dtype).min
            return counts.any(-1).all()
        if question == "rows are equal":
            return (mask == mask[:, :1, :1]).all()
        if mask.dtype == torch.bool:
            return mask.all() if self._keeps else ~mask.any()
        return (mask == 0).all()

    def _answer(self, question: str, asker: object) -> bool:
        mask = self._mask
        runtime = device_runtime(mask.device)
        if not runtime.has_graphs:
            return bool(self._computed(question))
        if runtime.is_capturing():
            return self._asserted(question)
        if mask.is_inference():  # it has no version, by which to know it again
            return bool(self._computed(question))
        known: _Known | None = _KNOWN.get(mask)
        if known is None or known.version != mask._version or not known.is_news_to(asker, question):
            known = _KNOWN[mask] = _Known(mask._version)
            known.is_news_to(asker, question)
        if question not in known.answers:
            known.answers[question] = bool(self._computed(question))
        return known.answers[question]

    def _asserted(self, question: str) -> bool:
        """Have the graph that is captured assert an answer, unless the other one is known from before."""
        known: _Known | None = None if self._mask.is_inference() else _KNOWN.get(self._mask)
        if known is not None and known.version == self._mask._version and not known.answers.get(question, True):
            return False
        if question == "masks nothing":
            _warn_of_assertions()
        torch._assert_async(self._computed(question), f"autotuner: {_BROKEN[question]}")
        return True


_BROKEN = {"masks nothing": NOT_TUNED, "rows are equal": DIFFERS, "leaves keys": ALL_PADDING}


class _Known:
    """Answers that are known of a mask on a device that calls are queued on, and those who have asked."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.answers: dict[str, bool] = {}
        self._askers: set[tuple[int, str]] = set()

    def is_news_to(self, asker: object, question: str) -> bool:
        """Say whether somebody asks this for the first time, and note it."""
        key = (id(asker), question)
        if key in self._askers:
            return False
        self._askers.add(key)
        return True


_KNOWN: Any = WeakIdKeyDictionary()
_warned = False


def _warn_of_assertions() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn(
            "a tuned layer is given a mask while a CUDA graph is captured, in which it cannot be read: the graph "
            "asserts that it masks nothing, and a batch with padding stops the program. For such batches, give apply a "
            "configuration tuned with attention_mask=true as well"
        )
