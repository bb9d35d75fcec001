"""What the runtime asks of a CUDA device: which stream is current, order between streams, and graphs."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]

_SIDES: dict[tuple[int, int], torch.cuda.Stream] = {}


class Cuda:
    """One device. Nothing here waits on the host, except that `captured` does, once per graph."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index

    def guard(self) -> AbstractContextManager[Any]:
        """Make this device the current one for a while, where it is not."""
        return nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)

    def stream(self) -> int:
        """Return the handle of the caller's current stream."""
        return torch._C._cuda_getCurrentRawStream(self.index)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.index)

    def is_capturing(self) -> bool:
        """Say whether a graph is being captured on the current stream; called with this device as the current one."""
        return torch.cuda.is_current_stream_capturing()

    def follow(self, last: torch.cuda.Stream, tensors: Iterable[Tensor]) -> None:
        """Make the current stream wait for all that was queued on another one, and tell the allocator who uses what."""
        current = self.current()
        current.wait_event(last.record_event())
        for tensor in tensors:
            tensor.record_stream(current)

    def pool(self) -> Any:
        """Return memory that graphs share which never run at the same time."""
        return torch.cuda.graph_pool_handle()

    def captured(self, run: Run, pool: Any) -> Run:
        """Return the replay of what a function queues; it ran before, so that nothing is set up meanwhile.

        Captured is on a stream of its own, one for each stream that graphs are replayed on: a library keeps scratch
        memory per stream, which two graphs that run at the same time must not share.

        Raises:
            Exception: whatever the function or CUDA says; generator and current stream are as before.
        """
        key = (self.index, self.stream())
        if key not in _SIDES:
            _SIDES[key] = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        side = _SIDES[key]
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer one restores the current stream where the end of a capture fails.
            with (
                torch.cuda.stream(self.current()),
                torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
            ):
                run()
        except Exception:
            self._recover(side, pool)
            raise
        return graph.replay

    def _recover(self, side: torch.cuda.Stream, pool: Any) -> None:
        """After a capture that failed: a capture that ends well leaves torch's generator ready for plain draws."""
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.index, pool)
        with suppress(Exception):
            anything = torch.zeros(1, device=f"cuda:{self.index}")
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(self.current()),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                anything.add_(1)
