"""Device memory for the weights of a few layers, which is filled while another layer computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.runtime.devices.protocol import HostLink
from autotuner.runtime.layer_to_layer.host_layer import HostLayer


class _WeightSlot:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.weights: dict[str, list[nn.Parameter]] = {}
        self.layer: HostLayer | None = None
        self.stamp = -1
        self.ticket: Any = None
        self.is_read = False

    def has(self, layer: HostLayer) -> bool:
        return self.layer is layer and self.stamp == layer.stamp

    def weights_of(self, layer: HostLayer) -> list[nn.Parameter]:
        """Return a layer's parameters in this slot, the same ones each time."""
        if layer.name not in self.weights:
            with torch.inference_mode(False):
                self.weights[layer.name] = [
                    nn.Parameter(view, requires_grad=parameter.requires_grad)
                    for view, parameter in zip(layer.weights.views(self.memory), layer.parameters, strict=True)
                ]
        return self.weights[layer.name]


class Slots:
    """Places for the weights of layers on a device.

    Args:
        layers: that are brought there, each into any slot.
        device: where the slots are.
        link: to it.
        count: of slots: two, for the layer that computes and for the next one.

    Attributes:
        bytes: of all slots.
        bytes_down: how many bytes went to the device.
        tickets: of copies, which the caller clears.
        addresses: of the slots' memory.
    """

    def __init__(self, layers: Sequence[HostLayer], device: torch.device, link: HostLink, count: int = 2) -> None:
        self._link = link
        largest = max(layer.weights.total_bytes for layer in layers)
        self._slots = [_WeightSlot(torch.empty(largest, dtype=torch.uint8, device=device)) for _ in range(count)]
        self.bytes, self.bytes_down = count * largest, 0
        self.tickets: list[Any] = []
        self.addresses = {slot.memory.untyped_storage().data_ptr() for slot in self._slots}

    def forget(self) -> None:
        """Have all weights brought anew: what is written to parameters by `.data` is not seen otherwise."""
        for slot in self._slots:
            slot.stamp = -1

    def fetch(self, layer: HostLayer) -> None:
        """Begin to bring a layer's weights, unless they are there: into the slot that was filled least recently."""
        if any(slot.has(layer) for slot in self._slots):
            return
        slot = next(slot for slot in self._slots if not slot.is_read)
        total_bytes = layer.weights.total_bytes
        slot.layer, slot.stamp = layer, layer.stamp
        slot.ticket = self._link.down(slot.memory[:total_bytes], layer.buffer)
        self.bytes_down += total_bytes
        self.tickets.append(slot.ticket)
        self._slots.remove(slot)
        self._slots.append(slot)

    @contextmanager
    def reading(self, layer: HostLayer) -> Iterator[list[nn.Parameter]]:
        """Have a layer's module read the weights on the device, which are brought if they are not there.

        Returns:
            These weights, in the order of the layer's parameters. The memory is filled anew behind the work that is
            queued inside.
        """
        self.fetch(layer)
        slot = next(slot for slot in self._slots if slot.has(layer))
        self._link.wait(slot.ticket)
        weights = slot.weights_of(layer)
        slot.is_read = True
        try:
            with layer.holding(weights):
                yield weights
        finally:
            slot.is_read = False

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters that layers have read from slots so far."""
        for slot in self._slots:
            for weights in slot.weights.values():
                yield from weights

    def layer_with_gradient(self) -> str | None:
        """Return the name of a layer whose weights on the device have a gradient, None for none."""
        return next(
            (name for slot in self._slots for name, weights in slot.weights.items()
             if any(weight.grad is not None for weight in weights)), None,
        )  # fmt: skip

    def clear_gradients(self) -> None:
        """Drop gradients of the weights, as after an error."""
        for weight in self.parameters():
            weight.grad = None

    def wait_on_host(self, layer: HostLayer) -> None:
        """Wait until the copy of a layer's weights is over, so that the host may write to them."""
        for slot in self._slots:
            if slot.layer is layer:
                self._link.wait_on_host(slot.ticket)
