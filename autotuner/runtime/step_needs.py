"""Needs of a training step in memory: what is told of a budget."""

from dataclasses import dataclass

from autotuner.ir.numerics import CLASSES, Numerics
from autotuner.plan.phrases import binary
from autotuner.runtime.model_memory import StaticBytes
from autotuner.runtime.step_laps import StepLog


@dataclass(frozen=True)
class StepNeeds:
    """Needs of a training step, in bytes of the device's memory, its parameters and the optimizer's state among them.

    Args:
        budget_bytes: what it may need.
        least_bytes: the least budget, under which each region runs as lean as it can.
        predicted_bytes, measured_bytes: at its peak, as it runs now; `measured_bytes` is 0 before it did.
        reserved_bytes: the most that the allocator has taken from the device; 0 where it keeps nothing that is freed.
        regions, repeating: how many regions there are, and how many of them run their forward again in backward.
        least_us, time_us: what all regions take at their fastest, and as they run now.
        inexact: numerics classes in which regions save activations, each with how many of them do.
        keeping_bytes: a budget too small to keep memory from step to step has kernels built anew in each one, which is
            slow; this one is enough. 0 where memory is kept, or no budget would have it kept.
    """

    budget_bytes: int
    least_bytes: int
    predicted_bytes: int
    measured_bytes: int
    reserved_bytes: int
    regions: int
    repeating: int
    least_us: float
    time_us: float
    inexact: tuple[tuple[Numerics, int], ...] = ()
    keeping_bytes: int = 0

    @property
    def narrow(self) -> int:
        """Regions that save activations in a numerics class that is not exact, as `numerics="8-bit"` allows."""
        return sum(count for _, count in self.inexact)

    @property
    def most_bytes(self) -> int:
        """The most that a step took, or its allocator; 0 before it ran."""
        return max(self.measured_bytes, self.reserved_bytes)

    def __str__(self) -> str:
        slower = f", {self.time_us / self.least_us - 1:+.1%} of their time" if self.least_us else ""
        saving = "".join(f", {CLASSES[numerics].regions.format(count)}" for numerics, count in self.inexact)
        told = f"{binary(self.most_bytes)} measured" if self.most_bytes else f"{binary(self.predicted_bytes)} predicted"
        anew = f"; with {binary(self.keeping_bytes, up=True)}, kernels need not be built anew in each step"
        return (
            f"a step needs {told}, of a budget of {binary(self.budget_bytes)}; {self.repeating} of {self.regions} "
            f"regions run their forward again in backward{saving}{slower}{anew if self.keeping_bytes else ''}"
        )


@dataclass(frozen=True)
class FrontPoint:
    """A step under some budget: time and memory, as predicted.

    Args:
        budget_bytes: the least under which the regions run so.
        time_us: of all regions.
        repeating: how many of them run their forward again in backward.
    """

    budget_bytes: int
    time_us: float
    repeating: int


def told_too_small(budget_bytes: int, least_bytes: int, log: StepLog, static: StaticBytes) -> str:
    """Return a sentence on a budget that is too small, and on what takes the memory.

    Args:
        least_bytes: that would be enough.
        log: of a step in which all regions ran as lean as they can.
        static: what is there between steps.
    """
    lap, beside = log.highest, least_bytes - log.peak_bytes
    rest = max(0, log.peak_bytes - static.kept - static.gradients)
    gradients = (
        f"{binary(static.gradients)} of gradients, {binary(rest)} of all else"
        if static.gradients
        else f"{binary(rest)} of all else, gradients among it"
    )
    kept = f", {binary(beside)} that the allocator may take beside" if beside else ""
    where = lap.phase if lap.region is None else f"in the {lap.phase} of {lap.region.label}"
    return (
        f"memory_budget is {binary(budget_bytes)}, and a training step needs {binary(least_bytes, up=True)} at least, "
        f"with the forward of all {len(log.order)} tuned regions repeated in backward: {binary(static.parameters)} of "
        f"parameters and buffers, {binary(static.state)} of the optimizer's state, {gradients}{kept}. It needs most "
        f"{where}: give it more memory, or a smaller batch"
    )
