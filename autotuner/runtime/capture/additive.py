"""Masks as kernels take them: added to the scores, and ones and zeros for queries."""

from collections.abc import Sequence

import torch
from torch import Tensor

HIDES = -30_000.0
"""Added to the scores of a key that no query sees, beside a causal mask or a window. A query that sees none has such
scores alone.

Its result is zeros, by `seeing`, but all of its numbers have to be finite: backward computes weights from scores and
their log-sum-exp, whose difference is rounded to anything near the lowest number of a type. The weight is 0 in each
type unless a score is 29,000 above all that are seen.
"""


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask that is true where a key counts adds to scores: 0, and the lowest finite number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def finite(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask without what is no finite number of a type: the lowest one stands for it."""
    return mask.clamp_min(torch.finfo(dtype).min)


Layout = tuple[list[int], list[int], list[int]]
"""Steps from a tensor to a mask: split into axes of these extents, in this order, and then of this shape."""


def added_to_scores(mask: Tensor, layout: Layout, given_as: str, written_out: bool, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to scores, as finite numbers; 0 where a query sees no key.

    Args:
        mask: boolean, or additive.
        layout: as a mask; the last dimension is that of keys.
        given_as: the type in which attention reads it.
        written_out: -inf where a query sees no key: the softmax of such a row is NaN.
        dtype: of the result.
    """
    mask = _laid_out(mask, layout)
    hidden = _hidden(mask, given_as, dtype)
    added = additive(~hidden, dtype) if mask.dtype == torch.bool else finite(mask.to(dtype), dtype)
    return added.masked_fill(hidden.all(-1, keepdim=True), -torch.inf if written_out else 0.0)


def added_in_band(mask: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to scores in a band: `HIDES` where it hides a key from all queries, or 0.

    Args:
        mask: boolean; it hides what is outside of a band, and some keys.
        layout: as a mask; the last dimensions are those of queries and keys.
        dtype: of the result, which has no queries.
    """
    shows = _laid_out(mask, layout).diagonal(dim1=-2, dim2=-1)  # each key, as the query in its place sees it
    return torch.zeros_like(shows, dtype=dtype).masked_fill(~shows, HIDES)


def seeing(mask: Tensor, layout: Layout, given_as: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return 1 for each query that sees a key, and 0 for others; `shape` is of the result."""
    hidden = _hidden(_laid_out(mask, layout), given_as, dtype)
    return (~hidden.all(-1)).to(dtype).expand(shape).contiguous()


def total(
    one: Tensor, other: Tensor, of_one: Layout, of_other: Layout, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the sum of two masks whose layouts broadcast."""
    return (_laid_out(one, of_one).to(dtype) + _laid_out(other, of_other).to(dtype)).reshape(shape)


def _laid_out(mask: Tensor, layout: Layout) -> Tensor:
    axes, order, shape = layout
    return mask.reshape(axes).permute(order).reshape(shape)


def _hidden(mask: Tensor, given_as: str, dtype: torch.dtype) -> Tensor:
    """Return where a mask hides a key; what is no finite number in the type of attention is as low as -inf."""
    return ~mask if mask.dtype == torch.bool else mask.to(getattr(torch, given_as)).to(dtype) == -torch.inf
