"""The place of layers' inputs under a memory budget: the host, until a step has shown that the device has room."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from autotuner.errors import BudgetError
from autotuner.plan.phrases import binary
from autotuner.runtime.devices.protocol import MemoryMeter

SPARE = 1 / 64
"""Of the budget, which is left free where something is put on the device beside what was measured."""


@dataclass(frozen=True)
class LayeredNeeds:
    """Bytes of the device that steps of one shape need.

    Args:
        budget_bytes: what they may need.
        least_bytes: the most that was allocated, or held by the allocator, with the inputs of layers on the host.
        inputs_bytes: of these inputs.
        before_bytes: that were allocated before the step, and are there at any time of it.
        stays: whether the inputs are kept on the host in any case.
    """

    budget_bytes: int
    least_bytes: int
    inputs_bytes: int
    before_bytes: int = 0
    stays: bool = False

    @property
    def has_room(self) -> bool:
        """True where the inputs fit on the device, too, and may be there."""
        return not self.stays and self.least_bytes + self.inputs_bytes <= self.budget_bytes * (1 - SPARE)

    def __str__(self) -> str:
        where = "the device" if self.has_room else "the host"
        return (
            f"{binary(self.least_bytes)} of {binary(self.budget_bytes)} needed, and {binary(self.inputs_bytes)} of "
            f"inputs of layers kept on {where}"
        )


class StashChoice:
    """Chooses for each shape of batches where the inputs of layers are kept.

    The first step of a shape keeps them on the host, and is measured.

    Args:
        budget_bytes: that a step may need on the device; None for what there is.
        room_bytes: says how much that is.
        stays: whether they are kept on the host in any case.

    Attributes:
        needs: of each shape that was measured.
    """

    def __init__(self, budget_bytes: int | None, room_bytes: Callable[[], int | None], stays: bool = False) -> None:
        self._budget_bytes, self._room_bytes, self._stays = budget_bytes, room_bytes, stays
        self.needs: dict[Hashable, LayeredNeeds] = {}

    def is_on_host(self, shape: Hashable) -> bool:
        return shape not in self.needs or not self.needs[shape].has_room

    def note(self, shape: Hashable, meter: MemoryMeter, inputs_bytes: int, parts: str) -> None:
        """Note what the first step of a shape needed.

        Args:
            meter: which has ended a lap before the step.
            parts: of what it needed, in words.

        Raises:
            BudgetError: more than the budget.
        """
        laps, reserved_bytes = meter.stop()
        least = max(*laps, reserved_bytes + meter.others_bytes)
        found = LayeredNeeds(self._available(), least, inputs_bytes, laps[0], self._stays)
        self.needs[shape] = found
        if self._budget_bytes is not None and found.least_bytes > self._budget_bytes:
            raise BudgetError(
                f"a step of this shape needs {binary(found.least_bytes, up=True)} on the device, {parts} among it, and "
                f"the budget is {binary(self._budget_bytes)}: give smaller micro-batches, or a larger budget",
                found.least_bytes,
            )

    def has_room_for(self, shape: Hashable, times: float) -> bool:
        """Say whether micro-batches that are so many times as large fit, if all grows that was not there before."""
        found = self.needs[shape]
        grown = found.before_bytes + times * (found.least_bytes - found.before_bytes)
        return grown <= self._available() * (1 - SPARE)

    def _available(self) -> int:
        available = self._room_bytes() if self._budget_bytes is None else self._budget_bytes
        assert available is not None
        return available
