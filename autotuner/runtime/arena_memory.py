"""Memory of arenas, which workspaces share that never run at the same time.

In most training loops each layer's workspace is lent until the layer's backward is over, and each has memory of its
own. Where layers run one behind the other and leave nothing, in evaluation or with checkpointing, a workspace that is
built takes memory which none of the others uses at that moment. It is never lent while one of them is.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

import torch

from autotuner.runtime.graphs import StreamOrder

LARGER = 2
"""Times what an arena needs, at most, is memory that it is built in: the larger arena cannot be in use meanwhile."""


class ArenaMemory:
    """Memory that workspaces were built on, of which one at a time may use it.

    Args:
        size_bytes: its size.
        device: where it is.
        first: the order of what the workspace uses that it was made for.

    Attributes:
        tensor: the bytes.
        order: between its uses, on whatever stream, once several workspaces are built on it; None before.
    """

    def __init__(self, size_bytes: int, device: torch.device, first: StreamOrder) -> None:
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.order: StreamOrder | None = None
        self._first, self._use = first, threading.Lock()

    def share(self) -> None:
        """Keep an order between its uses from now on, whoever has it in use."""
        if self.order is None:
            self.order = copy.copy(self._first)

    def hold(self) -> "InUse | None":
        """Return what has it in use for as long as somebody holds that, or None while it is in use."""
        return InUse(self, self._use) if self._use.acquire(blocking=False) else None


class InUse:
    """Has memory in use."""

    __slots__ = ("_use", "memory")

    def __init__(self, memory: ArenaMemory, use: threading.Lock) -> None:
        self.memory, self._use = memory, use

    def __del__(self) -> None:
        self._use.release()


class Memories:
    """Memory that workspaces have been built on, which other ones may be built on."""

    def __init__(self) -> None:
        self._made: list[ref[ArenaMemory]] = []

    def alive(self) -> list[ArenaMemory]:
        """Return the memory that there still is; it may go at any time, and in any thread."""
        found = [(each, each()) for each in self._made]
        self._made = [each for each, memory in found if memory is not None]
        return [memory for _, memory in found if memory is not None]

    def add(self, memory: ArenaMemory) -> None:
        self._made.append(ref(memory))


class _Made(threading.local):
    def __init__(self) -> None:
        self.memories = Memories()


_MADE = _Made()
"""By thread: workspaces that are built in several at the same time share nothing."""


@contextmanager
def apart(own: Memories | None = None) -> Iterator[None]:
    """Have what this thread builds inside take up no memory of what was built outside, nor the other way round.

    Args:
        own: memory that may be taken up inside, and what is made there is added to; None for none.
    """
    before, _MADE.memories = _MADE.memories, Memories() if own is None else own
    try:
        yield
    finally:
        _MADE.memories = before


def held_memory(size_bytes: int, device: torch.device, order: StreamOrder) -> InUse:
    """Return memory of a device in use: some that this thread has made, and nobody uses, or new memory.

    Args:
        order: of what is used with it.
    """
    fits = [
        memory
        for memory in _MADE.memories.alive()
        if memory.tensor.device == device and size_bytes <= memory.tensor.numel() <= LARGER * size_bytes
    ]
    for memory in sorted(fits, key=lambda each: each.tensor.numel()):
        found = memory.hold()
        if found is not None:
            memory.share()
            return found
    made = ArenaMemory(size_bytes, device, order)
    _MADE.memories.add(made)
    held = made.hold()
    assert held is not None
    return held
