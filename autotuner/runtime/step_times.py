"""Times of a training step, and how much of it tuned regions take."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from autotuner.runtime.coverage import percent

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
    """A clock of training steps: of the host on the CPU, of the device's stream on CUDA, where nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda, self._device = device.type == "cuda", device
        self._steps = 0
        self._kept: deque[tuple[Any, Any, float]] = deque(maxlen=KEPT)

    def now(self) -> Any:
        """Return a mark of this moment."""
        if not self._on_cuda:
            return perf_counter()
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    def keep(self, began: Any, tuned_us: float) -> None:
        """Keep a step that ends now.

        Args:
            began: the mark of its beginning.
            tuned_us: what tuned regions take in it.
        """
        self._steps += 1
        if self._steps > FIRST:
            self._kept.append((began, self.now(), tuned_us))

    def share(self) -> StepShare | None:
        """Return the time of a step, and what of it is tuned; None before there was one that can be timed.

        On CUDA, this waits for the last step.
        """
        kept = list(self._kept)
        if not kept:
            return None
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        times = sorted((self._between(began, ended), tuned_us) for began, ended, tuned_us in kept)
        return StepShare(*times[len(times) // 2])

    def _between(self, began: Any, ended: Any) -> float:
        if self._on_cuda:
            return float(began.elapsed_time(ended)) * 1e3
        return float(ended - began) * 1e6
