"""Protocol of a device at run time: streams, events, graphs with their memory, and random numbers."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

Run = Callable[[], Any]
"""A call without arguments."""


class DeviceRuntime(Protocol):
    """All that the runtime asks of a device. What a stream, an event or a pool is, only the device knows.

    Nothing here waits on the host, except `captured`, once per graph, `synchronize` and `elapsed_us`.

    Attributes:
        device: with its index, where the type has several devices.
        vendor: "nvidia", "amd" or "cpu"; torch gives devices of two vendors one type.
        has_graphs: whether calls are queued on streams, and can be captured in graphs that are replayed. Where they
            cannot, there is one stream, calls are over when they return, and `pool` and `captured` are not called.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def vendor(self) -> str: ...

    @property
    def has_graphs(self) -> bool: ...

    def is_current(self) -> bool:
        """Say whether this is the current device of its type."""

    def guard(self) -> AbstractContextManager[Any]:
        """Make this device the current one for a while, where it is not."""

    def stream(self) -> int:
        """Return the handle of the caller's current stream."""

    def current(self) -> Any:
        """Return the caller's current stream, which can wait for events and for other streams, and record events."""

    def is_capturing(self) -> bool:
        """Say whether a graph is being captured on the current stream; called with this device as the current one."""

    def follow(self, last: Any, tensors: Iterable[Tensor]) -> None:
        """Make the current stream wait for all that was queued on another one, and tell the allocator who uses what."""

    def lanes(self, count: int) -> Sequence[Any]:
        """Return streams for steps that are captured beside each other; the first has priority over the others."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one for a while."""

    def pool(self) -> Any:
        """Return memory that graphs share which never run at the same time."""

    def aside(self) -> AbstractContextManager[None]:
        """Queue work on the stream that captures, in order with what is queued on the current one before and after."""

    def captured(self, run: Run, pool: Any) -> Run:
        """Return the replay of what a function queues; it ran before, so that nothing is set up meanwhile.

        Raises:
            Exception: whatever the function or the device says; generator and current stream are as before.
        """

    def synchronize(self) -> None:
        """Wait for all that is queued on the device."""

    def mark(self) -> Any:
        """Return a mark of this moment in the current stream."""

    def elapsed_us(self, began: Any, ended: Any) -> float:
        """Return the time between two marks in microseconds; waits for the second one."""

    def forked_random(self) -> AbstractContextManager[Any]:
        """Put the states of the generators of CPU and device back at the end."""
