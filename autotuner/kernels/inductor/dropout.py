"""Dropout masks from the counter-based generator of `masks`, compiled by Inductor, and the seeds of such masks.

The 64-bit key comes from torch's generator, so that `manual_seed` reproduces a mask; an element's place is the counter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.inductor.fused import compiled_for
from autotuner.kernels.torch.elementwise import in_memory_order
from autotuner.kernels.torch.masks import drawn_keeps, part_length


def threefry(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Keep an element where its 16 random bits are at least p; p is met to 2**-17, the scale stays that of p."""
    p = float(dict(call.subgraph.nodes[0].attributes)["p"])
    kept = in_memory_order(outputs[0])[0].view(-1)
    words = torch.empty(1, dtype=torch.int64, device=kept.device)
    key, lowest = words.view(torch.int32), torch.iinfo(torch.int64).min
    count = part_length(kept.numel())
    scale = 1 / (1 - p)

    def body(key: Tensor, out: Tensor) -> tuple[()]:
        for place, keeps in enumerate(drawn_keeps(key, torch.arange(count, dtype=torch.int32, device=key.device), p)):
            part = out[place * count : (place + 1) * count]
            part.copy_((keeps if part.dtype == torch.bool else torch.where(keeps, scale, 0.0))[: part.numel()])
        return ()

    compiled = compiled_for(call.key, body, (key, kept))

    def run() -> None:
        words.random_(lowest, None)
        compiled([key, kept])

    return run


def seed(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Draw the key alone; conversions make the mask that `threefry` would have made from it."""
    (key,), lowest = outputs, torch.iinfo(torch.int64).min
    return lambda: key.random_(lowest, None)
