"""Bounds of packed tokens: which other tokens each of them sees."""

import torch
from torch import Tensor


def bounds_of(positions: Tensor) -> Tensor:
    """Return the first token of each token's sequence, and the one behind its last.

    Nothing waits for the device, and shapes follow from shapes alone.

    Args:
        positions: (tokens,), in the sequence: a sequence begins wherever one is not that of the token before, plus 1.

    Returns:
        (tokens, 2) of int32, on the same device.

    >>> bounds_of(torch.tensor([0, 1, 2, 0, 1])).tolist()
    [[0, 3], [0, 3], [0, 3], [3, 5], [3, 5]]
    """
    count = positions.shape[0]
    place = torch.arange(count, dtype=torch.int32, device=positions.device)
    begins = torch.ones(count, dtype=torch.bool, device=positions.device)
    begins[1:] = positions[1:] != positions[:-1] + 1
    start = torch.where(begins, place, 0).cummax(0).values
    ends = torch.ones_like(begins)
    ends[:-1] = begins[1:]
    end = torch.where(ends, place + 1, count).flip(0).cummin(0).values.flip(0)
    return torch.stack((start, end), 1).to(torch.int32)


def narrowed(bounds: Tensor, before: int | None, behind: int | None) -> Tensor:
    """Return bounds in which a token sees no more than so many tokens before it, and behind it; None for all.

    >>> narrowed(torch.tensor([[0, 3], [0, 3], [0, 3]]), before=1, behind=0).tolist()
    [[0, 1], [0, 2], [1, 3]]
    """
    place = torch.arange(bounds.shape[0], dtype=bounds.dtype, device=bounds.device)
    start, end = bounds.unbind(1)
    if before is not None:
        start = torch.maximum(start, place - before)
    if behind is not None:
        end = torch.minimum(end, place + behind + 1)
    return torch.stack((start, end), 1)


def visible(bounds: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return bounds in which no token sees one behind it, or further than a window, where that is asked for.

    Args:
        window: so many tokens are seen at most, the own one among them; to both sides where it is not causal.

    >>> visible(torch.tensor([[0, 3], [0, 3], [0, 3]]), causal=True, window=2).tolist()
    [[0, 1], [0, 2], [1, 3]]
    """
    reach = None if window is None else window - 1
    behind = 0 if causal else reach
    return bounds if reach is None and behind is None else narrowed(bounds, reach, behind)


def seers_of(bounds: Tensor) -> Tensor:
    """Return for each token the first row that sees it, and the one behind the last; bounds do not decrease.

    >>> seers_of(torch.tensor([[0, 1], [0, 2], [0, 3], [3, 4]], dtype=torch.int32)).tolist()
    [[0, 3], [1, 3], [2, 3], [3, 4]]
    """
    place = torch.arange(bounds.shape[0], dtype=bounds.dtype, device=bounds.device)
    start, end = (each.contiguous() for each in bounds.unbind(1))
    first = torch.searchsorted(end, place, right=True)
    last = torch.searchsorted(start, place, right=True)
    return torch.stack((first, last), 1).to(torch.int32)


def mask_of(bounds: Tensor) -> Tensor:
    """Return bounds, (tokens, 2), as a mask of four dimensions, which models of transformers hand on as it is."""
    return bounds[None, None]


def is_packed(mask: Tensor | None) -> bool:
    """Tell whether a mask is one of bounds."""
    return mask is not None and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 2
