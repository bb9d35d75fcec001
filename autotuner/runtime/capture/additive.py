"""Masks as kernels take them: added to the scores."""

import torch
from torch import Tensor


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask that is true where a key counts adds to scores: 0, and the lowest finite number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
