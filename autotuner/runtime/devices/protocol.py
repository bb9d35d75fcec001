"""Protocol of a device at run time: streams, events, graphs with their memory, and random numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

Run = Callable[[], Any]
"""A call without arguments."""


class MemoryMeter(Protocol):
    """Counts what torch's allocator gives out, lap by lap.

    Attributes:
        others_bytes: what the allocator holds for graphs that are there already, which is not counted as held.
        counts_all: whether that is all that is allocated, or only what comes from when it began.
    """

    counts_all: bool
    others_bytes: int

    def lap(self) -> None:
        """End a lap, and begin the next one."""

    def stop(self) -> tuple[list[int], int]:
        """Count no more.

        Returns:
            The most bytes that were allocated at any time of each lap, the last one among them; and the most that the
            allocator has held, free ones among them, or 0 where it keeps nothing that is freed.
        """


class HostLink(Protocol):
    """Copies in two directions, each in order, both at the same time, and beside what the device computes.

    A copy is queued and returns a ticket. What reads a copy's target, or writes its source, waits for the ticket first.
    """

    def host_bytes(self, count: int) -> Tensor:
        """Return new bytes on the host that copies read and write without a stop of the host; not set."""

    def release(self, buffer: Tensor) -> None:
        """Give such bytes back, which no copy reads or writes any more."""

    def down(self, target: Tensor, source: Tensor, first: bool = False) -> Any:
        """Queue a copy to the device, behind the work that is queued on the device so far; return its ticket.

        Args:
            first: whether it need not wait for other copies to the device, which are not so small.
        """

    def up(self, target: Tensor, source: Tensor) -> Any:
        """Queue a copy to the host, behind the work that is queued on the device so far; return its ticket."""

    def wait(self, ticket: Any) -> None:
        """Have what is queued on the device from now on wait for a copy."""

    def wait_on_host(self, ticket: Any) -> None:
        """Wait for a copy; any thread may call it."""

    def seconds(self, ticket: Any) -> float:
        """Return how long a copy took, without what it waited for; waits for its end."""


class DeviceRuntime(Protocol):
    """All that the runtime asks of a device. What a stream, an event or a pool is, only the device knows.

    Nothing here waits on the host, except `synchronize`, `elapsed_us`, and what captures, once per graph.

    Attributes:
        device: with its index, where the type has several devices.
        vendor: "nvidia", "amd" or "cpu"; torch gives devices of two vendors one type.
        has_graphs: whether calls are queued on streams, and can be captured in graphs that are replayed. Where they
            cannot, there is one stream, calls are over when they return, and `pool` and captures are not asked for.
        has_own_memory: whether its memory is not the host's.
        has_triton: whether Triton compiles programs for it.
        sums_wide: whether products of 16-bit matrices can be added to float32 (`out_dtype` of `torch.mm`).
        columns_multiple: columns of a wide product are filled up to a multiple of it, since others take longer.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def vendor(self) -> str: ...

    @property
    def has_graphs(self) -> bool: ...

    @property
    def has_own_memory(self) -> bool: ...

    @property
    def has_triton(self) -> bool: ...

    @property
    def sums_wide(self) -> bool: ...

    @property
    def columns_multiple(self) -> int: ...

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

    def captured(self, run: Run, pool: Any, repeats: int = 0, *, is_whole_step: bool = False) -> Run:
        """Return the replay of what a function queues; it ran before, so that nothing is set up meanwhile.

        Args:
            repeats: so often, at most, it draws the same numbers twice, by `noted_draws` and `draws_again`.
            is_whole_step: whether it calls compiled functions, forward and backward, each of which draws from
                generators of its own where a checkpoint repeats a draw.

        Raises:
            Exception: whatever the function or the device says; generator and current stream are as before.
        """

    def captured_alone(self, warm: Run, run: Run) -> Run:
        """Return the replay of what a function queues, in memory of its own, as torch's documentation captures.

        Peers of a plan are captured so: with nothing of what `captured` does beyond that.

        Args:
            warm: runs before, on another stream than the current one.
        """

    def synchronize(self) -> None:
        """Wait for all that is queued on the device."""

    def mark(self) -> Any:
        """Return a mark of this moment in the current stream."""

    def has_passed(self, mark: Any) -> bool:
        """Say whether the device has come to a mark already; False where it computes within calls."""

    def elapsed_us(self, began: Any, ended: Any) -> float:
        """Return the time between two marks in microseconds; waits for the second one."""

    def forked_random(self) -> AbstractContextManager[Any]:
        """Put the states of the generators of CPU and device back at the end."""

    def drawn_so_far(self) -> Run:
        """Return what has the device's generator go on from where it is now."""

    def noted_draws(self) -> AbstractContextManager[Any]:
        """Note which random numbers the device draws inside, for `draws_again`."""

    def draws_again(self, noted: Any) -> AbstractContextManager[None]:
        """Draw the same numbers once more inside, and go on as before behind it; each note serves once in a graph."""

    def link(self) -> HostLink:
        """Return a link between the host and this device."""

    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Move the values of tensors to memory apart from all else; each stays the same tensor, at another address.

        A tensor that stays keeps the whole piece from being given back that the allocator has cut it from. So what is
        made on the way, and stays, is gathered. One that shares its memory with another stays where it is.
        """

    def free_bytes(self) -> tuple[int, int] | None:
        """Return the bytes of the device that nobody has, and all of them; None where it has no memory of its own."""

    def room_bytes(self) -> int | None:
        """Return the bytes of the device that torch has or could have; None where it has no memory of its own."""

    def meter(self) -> MemoryMeter:
        """Begin to count what is allocated: in all, or on the CPU what comes from now on.

        Memory that nothing is in is given back to the device first, and torch's own figures of the most are set back.
        """


@contextmanager
def in_state(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    """Have a generator draw from a state inside, and go on from its own behind it."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
