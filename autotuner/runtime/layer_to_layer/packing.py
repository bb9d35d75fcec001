"""Tensors of one layer behind each other in one buffer, so that one copy moves all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED_BYTES = 256
"""Each tensor begins at a multiple of this, as torch's CUDA allocator has it."""


@dataclass(frozen=True)
class Packing:
    """Places of tensors in a buffer of bytes.

    Args:
        shapes: of each tensor.
        dtypes: of each tensor in the buffer.
        offsets: in bytes.
        total_bytes: of the buffer.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    total_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> "Packing":
        """Return places for tensors, contiguous, in these types."""
        offsets, end = [], 0
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            offsets.append(end)
            end += -(-tensor.numel() * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        return cls(tuple(tensor.shape for tensor in tensors), tuple(dtypes), tuple(offsets), end)

    def apart(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer on the host, each with a storage of its own, so that each can be saved."""
        whole = buffer.numpy()
        return [
            torch.frombuffer(whole[offset : offset + shape.numel() * dtype.itemsize], dtype=dtype).view(shape)
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        ]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer.

        Args:
            buffer: bytes, at least `total_bytes` of them.
        """
        return [
            buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        ]
