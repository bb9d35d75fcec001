"""The link between host and device: copies beside the device's work, and host memory that they reach."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import Tensor


class HostLink(Protocol):
    """Copies in two directions, each in order, both at the same time, and beside what the device computes.

    A copy is queued and returns a ticket. What reads a copy's target, or writes its source, waits for the ticket first.
    """

    def host_bytes(self, count: int) -> Tensor:
        """Return new bytes on the host that copies read and write without a stop of the host; not set."""

    def down(self, target: Tensor, source: Tensor) -> Any:
        """Queue a copy to the device, behind the work that is queued on the device so far; return its ticket."""

    def up(self, target: Tensor, source: Tensor) -> Any:
        """Queue a copy to the host, behind the work that is queued on the device so far; return its ticket."""

    def wait(self, ticket: Any) -> None:
        """Have what is queued on the device from now on wait for a copy."""

    def wait_on_host(self, ticket: Any) -> None:
        """Wait for a copy; any thread may call it."""

    def seconds(self, ticket: Any) -> float:
        """Return how long a copy took, without what it waited for; waits for its end."""


class DirectLink:
    """The link of a device that is the host: a copy is over when it returns, and its ticket is the seconds it took."""

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def down(self, target: Tensor, source: Tensor) -> Any:
        began = perf_counter()
        target.copy_(source)
        return perf_counter() - began

    def up(self, target: Tensor, source: Tensor) -> Any:
        return self.down(target, source)

    def wait(self, ticket: Any) -> None:
        pass

    def wait_on_host(self, ticket: Any) -> None:
        pass

    def seconds(self, ticket: Any) -> float:
        return float(ticket)


@dataclass(frozen=True)
class _Copy:
    began: torch.cuda.Event
    ended: torch.cuda.Event


class CudaLink:
    """The link of a CUDA device: a stream for each direction, and host memory that is locked for the device.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._locked: list[Tensor] = []
        finalize(self, _unlock, self._locked)

    def host_bytes(self, count: int) -> Tensor:
        # torch's own locked memory comes in powers of two: up to half of a large layer's buffer would be of no use.
        made = torch.empty(count, dtype=torch.uint8)
        if not count:
            return made
        if int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), count, 0)):  # type: ignore[no-untyped-call]
            return torch.empty(count, dtype=torch.uint8, pin_memory=True)
        self._locked.append(made)
        return made

    def down(self, target: Tensor, source: Tensor) -> _Copy:
        found = self._copied(self._down, target, source)
        target.record_stream(self._down)
        return found

    def up(self, target: Tensor, source: Tensor) -> _Copy:
        found = self._copied(self._up, target, source)
        source.record_stream(self._up)
        return found

    def wait(self, ticket: _Copy) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket.ended)

    def wait_on_host(self, ticket: _Copy) -> None:
        ticket.ended.synchronize()

    def seconds(self, ticket: _Copy) -> float:
        ticket.ended.synchronize()
        return float(ticket.began.elapsed_time(ticket.ended)) / 1e3

    def _copied(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> _Copy:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        made = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            made[0].record(stream)
            target.copy_(source, non_blocking=True)
            made[1].record(stream)
        return _Copy(*made)


def _unlock(locked: list[Tensor]) -> None:
    for tensor in locked:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]
    locked.clear()


LINKS: dict[str, Callable[[torch.device], HostLink]] = {"cuda": CudaLink}
"""By type of device."""


def link_of(device: torch.device) -> HostLink:
    """Return the link between the host and a device."""
    make = LINKS.get(device.type)
    return DirectLink() if make is None else make(device)
