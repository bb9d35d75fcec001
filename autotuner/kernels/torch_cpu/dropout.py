"""Threefry-2x32 with 13 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011), compiled by Inductor.

The 64-bit key comes from torch's generator, so that `manual_seed` reproduces a mask; an element's place is the counter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.kernels.torch_cpu.elementwise import in_memory_order
from autotuner.kernels.torch_cpu.fused import compiled_for
from autotuner.records import Call

ROUNDS = 13
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
LEVELS = 1 << 16
DRAWS = 4  # 16-bit numbers that one counter yields


def threefry_bits(key: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 32-bit random words for each counter.

    Args:
        key: two int32.
        counter: n int32; the counter's other word is 0.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    first, second = counter + keys[0], torch.zeros_like(counter) + keys[1]
    for turn in range(ROUNDS):
        first = first + second
        left = ROTATIONS[turn % 8]
        second = ((second << left) | ((second >> (32 - left)) & ((1 << left) - 1))) ^ first
        if turn % 4 == 3:
            injected = turn // 4 + 1
            first = first + keys[injected % 3]
            second = second + keys[(injected + 1) % 3] + injected
    return first, second


def threefry(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Keep an element where its 16 random bits are at least p; p is met to 2**-17, the scale stays that of p."""
    p = float(dict(call.subgraph.nodes[0].attributes)["p"])
    kept = in_memory_order(outputs[0])[0].view(-1)
    words = torch.empty(1, dtype=torch.int64)
    key, lowest = words.view(torch.int32), torch.iinfo(torch.int64).min
    count = (kept.numel() + DRAWS - 1) // DRAWS
    threshold, scale = round(p * LEVELS), 1 / (1 - p)

    def body(key: Tensor, out: Tensor) -> tuple[()]:
        first, second = threefry_bits(key, torch.arange(count, dtype=torch.int32))
        for place, bits in enumerate((first, first >> 16, second, second >> 16)):
            part = out[place * count : (place + 1) * count]
            part.copy_(torch.where((bits & (LEVELS - 1)) >= threshold, scale, 0.0)[: part.numel()])
        return ()

    compiled = compiled_for(call.key, body, (key, kept))

    def run() -> None:
        words.random_(lowest, None)
        compiled([key, kept])

    return run
