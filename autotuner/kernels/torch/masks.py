"""Decoding of stored dropout masks in plain torch: bits, and Threefry behind a seed.

Threefry-2x32 with 13 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011). A seed of 64 bits is its
key. A mask of n elements is four parts of ceil(n / 4), the last ones shorter: counter c draws 16 bits for element c of
each part, and an element is kept where its bits are at least p.
"""

from math import prod

import torch
from torch import Tensor

from autotuner.ir.form import BITS, GENERATOR_STATES, Form
from autotuner.ir.records import TensorType
from autotuner.kernels.torch.attention_masks import library_mask

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


def decoded(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    """Return a stored tensor with its declared axes: a flat mask as booleans, anything else as it is.

    Args:
        stored: what memory holds.
        form: what it is stored as.
        tensor: extents and element type of its values.
        p: of a mask; None for a tensor that is none.
    """
    if not form.is_flat:
        return stored
    if form.storage in GENERATOR_STATES:
        assert p is not None
        return library_mask(form.storage, stored, tensor.extents, p)
    shape = dict(zip(tensor.axes, tensor.extents, strict=True))
    count = prod(tensor.extents)
    if form.storage == "bit":
        line = ((stored[:, None] >> torch.arange(BITS, dtype=torch.uint8, device=stored.device)) & 1).view(-1) != 0
    else:
        assert p is not None
        counter = torch.arange(part_length(count), dtype=torch.int32, device=stored.device)
        line = torch.cat(drawn_keeps(stored.view(torch.int32), counter, p))
    order = form.layout.axes
    return line[:count].view([shape[axis] for axis in order]).permute([order.index(axis) for axis in tensor.axes])


def bits_of(keeps: Tensor) -> Tensor:
    """Return booleans, axes slowest first, as a row of bytes, the first element in the lowest bit of the first byte."""
    line = torch.zeros(-(-keeps.numel() // BITS) * BITS, dtype=torch.uint8, device=keeps.device)
    line[: keeps.numel()] = keeps.reshape(-1)
    places = torch.arange(BITS, dtype=torch.uint8, device=keeps.device)
    return (line.view(-1, BITS) << places).sum(1).to(torch.uint8)
