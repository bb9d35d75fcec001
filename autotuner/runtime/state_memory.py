"""Memory of what forward leaves for backward, at the beginning of a workspace's memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import MemoryPlan


@dataclass(frozen=True)
class StateMemory:
    """Buffers that backward reads and forward hands out, one behind the other, and the arena behind them.

    Args:
        held: where each of these buffers begins, by number.
        held_bytes: where the arena begins.
        size_bytes: where the last of the arena's buffers ends that forward leaves for backward; one byte at least.
    """

    held: Mapping[int, int]
    held_bytes: int
    size_bytes: int

    @staticmethod
    def of(plan: MemoryPlan, device_type: str) -> "StateMemory":
        aligned, end = alignment_bytes(device_type), 0
        held: dict[int, int] = {}
        for number in sorted(plan.held_outputs):
            held[number] = end
            end += -(-plan.buffers[number].size_bytes // aligned) * aligned
        saved = (plan.buffers[number] for number in plan.saved)
        kept = max((buffer.start_bytes + buffer.size_bytes for buffer in saved), default=0)
        return StateMemory(held, end, max(end + kept, 1))
