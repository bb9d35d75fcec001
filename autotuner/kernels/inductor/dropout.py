"""Dropout masks from the counter-based generator of `masks`, compiled by Inductor, and the seeds of such masks.

The 64-bit key comes from torch's generator, so that `manual_seed` reproduces a mask; an element's place is the counter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.inductor.conversion import drawn


def threefry(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Keep an element where its 16 random bits are at least p; p is met to 2**-17, the scale stays that of p."""
    (mask,), lowest = outputs, torch.iinfo(torch.int64).min
    words = torch.empty(1, dtype=torch.int64, device=mask.device)
    draw = drawn(call, words.view(torch.int32), mask)

    def run() -> None:
        words.random_(lowest, None)
        draw()

    return run


def seed(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Draw the key alone; conversions make the mask that `threefry` would have made from it."""
    (key,), lowest = outputs, torch.iinfo(torch.int64).min
    return lambda: key.random_(lowest, None)
