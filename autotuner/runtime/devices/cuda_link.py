"""Copies between the host and a CUDA device, over host memory that is locked."""

from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

from autotuner.errors import DeviceError

PAGE_BYTES = 4096
"""Of the host's memory, which is locked in pages."""


@dataclass(frozen=True)
class _Copy:
    began: torch.cuda.Event
    ended: torch.cuda.Event


class CudaLink:
    """The link of a CUDA device: streams for each direction, and host memory that is locked for the device.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._first = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._locked: list[Tensor] = []
        finalize(self, _unlock, self._locked)

    def host_bytes(self, count: int) -> Tensor:
        """Return locked memory, in pages of its own: of a page that has been locked, nothing can be locked again.

        Torch's own locked memory comes in powers of two: up to half of a large layer's buffer would be of no use.

        Raises:
            DeviceError: the system does not allow to lock so much.
        """
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        whole = -(-count // PAGE_BYTES) * PAGE_BYTES
        made = torch.empty(whole + PAGE_BYTES, dtype=torch.uint8)
        made = made[-made.data_ptr() % PAGE_BYTES :][:whole]
        code = int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), whole, 0))  # type: ignore[no-untyped-call]
        if code:
            raise DeviceError(
                f"{whole >> 20:,} MiB of the host's memory could not be locked for {self._device} (error {code} of "
                "CUDA), beside "
                f"{sum(each.numel() for each in self._locked) >> 20:,} MiB that are: `ulimit -l` says how much may be"
            )
        self._locked.append(made)
        return made[:count]

    def release(self, buffer: Tensor) -> None:
        own = [each for each in self._locked if buffer.numel() and each.data_ptr() == buffer.data_ptr()]
        self._locked[:] = [each for each in self._locked if all(each is not other for other in own)]
        _unlock(own)

    def down(self, target: Tensor, source: Tensor, first: bool = False) -> _Copy:
        stream = self._first if first else self._down
        found = self._copied(stream, target, source)
        target.record_stream(stream)
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
        made = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            made[0].record(stream)
            target.copy_(source, non_blocking=True)
            made[1].record(stream)
        return _Copy(*made)


def _unlock(locked: list[Tensor]) -> None:
    for tensor in locked:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]
    locked.clear()
