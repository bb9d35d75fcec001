"""Times of a training step, and how much of it tuned regions take."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from autotuner.runtime.coverage import percent
from autotuner.runtime.devices import device_runtime

KEPT = 15
"""So many of the last steps are kept."""
FIRST = 2
"""So many first steps are not: they compile the model and build kernels."""


@dataclass(frozen=True)
class StepShare:
    """The time of a training step, the median of the last ones, and the part of it that tuned regions take.

    Args:
        step_us: from the batch to the optimizer's step, as it ran.
        tuned_us: of the tuned regions in it, forward and backward: the sum of the times of their kernels, each as it
            was measured when the region was tuned.
    """

    step_us: float
    tuned_us: float

    @property
    def tuned_share(self) -> float:
        return self.tuned_us / self.step_us

    def __str__(self) -> str:
        if self.tuned_us > self.step_us:
            return (
                f"a training step takes {self.step_us:,.0f} us, and the kernels of its tuned regions were measured to "
                f"take {self.tuned_us:,.0f} us, more than all of it: tune again, with remeasure=True, on an idle device"
            )
        share = percent(self.tuned_us, self.step_us)
        return f"tuned regions take {self.tuned_us:,.0f} of {self.step_us:,.0f} us of a training step ({share})"


class StepTimes:
    """A clock of training steps: the device's stream where calls are queued, else the host. Nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._runtime = device_runtime(device)
        self._steps = 0
        self._kept: deque[tuple[Any, Any, float]] = deque(maxlen=KEPT)

    def now(self) -> Any:
        """Return a mark of this moment."""
        return self._runtime.mark()

    def keep(self, began: Any, tuned_us: float) -> None:
        """Keep a step that ends now.

        Args:
            began: the mark of its beginning.
            tuned_us: what tuned regions take in it.
        """
        self._steps += 1
        if self._steps > FIRST:
            self._kept.append((began, self.now(), tuned_us))

    def forget(self) -> None:
        """Leave out the steps so far, which did more than steps do."""
        self._kept.clear()

    def share(self) -> StepShare | None:
        """Return the time of a step, and what of it is tuned; None before there was one that can be timed.

        This waits for the last step, where calls are queued.
        """
        kept = list(self._kept)
        if not kept:
            return None
        self._runtime.synchronize()
        times = sorted((self._runtime.elapsed_us(began, ended), tuned_us) for began, ended, tuned_us in kept)
        return StepShare(*times[len(times) // 2])
