"""The optimizer's updates of layers on the host, in a thread beside the device's work."""

from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autotuner.runtime.devices.protocol import HostLink
from autotuner.runtime.layer_to_layer.host_layer import HostLayer
from autotuner.runtime.layer_to_layer.rounded_adam import RoundedAdam
from autotuner.runtime.optimizer_parts import update_only

AHEAD = 3
"""Buffers for gradients where layers are updated during backward: being filled, waiting, and being read."""


@dataclass
class Arrived:
    """Gradients of a layer on their way to the host.

    Args:
        layer: that they are of.
        buffer: where they come to.
        ticket: of the copy.
        has: which of the trained parameters have one.
    """

    layer: HostLayer
    buffer: Tensor
    ticket: Any
    has: Sequence[bool]


class HostUpdates:
    """Updates parameters on the host, layer after layer.

    Args:
        optimizer: of the caller; no other thread may use it between `begin` and `wait`.
        layers: that are updated.
        link: on which their gradients come.
        keeps_all: whether the gradients of all layers are kept until they are updated; else a few buffers take turns.

    Attributes:
        busy_s: seconds in which layers were updated, all in all.
        bytes_up: how many bytes came from the device.
        tickets: of copies, which the caller clears.
    """

    def __init__(self, optimizer: Optimizer, layers: Sequence[HostLayer], link: HostLink, keeps_all: bool) -> None:
        self._optimizer, self._link = optimizer, link
        largest = max(layer.gradients.total_bytes for layer in layers)
        if keeps_all:
            self._buffers = {layer.name: link.host_bytes(layer.gradients.total_bytes) for layer in layers}
        else:
            self._ring = [link.host_bytes(largest) for _ in range(min(AHEAD, len(layers)))]
        self._keeps_all = keeps_all
        # One piece for all layers: the system clears memory that is allocated anew.
        rounded = [layer.own_gradients.total_bytes for layer in layers if layer.own_gradients != layer.gradients]
        self._scratch = torch.empty(max(rounded, default=0), dtype=torch.uint8)
        self._adam = RoundedAdam(optimizer)
        for layer in layers:
            self._adam.prepare(*layer.rounded)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="updates of layers")
        self._queued: list[Future[None]] = []
        self.busy_s, self.bytes_up = 0.0, 0
        self.tickets: list[Any] = []

    def bring(self, layer: HostLayer, packed: Tensor, has: Sequence[bool]) -> Arrived:
        """Begin to bring the gradients of a layer to the host.

        Args:
            packed: on the device, as `layer.gradients` has them.
        """
        total_bytes = layer.gradients.total_bytes
        if self._keeps_all:
            buffer = self._buffers[layer.name]
        else:
            if len(self._queued) >= len(self._ring):
                self._queued[-len(self._ring)].result()
            self._ring.append(buffer := self._ring.pop(0))
        self.bytes_up += total_bytes
        ticket = self._link.up(buffer[:total_bytes], packed)
        self.tickets.append(ticket)
        return Arrived(layer, buffer, ticket, has)

    def begin(self, arrived: Arrived, scale: float | None = None) -> None:
        """Update a layer once its gradients are there, in the thread.

        Args:
            scale: that the gradients are multiplied by first.
        """
        arrived.layer.stamp += 1
        self._queued.append(self._thread.submit(self._update, arrived, scale))

    def wait(self) -> None:
        """Wait until all layers are updated.

        Raises:
            Exception: whatever the optimizer raised.
        """
        for each in self._queued:
            each.result()
        self._queued.clear()

    def finish(self) -> None:
        """Wait until nothing is updated any more, after an error, which is raised elsewhere."""
        futures.wait(self._queued)
        self._queued.clear()

    def close(self) -> None:
        """Wait as `finish` does, and end the thread."""
        self._thread.shutdown()

    def _update(self, arrived: Arrived, scale: float | None) -> None:
        self._link.wait_on_host(arrived.ticket)
        began, layer = perf_counter(), arrived.layer
        with torch.no_grad():
            views = dict(zip(layer.trained, layer.gradients.views(arrived.buffer), strict=True))
            there = [number for number, has in zip(layer.trained, arrived.has, strict=True) if has]
            left = self._update_rounded(layer, {number: views[number] for number in there}, scale)
            own = layer.own_gradients.views(self._scratch) if layer.own_gradients != layer.gradients else views.values()
            wide = dict(zip(layer.trained, own, strict=True))
            moved = []
            for number in left:
                parameter, view, gradient = layer.parameters[number], views[number], wide[number]
                parameter.grad = gradient if gradient is view else gradient.copy_(view)
                if scale is not None:
                    parameter.grad.mul_(scale)
                moved.append(parameter)
            try:
                update_only(self._optimizer, moved)
            finally:
                for parameter in moved:
                    parameter.grad = None
            layer.refresh(moved)
        self.busy_s += perf_counter() - began

    def _update_rounded(self, layer: HostLayer, gradients: dict[int, Tensor], scale: float | None) -> list[int]:
        """Update what can be updated from rounded gradients as they are, and return the numbers of all others."""
        left, groups = [], self._adam.groups(layer.parameters[number] for number in gradients)
        for number, gradient in gradients.items():
            parameter = layer.parameters[number]
            if id(parameter) not in groups or gradient.dtype == parameter.dtype:
                left.append(number)
                continue
            with layer.written(number) as rounded:
                self._adam.update(parameter, groups[id(parameter)], gradient, rounded, 1.0 if scale is None else scale)
        return left
