"""Stages: the memory of a workspace that inputs and gradients of outputs are copied to."""

from collections.abc import Sequence

from torch import Tensor

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import Place, Port
from autotuner.runtime.arena import Arena


class Stages:
    """Memory that the caller's tensors are copied to, or read in place of: those of some ports, in their order.

    Attributes:
        tensors: one for each port.
        in_place: what is read in the caller's memory now.
    """

    def __init__(self, arena: Arena, ports: Sequence[Port], of: str) -> None:
        """View them.

        Args:
            of: "" for inputs, "grad_" for gradients of outputs.
        """
        self._arena, self._plan, self._ports, self._of = arena, arena.plan, ports, of
        self.tensors = [self._view(port) for port in ports]
        self.in_place: set[Place] = set()

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
        self.in_place |= found.keys()
        return found

    def put_back(self) -> dict[Place, Tensor]:
        """Read nothing in the caller's memory any more; return views of the stages for what was read there."""
        places, self.in_place = self.in_place, set()
        return self._arena.views_at(places)

    def _lies_like(self, tensor: Tensor, stage: Tensor) -> bool:
        """Say whether kernels that were chosen for a stage can read a tensor in its place."""
        return (
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            == (stage.shape, stage.stride(), stage.dtype, stage.device)
            and tensor.data_ptr() % alignment_bytes(stage.device.type) == 0
        )  # fmt: skip

    def _view(self, port: Port) -> Tensor:
        lies = self._plan.geometry(port, self._of)
        base = self._arena.elements(lies.buffer)
        return base.as_strided(lies.shape, lies.strides, base.storage_offset() + lies.offset)
