"""Peaks of a process on a CUDA device, whoever sets torch's own figures back meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Peaks:
    """The most bytes that were allocated, and that the allocator had reserved, since this was made.

    Attributes:
        allocated_bytes, reserved_bytes: as of the last `look`.
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0

    def look(self) -> None:
        """Take torch's figures in."""
        self.allocated_bytes = max(self.allocated_bytes, torch.cuda.max_memory_allocated())
        self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved())


@contextmanager
def peaks() -> Iterator[Peaks]:
    """Yield the peaks of what runs inside; they are known behind it."""
    found, reset = Peaks(), torch.cuda.reset_peak_memory_stats

    def look_and_reset(device: Any = None) -> None:
        found.look()
        reset(device)

    reset()
    torch.cuda.reset_peak_memory_stats = look_and_reset
    try:
        yield found
    finally:
        torch.cuda.reset_peak_memory_stats = reset
        found.look()
