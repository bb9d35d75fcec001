"""Comparison of what a layer computes with what it computes again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autotuner.errors import InputError

APART = {torch.float64: 1e-8, torch.float32: 1e-3}
"""By type, the largest difference between outputs of a layer that runs again, in parts of the largest output."""
APART_ROUNDED = 5e-2


def tensors_of(nested: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, nested)
    return found


def check_equal(name: str, first: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """Check that a layer that runs again computes the same.

    Raises:
        InputError: it does not.
    """
    for before, after in zip((each.detach() for each in first), (each.detach() for each in again), strict=True):
        if not before.is_floating_point() or not before.numel():
            continue
        largest = float(before.abs().max())
        apart = float((before - after).abs().max())
        if apart > APART.get(before.dtype, APART_ROUNDED) * largest:
            raise InputError(
                f"{name} computes other values when it runs again, {apart:.3g} apart of at most {largest:.3g}: it "
                "keeps something between calls, or draws random numbers that torch does not know of, and layer to "
                "layer runs each layer twice a step"
            )
