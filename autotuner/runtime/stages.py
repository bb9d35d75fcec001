"""Stages: the memory of a workspace that inputs and gradients of outputs are copied to, or read in place of."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import Geometry, Place, Port
from autotuner.runtime.arena import Arena

MOVES = 3
"""Times that what is followed may move: a port whose tensors move more often is copied from then on."""


@dataclass
class PortMemory:
    """Memory of a port's tensors from call to call.

    Args:
        address: of the last one; 0 where it did not lie as the plan says.
        is_read: whether it is read there.
        moves: how often it was somewhere else than where the one before it was read.
    """

    address: int = 0
    is_read: bool = False
    moves: int = 0


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
        self._followed = [PortMemory() for _ in ports]
        both = zip(self._followed, self._ports, strict=True)
        self._again = [each for each in both if each[1][1][0][0] in self._plan.read_again]

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
            made |= self._copied(lies, tensor)
        self.in_place |= read.keys()
        return read | made

    def follow(self, tensors: Sequence[Tensor | None]) -> dict[Place, Tensor]:
        """Copy tensors in, but for those that lie where those of the call before lay: they are read there.

        None is copied as zeros. What is read is not kept alive: it has to stay until it was read for the last time.

        Returns:
            Places that are to be read elsewhere from now on, in the tensors or in stages.
        """
        moved: dict[Place, Tensor] = {}
        for followed, (lies, places), tensor in zip(self._followed, self._ports, tensors, strict=True):
            address = tensor.data_ptr() if tensor is not None and self._lies_like(tensor, lies) else 0
            if address and address == followed.address:
                if followed.is_read:
                    continue
                if followed.moves < MOVES:
                    followed.is_read = True
                    moved |= {place: self._over(tensor, place) for place in places}  # type: ignore[arg-type]
                    self.in_place.update(places)
                    if self._plan.buffers[lies.buffer].role == "input":
                        self._bases.pop(lies.buffer, None)  # its stage, which the call before was copied to
                    continue
            elif followed.is_read:
                moved |= self._left(followed, lies, places)
            followed.address = address
            moved |= self._copied(lies, tensor)
        return moved

    def are_met(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether those of the inputs that backward reads are where they are read, if they are followed."""
        return all(
            not each.is_read or tensor.data_ptr() == each.address
            for (each, _), tensor in zip(self._again, tensors, strict=True)
        )

    def meet(self, tensors: Sequence[Tensor], *, stays: bool) -> dict[Place, Tensor]:
        """Copy in those of the inputs that backward reads that are not where they are read.

        Args:
            stays: whether those that are there may be read there.

        Returns:
            Places that are to be read in stages from now on.
        """
        moved: dict[Place, Tensor] = {}
        for (followed, (lies, places)), tensor in zip(self._again, tensors, strict=True):
            if followed.is_read and not (stays and tensor.data_ptr() == followed.address):
                moved |= self._left(followed, lies, places)
                moved |= self._copied(lies, tensor)
        return moved

    def _left(self, followed: PortMemory, lies: Geometry, places: Sequence[Place]) -> dict[Place, Tensor]:
        """Read a port's tensors where they are no more, and return the places of its stage."""
        followed.is_read, followed.address, followed.moves = False, 0, followed.moves + 1
        self.in_place.difference_update(places)
        found = self._arena.views_of(lies.buffer, self._base(lies.buffer))
        return {place: found[place] for place in places}

    def _over(self, tensor: Tensor, place: Place) -> Tensor:
        """Return a place over the elements of a tensor, whose memory it does not keep."""
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, _reach(tensor))
        with torch.inference_mode(False):
            found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return found.set_(storage, 0, self._plan.shape(place), self._plan.strides(place))

    def _copied(self, lies: Geometry, tensor: Tensor | None) -> dict[Place, Tensor]:
        """Copy a tensor to its stage, None as zeros; return the places of a stage that is new."""
        made = {} if lies.buffer in self._bases else self._arena.views_of(lies.buffer, self._base(lies.buffer))
        stage = _viewed(self._bases[lies.buffer], lies)
        if tensor is None:
            stage.zero_()
        else:
            stage.copy_(tensor)
        return made

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
        for followed in self._followed:
            followed.is_read, followed.address = False, 0
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
        is_alone = len(self._plan.buffers[lies.buffer].offsets) == 1  # kernels may read several in a row as one
        is_plain = not tensor.is_neg()  # otherwise its memory has other numbers than it stands for
        return (
            is_alone
            and is_plain
            and is_aligned
            and (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == wanted
        )


def _reach(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last one."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _viewed(base: Tensor, lies: Geometry) -> Tensor:
    return base.as_strided(lies.shape, lies.strides, base.storage_offset() + lies.offset)
