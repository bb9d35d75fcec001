"""What a race needs of a device. `sampling` has it for the CPU, `sampling_cuda` for CUDA devices."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch

from autotuner.measure.policy import AnyPolicy

Run = Callable[[], Any]

CANARY_SAMPLES = 5


class Timed(Protocol):
    """One candidate, built on its operand sets and ready to be timed."""

    is_contended: bool
    """Whether others used the device during its last look or sample, which counts all the same."""

    def look(self) -> float:
        """Return microseconds of one call: what decides whether it is timed any further."""


class Timing(Protocol):
    """How calls are timed on one device, under one policy."""

    @property
    def policy(self) -> AnyPolicy: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def canary_extent(self) -> int:
        """Rows and columns of the matrices that the canary multiplies."""

    def sampler(self, runs: Sequence[Run]) -> Timed:
        """Make one candidate ready, which has a kernel for each operand set."""

    def lone(self, run: Run) -> Timed:
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
            LostError: it cannot be.
        """

    def contended(self) -> str | None:
        """Say in a sentence who else uses the device, or None where nobody is known to."""


class Canary:
    """A small matrix product that should always take the same time: where it does not, the machine has changed."""

    def __init__(self, timing: Timing) -> None:
        extent, self._timing = timing.canary_extent, timing
        self._a, self._b = torch.ones(2, extent, extent, device=timing.device)
        self._out = torch.empty(extent, extent, device=timing.device)
        self._sampler = timing.lone(self.run)
        self._reference_us = self._look()

    def run(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def drifted(self, share: float) -> bool:
        """Say whether it now differs by more than a share from last time, and take now as the new reference."""
        before_us, self._reference_us = self._reference_us, self._look()
        return abs(self._reference_us / before_us - 1) > share

    def _look(self) -> float:
        return median(self._timing.samples([self._sampler])[0][0] for _ in range(CANARY_SAMPLES))
