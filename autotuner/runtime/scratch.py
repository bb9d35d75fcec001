"""Scratch: memory for what one phase makes and reads itself, shared by workspaces that run one after the other.

All workspaces of a device that queues calls share one, unless whoever has them run says otherwise.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.graphs import StreamOrder, TemporaryMemory


class Scratch:
    """Memory that each workspace that shares it writes in its turn, and leaves nothing in.

    Threads queue their phases one after the other, and a change of streams between them is put in order.

    Attributes:
        is_open: whether workspaces that share it are taken up again.
        is_of_one_step: whether each of these is for one forward and its backward, and gives its memory back then.
        of_graphs: what graphs of these workspaces make and read themselves.
    """

    def __init__(self, *, is_of_one_step: bool = False) -> None:
        self.is_open, self.is_of_one_step = True, is_of_one_step
        self._memory: dict[torch.device, Tensor] = {}
        self._order, self.of_graphs = StreamOrder(), TemporaryMemory()
        self._queueing = threading.RLock()

    def memory(self, size_bytes: int, device: torch.device) -> Tensor:
        """Return so many bytes; workspaces that were given fewer keep theirs."""
        found = self._memory.get(device)
        if found is None or found.numel() < size_bytes:
            found = self._memory[device] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return found[:size_bytes]

    def close(self) -> None:
        """Have no workspace taken up again that shares this; those that run do so to their end."""
        self.is_open = False

    @contextmanager
    def turn(self, runtime: DeviceRuntime) -> Iterator[None]:
        """Queue a phase behind what the workspace before has queued, on whatever stream, and before any other."""
        with self._queueing:
            self._order.turn(runtime, self._memory.values())
            yield


class _Sharing(threading.local):
    scratch: Scratch | None = None


_SHARING = _Sharing()


@contextmanager
def sharing(scratch: Scratch) -> Iterator[None]:
    """Have workspaces that this thread makes or takes up inside share this scratch."""
    before, _SHARING.scratch = _SHARING.scratch, scratch
    try:
        yield
    finally:
        _SHARING.scratch = before


def shared_scratch() -> Scratch | None:
    """Return the scratch that this thread shares now, None for none."""
    return _SHARING.scratch


_COMMON: "WeakValueDictionary[torch.device, Scratch]" = WeakValueDictionary()
_MAKING = threading.Lock()


def common_scratch(device: torch.device) -> Scratch:
    """Return what all workspaces of a device share; it is there for as long as one of them is."""
    with _MAKING:
        found = _COMMON.get(device)
        if found is None:
            found = _COMMON[device] = Scratch()
    return found
