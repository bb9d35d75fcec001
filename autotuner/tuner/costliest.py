"""The calls of a plan that take longest, as progress shows them."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest

from autotuner.plan.step import Step

SHOWN = 5


@dataclass(frozen=True)
class PlannedCall:
    """A kernel call of a plan.

    Args:
        operators: what it computes; () for a conversion.
        kernel: that was chosen.
        outputs: (tensor, form) pairs that it writes.
        predicted_us: what it takes.
        share: of the time of the whole plan.
    """

    operators: tuple[str, ...]
    kernel: str
    outputs: tuple[tuple[str, str], ...]
    predicted_us: float
    share: float


def costliest(calls: Iterable[PlannedCall]) -> tuple[PlannedCall, ...]:
    """Return the calls that take longest, the longest first; five at most."""
    return tuple(nlargest(SHOWN, calls, key=lambda call: call.predicted_us))


def costliest_steps(steps: Iterable[Step], total_us: float) -> tuple[PlannedCall, ...]:
    """Return the same of the steps of a configuration, whose plan takes so long."""
    return costliest(
        PlannedCall(step.operators, step.kernel, step.outputs, step.predicted_us, share(step.predicted_us, total_us))
        for step in steps
    )


def share(us: float, total_us: float) -> float:
    """Return the share of a total; 0 of none."""
    return us / total_us if total_us else 0.0
