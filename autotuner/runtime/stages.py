"""Stages: the memory of a workspace that inputs and gradients of outputs are copied to."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import MemoryPlan, Place, Port


class Stages:
    """Memory that the caller's tensors are copied to: those of some ports, in their order.

    Attributes:
        tensors: one for each port.
    """

    def __init__(
        self, plan: MemoryPlan, ports: Sequence[Port], of: str, views: Mapping[Place, Tensor], device: torch.device
    ) -> None:
        """View them.

        Args:
            of: "" for inputs, "grad_" for gradients of outputs.
            views: of the plan's places, in the workspace's own memory.
        """
        self._plan, self._ports, self._of, self._device = plan, ports, of, device
        self.tensors = [self._view(port, views) for port in ports]

    def take(self, tensors: Sequence[Tensor | None], *, in_place: bool) -> dict[Place, Tensor]:
        """Copy tensors in, None as zeros; return those that are to be read where they are.

        Args:
            in_place: whether tensors that lie as the plan says are.
        """
        found: dict[Place, Tensor] = {}
        for port, stage, tensor in zip(self._ports, self.tensors, tensors, strict=True):
            if tensor is None:
                stage.zero_()
            elif in_place and self._lies_like(tensor, stage):
                (member,) = port.members
                place = (self._plan.given if self._of else self._plan.inputs)[self._of + member]
                found[place] = tensor.detach().as_strided(
                    self._plan.shape(place), self._plan.strides(place), tensor.storage_offset()
                )
            else:
                stage.copy_(tensor)
        return found

    def _lies_like(self, tensor: Tensor, stage: Tensor) -> bool:
        """Say whether kernels that were chosen for a stage can read a tensor in its place."""
        return (
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            == (stage.shape, stage.stride(), stage.dtype, stage.device)
            and tensor.data_ptr() % alignment_bytes(self._device.type) == 0
        )  # fmt: skip

    def _view(self, port: Port, views: Mapping[Place, Tensor]) -> Tensor:
        lies = self._plan.geometry(port, self._of)
        buffer = self._plan.buffers[lies.buffer]
        first = views[next(iter(buffer.offsets))]
        start = first.storage_offset() - next(iter(buffer.offsets.values()))
        return first.as_strided(lies.shape, lies.strides, start + lies.offset)
