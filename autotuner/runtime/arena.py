"""Arena of a workspace: the memory of all that a plan keeps to itself."""

from collections.abc import Iterator

import torch
from torch import Tensor

from autotuner.plan.memory_planner import MemoryPlan, Place
from autotuner.runtime.arena_memory import held_memory
from autotuner.runtime.graphs import StreamOrder
from autotuner.runtime.scratch import Scratch
from autotuner.runtime.state_memory import StateMemory


class Arena:
    """One piece of memory for the buffers of a plan's arena, behind those that are handed out as copies.

    Attributes:
        plan, device: as given.
        memory: that others may be built on, too; None where nobody else is.
        hold: what has it in use, None while somebody else may.
        state: the bytes that forward leaves for backward, as one tensor.
        saved: what backward may write over once it is read, a part of `state` for each buffer.
        held: buffers that are handed out as copies, since backward reads them, by number.
    """

    def __init__(
        self, plan: MemoryPlan, device: torch.device, scratch: Scratch | None = None, order: StreamOrder | None = None
    ) -> None:
        """Allocate.

        Args:
            scratch: memory for what one phase makes and reads itself; None for the arena's own.
            order: of what is used with it, where the memory may be that of others which are not in use.
        """
        self.plan, self.device = plan, device
        own_bytes = plan.arena_bytes if scratch is None else plan.kept_bytes
        state = StateMemory.of(plan, device.type)
        size_bytes = max(state.held_bytes + own_bytes, 1)
        self.hold = None if order is None else held_memory(size_bytes, device, order)
        self.memory = None if self.hold is None else self.hold.memory
        alone = torch.empty(size_bytes, dtype=torch.uint8, device=device) if self.memory is None else self.memory.tensor
        memory = alone[:size_bytes]
        self.state, self._own = memory[: state.size_bytes], memory[state.held_bytes :]
        self._scratch = None if scratch is None else scratch.memory(plan.arena_bytes - own_bytes, device)
        self.saved = [self._own[plan.buffers[i].start_bytes :][: plan.buffers[i].size_bytes] for i in plan.saved]
        self.held = {number: self._part(memory, start, number) for number, start in state.held.items()}

    def is_taken(self) -> bool:
        """Take the memory in use, and say whether that is so: not where another has it."""
        if self.memory is not None and self.hold is None:
            self.hold = self.memory.hold()
        return self.memory is None or self.hold is not None

    def parts(self) -> Iterator[Tensor]:
        """Yield a tensor over each part of the memory."""
        yield self._own
        if self._scratch is not None:
            yield self._scratch
        yield from self.held.values()

    def elements(self, number: int) -> Tensor:
        """Return the elements of one of the arena's buffers."""
        start = self.plan.buffers[number].start_bytes
        if self._scratch is not None and start >= self.plan.kept_bytes:
            return self._part(self._scratch, start - self.plan.kept_bytes, number)
        return self._part(self._own, start, number)

    def views(self) -> dict[Place, Tensor]:
        """Return a view of each place of the arena's buffers, and of those in `held`."""
        found: dict[Place, Tensor] = {}
        for number, buffer in enumerate(self.plan.buffers):
            if buffer.role == "arena":
                found |= self.views_of(number, self.elements(number))
        for number, base in self.held.items():
            found |= self.views_of(number, base)
        return found

    def views_of(self, number: int, base: Tensor) -> dict[Place, Tensor]:
        """Return a view of each place of any of the plan's buffers, which begins where `base` begins."""
        return {
            place: base.as_strided(self.plan.shape(place), self.plan.strides(place), base.storage_offset() + offset)
            for place, offset in self.plan.buffers[number].offsets.items()
        }

    def allocate(self, number: int) -> Tensor:
        """Return the elements of any of the plan's buffers in a storage of its own."""
        buffer = self.plan.buffers[number]
        return torch.empty(buffer.elements, dtype=getattr(torch, buffer.dtype), device=self.device)

    def _part(self, memory: Tensor, start: int, number: int) -> Tensor:
        """Return the elements of a buffer that begins at a byte of some memory."""
        buffer = self.plan.buffers[number]
        return memory[start : start + buffer.size_bytes].view(getattr(torch, buffer.dtype))
