"""Encoding and decoding of storage formats in plain torch: the reference of every format in `autotuner.ir.formats`.

An encoder is (values, form, tensor, p, seed) -> stored, a decoder (stored, form, tensor, p) -> values. Values have the
tensor's declared axes; a dropout mask is booleans, true where an element is kept, or raw.
"""

from math import prod

import torch
from torch import Tensor

from autotuner.ir.form import Form
from autotuner.ir.formats import BITS, GROUP, LARGEST, SCALE_BYTES
from autotuner.ir.records import Subgraph, TensorType
from autotuner.kernels.registry import load
from autotuner.kernels.torch.masks import drawn_keeps, part_length

SEED_DIGITS = 15
SMALLEST = 2.0**-96
"""The largest element of what shares a scale, below which all of it is stored as zeros: 1 over the scale may be no
float32."""


def encoded(values: Tensor, form: Form, tensor: TensorType, p: float | None = None, seed: int = 0) -> Tensor:
    """Return what memory holds of values in a form.

    Args:
        values: axes in declared order.
        form: what to store them as.
        tensor: extents and element type of the values.
        p: of a mask; None for a tensor that is none.
        seed: what a format that is generated holds, whatever the values are.
    """
    found: Tensor = load(form.format.encode)(values, form, tensor, p, seed)
    return found


def decoded(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    """Return a stored tensor with its declared axes: a mask as booleans where it is not raw.

    Args:
        stored: what memory holds.
        form: what it is stored as.
        tensor: extents and element type of its values.
        p: of a mask; None for a tensor that is none.
    """
    found: Tensor = load(form.format.decode)(stored, form, tensor, p)
    return found


def made_up_seed(subgraph: Subgraph, number: int) -> int:
    """Return the seed of a tensor of a subgraph that is made up for measuring."""
    return int(subgraph.signature[SEED_DIGITS : 2 * SEED_DIGITS], 16) + number


def to_raw(values: Tensor, form: Form, tensor: TensorType, p: float | None, seed: int) -> Tensor:
    """Return values as they are, and of a mask what an element is multiplied by."""
    return values if p is None else values.to(getattr(torch, tensor.dtype)) * (1 / (1 - p))


def to_bytes(values: Tensor, form: Form, tensor: TensorType, p: float | None, seed: int) -> Tensor:
    return values if values.dtype == torch.bool else values > 0


def as_it_is(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    return stored


def to_bits(values: Tensor, form: Form, tensor: TensorType, p: float | None, seed: int) -> Tensor:
    """Return booleans as a row of bytes, in memory order, the first element in the lowest bit of the first byte."""
    keeps = values.permute([tensor.axes.index(axis) for axis in form.layout.axes])
    line = torch.zeros(-(-keeps.numel() // BITS) * BITS, dtype=torch.uint8, device=keeps.device)
    line[: keeps.numel()] = keeps.reshape(-1)
    places = torch.arange(BITS, dtype=torch.uint8, device=keeps.device)
    return (line.view(-1, BITS) << places).sum(1).to(torch.uint8)


def from_bits(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    line = ((stored[:, None] >> torch.arange(BITS, dtype=torch.uint8, device=stored.device)) & 1).view(-1) != 0
    return _in_declared_order(line, form, tensor)


def to_signs(values: Tensor, form: Form, tensor: TensorType, p: float | None, seed: int) -> Tensor:
    """Return which elements are above 0, or no number, as bits in the same places."""
    line = values.permute([tensor.axes.index(axis) for axis in form.layout.axes]).reshape(-1)
    ones = torch.nn.functional.pad(torch.where(line <= 0, 0.0, 1.0), (0, -line.numel() % BITS))
    weights = 2.0 ** torch.arange(BITS, device=values.device)  # floats compile to vectors, integers do not
    return (ones.view(-1, BITS) * weights).sum(1).to(torch.uint8)


def from_signs(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    """Return 1 where an element was above 0, and 0 elsewhere."""
    places = torch.arange(BITS, dtype=torch.int32, device=stored.device)
    line = ((stored[:, None] >> places) & 1).view(-1)
    return _in_declared_order(line, form, tensor).to(getattr(torch, tensor.dtype))


def to_int8(values: Tensor, form: Form, tensor: TensorType, p: float | None, seed: int) -> Tensor:
    """Return 8-bit integers in memory order, whole groups of them, and behind these the groups' scales in float32."""
    line = values.permute([tensor.axes.index(axis) for axis in form.layout.axes]).reshape(-1)
    groups = torch.nn.functional.pad(line, (0, -line.numel() % GROUP)).view(-1, GROUP)
    numbers, scales = quantized(groups if groups.dtype == torch.float64 else groups.float())
    return torch.cat((numbers.view(torch.uint8).view(-1), scales.view(torch.uint8)))


def quantized(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as 8-bit integers, rounded to nearest, and what 1 stands for in each row, in float32.

    A row with an infinity or NaN has that as its scale, so that what is decoded of it is no number either.
    """
    largest = groups.abs().amax(1)
    factors = torch.where(largest >= SMALLEST, LARGEST / largest, 0.0)
    numbers = (groups * factors[:, None]).round().clamp(-LARGEST, LARGEST)
    return numbers.to(torch.int8), torch.where(largest < SMALLEST, 0.0, largest / LARGEST).float()


def from_int8(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    numbers, scales = split_int8(stored)
    return _in_declared_order((numbers * scales[:, None]).view(-1), form, tensor).to(getattr(torch, tensor.dtype))


def split_int8(stored: Tensor) -> tuple[Tensor, Tensor]:
    """View what memory holds as rows of 8-bit integers and the scale of each row."""
    count = len(stored) // (GROUP + SCALE_BYTES)
    numbers, scales = stored[: count * GROUP], stored[count * GROUP :]
    return numbers.view(torch.int8).view(count, GROUP), scales.view(torch.float32)


def made_up(values: Tensor, form: Form, tensor: TensorType, p: float | None, seed: int) -> Tensor:
    """Return the state of a generator: the seed, and an offset of 0 where the format has one."""
    length = form.stored(tensor.dtype, tensor.axes, tensor.extents).length
    return torch.tensor([seed, 0][:length], device=values.device)


def from_seed(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    """Draw the mask of a seed: see `autotuner.kernels.torch.masks`."""
    assert p is not None
    count = part_length(prod(tensor.extents))
    counter = torch.arange(count, dtype=torch.int32, device=stored.device)
    return _in_declared_order(torch.cat(drawn_keeps(stored.view(torch.int32), counter, p)), form, tensor)


def _in_declared_order(line: Tensor, form: Form, tensor: TensorType) -> Tensor:
    """View a row of elements in memory order, and perhaps some over, with a tensor's declared axes."""
    shape, order = dict(zip(tensor.axes, tensor.extents, strict=True)), form.layout.axes
    elements = line[: prod(tensor.extents)].view([shape[axis] for axis in order])
    return elements.permute([order.index(axis) for axis in tensor.axes])
