"""Protocols of timing on a device, which a race uses, and the canary that notices when the device changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from autotuner.measure.policy import Policy

Run = Callable[[], Any]

CANARY_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Sweep:
    """Amounts of work by which the roofline of a device is measured.

    Args:
        bytes_max: moved at most. Above that its own bandwidth counts: no more than a device's memory has, where it is
            beyond every cache.
        extents: of the cubes that are multiplied.
        full_waves: whether a cube may leave most of the device idle in its last wave.
        passes: over all amounts, one after the other: what disturbs one pass is over in the next. The least counts.
    """

    bytes_max: int
    extents: tuple[int, ...]
    full_waves: bool = False
    passes: int = 2


class Sampler(Protocol):
    """One candidate, built on its operand sets and ready to be timed."""

    is_contended: bool
    """True if others used the device during its last look or sample, which counts all the same."""

    def look(self) -> float:
        """Return microseconds of one call: what decides whether it is timed any further."""


class Timer(Protocol):
    """Times calls on one device, under one policy."""

    @property
    def policy(self) -> Policy: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def canary_extent(self) -> int:
        """Rows and columns of the matrices that the canary multiplies."""

    @property
    def sweep(self) -> Sweep: ...

    def brief(self) -> "Timer":
        """Return a timer with shorter samples, where these are no worse."""

    def sampler(self, runs: Sequence[Run]) -> Sampler:
        """Make one candidate ready, which has a kernel for each operand set."""

    def lone(self, run: Run) -> Sampler:
        """Make a kernel ready that is timed by itself: nothing else runs in between."""

    def samples(self, samplers: Sequence[Any]) -> list[tuple[float, float]]:
        """Take one sample each of as many as are taken together, from the first on.

        Args:
            samplers: what `sampler` and `lone` made.

        Returns:
            Microseconds of one call, and microseconds that taking the sample took.
        """

    def allocated_bytes(self, run: Run) -> int:
        """Run a kernel and return the most bytes that it allocates meanwhile."""

    def recover(self, error: BaseException) -> None:
        """Make the device usable after a call has failed.

        Raises:
            ContextLostError: it cannot be.
        """

    def release(self) -> None:
        """Give back memory of the device that is held for later tensors."""

    def contended(self, compilers: int = 0) -> str | None:
        """Say in a sentence who else uses the device, or None where nobody is known to.

        Args:
            compilers: processes that compile for the same tuning, and rest.
        """


class Canary:
    """A small matrix product that should always take the same time: where it does not, the machine has changed."""

    def __init__(self, timer: Timer) -> None:
        extent, self._timer = timer.canary_extent, timer
        self._a, self._b = torch.ones(2, extent, extent, device=timer.device)
        self._out = torch.empty(extent, extent, device=timer.device)
        self._sampler = timer.lone(self.run)
        self._reference_us = self._look()

    def run(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def drifted(self, share: float) -> bool:
        """Say whether it now differs by more than a share from last time, and take now as the new reference."""
        before_us, self._reference_us = self._reference_us, self._look()
        return abs(self._reference_us / before_us - 1) > share

    def _look(self) -> float:
        return median(self._timer.samples([self._sampler])[0][0] for _ in range(CANARY_SAMPLES))
