"""Inputs of layers between forward and backward: on the device, or on the host."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotuner.runtime.devices.protocol import HostLink
from autotuner.runtime.layer_to_layer.call import RepeatedCall
from autotuner.runtime.layer_to_layer.edges import key_of
from autotuner.runtime.layer_to_layer.packing import ALIGNED_BYTES, Packing


@dataclass
class _Parked:
    """A tensor on the host.

    Args:
        packing: of the tensor.
        buffer: its bytes on the host.
        ticket: of the copy to the host, or back.
        there: the tensor on the device, once it is on its way back.
    """

    packing: Packing
    buffer: Tensor
    ticket: Any
    there: Tensor | None = None


class HostStash:
    """Keeps what a layer made for the next one on the host until backward; what several layers read stays.

    Args:
        device: where layers run.
        link: to it.

    Attributes:
        bytes: that were on the host at the end of the last forward, and would be on the device otherwise.
        tickets: of all copies in this pass.
    """

    def __init__(self, device: torch.device, link: HostLink) -> None:
        self._device, self._link = device, link
        self._free: list[Tensor] = []
        self._all: list[Tensor] = []
        self._seen: set[Any] = set()
        self.bytes = 0
        self.tickets: list[Any] = []

    def begin(self) -> None:
        """Begin a pass."""
        self.bytes = 0
        self.tickets.clear()

    def end(self) -> None:
        """Let go of what a pass has left."""
        self._seen.clear()
        self._free = list(self._all)

    def release(self) -> None:
        """Give the memory on the host back, between passes: what comes next has another size."""
        for buffer in self._all:
            self._link.release(buffer)
        self._all.clear()
        self._free.clear()

    def put(self, call: RepeatedCall) -> None:
        """Begin to bring the inputs of a call to the host."""
        for place in call.inputs.from_layers():
            key = key_of(call.inputs.edges[place])
            if key in self._seen:  # another layer reads it, too: it stays, once for all that follow
                continue
            self._seen.add(key)
            tensor: Tensor = call.inputs.leaves[place].contiguous()
            packing = Packing.of([tensor], [tensor.dtype])
            buffer = self._buffer(packing.total_bytes)
            ticket = self._link.up(packing.views(buffer)[0], tensor)
            call.inputs.leaves[place] = _Parked(packing, buffer, ticket)
            self.tickets.append(ticket)
            self.bytes += packing.total_bytes

    def _buffer(self, needed_bytes: int) -> Tensor:
        """Return the smallest free buffer that is large enough, or a new one, of a size that others may need, too."""
        fitting = [each for each in self._free if each.numel() >= needed_bytes]
        if fitting:
            found = min(fitting, key=Tensor.numel)
            self._free = [each for each in self._free if each is not found]
            return found
        step = max(ALIGNED_BYTES, 1 << max(0, needed_bytes.bit_length() - 3))
        made = self._link.host_bytes(-(-needed_bytes // step) * step)
        self._all.append(made)
        return made

    def fetch(self, call: RepeatedCall) -> None:
        """Begin to bring the inputs of a call back."""
        for leaf in call.inputs.leaves:
            if isinstance(leaf, _Parked) and leaf.there is None:
                (view,) = leaf.packing.views(leaf.buffer)
                leaf.there = torch.empty_like(view, device=self._device)
                self._link.wait(leaf.ticket)
                leaf.ticket = self._link.down(leaf.there, view, first=True)
                self.tickets.append(leaf.ticket)

    def take(self, call: RepeatedCall) -> None:
        """Put the inputs of a call back in place, on the device."""
        if not any(isinstance(leaf, _Parked) for leaf in call.inputs.leaves):
            return
        call.inputs.check_unchanged(call.name)
        self.fetch(call)
        for place, leaf in enumerate(call.inputs.leaves):
            if isinstance(leaf, _Parked):
                self._link.wait(leaf.ticket)
                call.inputs.leaves[place] = leaf.there
                self._free.append(leaf.buffer)
        call.inputs.note_versions()
