"""Memory of a caller's parameters: what is read where it is, and what is copied into a plan's buffers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from autotuner.plan.memory_planner import Geometry, Place
from autotuner.runtime.arena import Arena
from autotuner.runtime.devices import Run


def where(tensor: Tensor) -> tuple[int, tuple[int, ...], torch.Size, torch.dtype]:
    """Return what a tensor's elements are found by: address, strides, shape and type."""
    return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype


JOINED_PARAMETERS: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()
"""Memory that parameters were moved to together, by the address of each. Each has a storage of its own there."""


def whole_memory(parameter: Tensor) -> tuple[Tensor, int]:
    """Return a tensor over all memory around a parameter that may be read with it, and its first element there."""
    whole = JOINED_PARAMETERS.get(parameter.data_ptr())
    if whole is None or whole.dtype is not parameter.dtype:
        return parameter.detach(), int(parameter.storage_offset())
    return whole, (parameter.data_ptr() - whole.data_ptr()) // whole.element_size()


@dataclass(frozen=True, eq=False)
class ParameterMemory:
    """The caller's parameters: those that are read in their own memory, and those that are copied.

    Args:
        views: of each of the plan's that is read where it is, declared axes in order, strides as the plan says.
        lying: for each of the caller's parameters, where it lies in the plan's buffers.
        apart: the buffers of parameters that have no views: they are copied there before each forward.
        current: the caller's parameters, in the order of `lying`.
        moving: whether those that are copied may have other memory at each forward.
    """

    views: Mapping[str, Tensor]
    lying: Sequence[Geometry] = ()
    apart: frozenset[int] = frozenset()
    current: Sequence[Tensor] = ()
    moving: bool = False


class ParameterCopies:
    """Buffers for copies of some parameters, and where all others are.

    Attributes:
        bases: these buffers, by number.
        copying: calls that copy parameters whose memory stays, at the start of each forward.
    """

    def __init__(self, arena: Arena, parameters: ParameterMemory) -> None:
        """Allocate buffers for the parameters that are not read where they are."""
        self._arena, self._lying = arena, parameters.lying
        self._allocate(parameters.apart, parameters.current, moving=parameters.moving)

    def _allocate(self, numbers: Iterable[int], current: Sequence[Tensor], *, moving: bool) -> None:
        self.bases: dict[int, Tensor] = {}
        self.copying: list[Run] = []
        self._copies: list[tuple[int, Tensor]] = []
        for number in sorted(set(numbers)):
            base = self.bases[number] = self._arena.allocate(number)
            members = [
                (index, base.as_strided(lies.shape, lies.strides, lies.offset))
                for index, lies in enumerate(self._lying)
                if lies.buffer == number
            ]
            if moving:
                self._copies += members
            else:
                self.copying.append(_copying(base, members, current))
        self._where = [(i, t.data_ptr()) for i, t in enumerate(current) if self._lying[i].buffer not in self.bases]

    def views(self) -> dict[Place, Tensor]:
        """Return a view of each place in these buffers."""
        found: dict[Place, Tensor] = {}
        for number, base in self.bases.items():
            found |= self._arena.views_of(number, base)
        return found

    def follow(self, current: Sequence[Tensor]) -> dict[Place, Tensor]:
        """Have all parameters copied from now on, if one that was read in place has other memory by now.

        Returns:
            Views of the copies; nothing where all is as it was.
        """
        if all(current[index].data_ptr() == pointer for index, pointer in self._where):
            return {}
        with torch.inference_mode(False), torch.no_grad():
            self._allocate({lies.buffer for lies in self._lying}, current, moving=True)
            return self.views()

    def take(self, current: Sequence[Tensor]) -> None:
        """Copy those that may have other memory each time."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_([copy for _, copy in self._copies], [current[index] for index, _ in self._copies])


def _copying(base: Tensor, members: Sequence[tuple[int, Tensor]], current: Sequence[Tensor]) -> Run:
    """Return the call that copies parameters into their buffer: one kernel where they fill it one behind the other."""
    copies = [copy for _, copy in members]
    sources = [current[index].detach() for index, _ in members]
    ends = [0]
    for copy in copies:
        ends.append(ends[-1] + copy.numel())
    starts = [copy.storage_offset() for copy in copies]
    if starts == ends[:-1] and ends[-1] == base.numel() and all(t.is_contiguous() for t in (*copies, *sources)):
        flat = [source.view(-1) for source in sources]
        return lambda: torch.cat(flat, out=base)
    return lambda: torch._foreach_copy_(copies, sources)
