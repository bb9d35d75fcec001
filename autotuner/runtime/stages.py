"""Stages: the memory of a workspace that inputs and gradients of outputs are copied to."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import Geometry, Place, Port
from autotuner.runtime.arena import Arena


class Stages:
    """Memory that the caller's tensors are copied to, or read in place of: those of some ports, in their order.

    A port that the plan keeps outside of its arena has a stage once something is copied.

    Attributes:
        in_place: what is read in the caller's memory now.
    """

    def __init__(self, arena: Arena, ports: Sequence[Port], of: str) -> None:
        """View them.

        Args:
            of: "" for inputs, "grad_" for gradients of outputs.
        """
        self._arena, self._plan = arena, arena.plan
        places = self._plan.given if of else self._plan.inputs
        self._ports = [
            (self._plan.geometry(port, of), [places[of + member] for member in port.members]) for port in ports
        ]
        self._bases = {
            lies.buffer: arena.elements(lies.buffer)
            for lies, _ in self._ports if self._plan.buffers[lies.buffer].role == "arena"
        }  # fmt: skip
        self.in_place: set[Place] = set()

    def tensors(self) -> list[Tensor]:
        """Return the stage of each port that has one."""
        return [_viewed(self._bases[lies.buffer], lies) for lies, _ in self._ports if lies.buffer in self._bases]

    def memory(self) -> Iterator[Tensor]:
        """Yield what was allocated here."""
        yield from (base for number, base in self._bases.items() if self._plan.buffers[number].role != "arena")

    def __len__(self) -> int:
        return len(self._ports)

    def take(
        self, tensors: Sequence[Tensor | None], *, in_place: bool, names: Collection[str] | None = None
    ) -> dict[Place, Tensor]:
        """Copy tensors in, None as zeros; return those that are to be read where they are, and stages that are new.

        Args:
            in_place: whether tensors that lie as the plan says are.
            names: of the ports' members that are given; None for all of them.
        """
        ports = [port for port in self._ports if names is None or port[1][0][0] in names]
        read: dict[Place, Tensor] = {}
        made: dict[Place, Tensor] = {}
        for (lies, places), tensor in zip(ports, tensors, strict=True):
            if tensor is not None and in_place and self._lies_like(tensor, lies):
                (place,) = places
                read[place] = tensor.detach().as_strided(
                    self._plan.shape(place), self._plan.strides(place), tensor.storage_offset()
                )
                continue
            if lies.buffer not in self._bases:
                made |= self._arena.views_of(lies.buffer, self._base(lies.buffer))
            stage = _viewed(self._base(lies.buffer), lies)
            if tensor is None:
                stage.zero_()
            else:
                stage.copy_(tensor)
        self.in_place |= read.keys()
        return read | made

    def leave(self, places: Collection[Place]) -> set[Place]:
        """Give up those of the places that lie outside of the arena or are read in place; return them."""
        outside = {place for place in places if self._plan.buffers[self._plan.buffer_of[place]].role == "input"}
        left = self.in_place.intersection(places) | outside
        self.in_place -= left
        for number in {self._plan.buffer_of[place] for place in outside}:
            self._bases.pop(number, None)
        return left

    def put_back(self) -> dict[Place, Tensor]:
        """Read nothing in the caller's memory any more; return views of the stages for what was read there."""
        places, self.in_place = self.in_place, set()
        found: dict[Place, Tensor] = {}
        for number in {self._plan.buffer_of[place] for place in places}:
            found |= self._arena.views_of(number, self._base(number))
        return {place: found[place] for place in places}

    def _base(self, number: int) -> Tensor:
        """Return the elements of a buffer, which are allocated now if it lies outside of the arena and has none."""
        if number not in self._bases:
            with torch.inference_mode(False):
                self._bases[number] = self._arena.allocate(number)
        return self._bases[number]

    def _lies_like(self, tensor: Tensor, lies: Geometry) -> bool:
        """Say whether kernels that were chosen for a stage can read a tensor in its place."""
        device = self._arena.device
        wanted = (lies.shape, lies.strides, getattr(torch, self._plan.buffers[lies.buffer].dtype), device)
        is_aligned = tensor.data_ptr() % alignment_bytes(device.type) == 0
        return is_aligned and (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == wanted


def _viewed(base: Tensor, lies: Geometry) -> Tensor:
    return base.as_strided(lies.shape, lies.strides, base.storage_offset() + lies.offset)
