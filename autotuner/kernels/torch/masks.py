"""Dropout masks from a counter-based generator in plain torch: Threefry behind a seed.

Threefry-2x32 with 13 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011). A seed of 64 bits is its
key. A mask of n elements is four parts of ceil(n / 4), the last ones shorter: counter c draws 16 bits for element c of
each part, and an element is kept where its bits are at least p.
"""

import torch
from torch import Tensor

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


def drawn_keeps(key: Tensor, counter: Tensor, p: float) -> tuple[Tensor, ...]:
    """Return, for each of the four parts of a mask, which of its elements with these counters are kept."""
    first, second = threefry_bits(key, counter)
    threshold = round(p * LEVELS)
    return tuple((bits & (LEVELS - 1)) >= threshold for bits in (first, first >> 16, second, second >> 16))


def part_length(elements: int) -> int:
    """Return the length of the parts of a mask, of which the last ones may be shorter."""
    return -(-elements // DRAWS)
