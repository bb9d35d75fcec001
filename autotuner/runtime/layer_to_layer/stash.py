"""Inputs of layers between forward and backward: on the device, or on the host."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotuner.runtime.devices.protocol import HostLink
from autotuner.runtime.layer_to_layer.call import RepeatedCall
from autotuner.runtime.layer_to_layer.packing import Packing


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
        self._free: dict[int, list[Tensor]] = {}
        self.bytes = 0
        self.tickets: list[Any] = []

    def begin(self) -> None:
        """Begin a pass."""
        self.bytes = 0
        self.tickets.clear()

    def put(self, call: RepeatedCall) -> None:
        """Begin to bring the inputs of a call to the host."""
        for place in call.inputs.from_layers():
            tensor: Tensor = call.inputs.leaves[place].contiguous()
            packing = Packing.of([tensor], [tensor.dtype])
            free = self._free.setdefault(packing.total_bytes, [])
            buffer = free.pop() if free else self._link.host_bytes(packing.total_bytes)
            ticket = self._link.up(packing.views(buffer)[0], tensor)
            call.inputs.leaves[place] = _Parked(packing, buffer, ticket)
            self.tickets.append(ticket)
            self.bytes += packing.total_bytes

    def fetch(self, call: RepeatedCall) -> None:
        """Begin to bring the inputs of a call back."""
        for leaf in call.inputs.leaves:
            if isinstance(leaf, _Parked) and leaf.there is None:
                (view,) = leaf.packing.views(leaf.buffer)
                leaf.there = torch.empty_like(view, device=self._device)
                self._link.wait(leaf.ticket)
                leaf.ticket = self._link.down(leaf.there, view)
                self.tickets.append(leaf.ticket)

    def take(self, call: RepeatedCall) -> None:
        """Put the inputs of a call back in place, on the device."""
        self.fetch(call)
        for place, leaf in enumerate(call.inputs.leaves):
            if isinstance(leaf, _Parked):
                self._link.wait(leaf.ticket)
                call.inputs.leaves[place] = leaf.there
                self._free[leaf.packing.total_bytes].append(leaf.buffer)
