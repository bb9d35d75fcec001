"""A measurer that answers from a recorded sweep and takes as long as a GPU would: for fleets without GPUs."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from autotuner.checkpoint import checkpoint
from autotuner.fleet.actor import CANARY
from autotuner.ir.records import Call, Measurement
from autotuner.measure.roofline import Roofline
from autotuner.tuner import Replay
from scripts.recorded import RECORDINGS

CANARY_US = 200.0


class ReplayingMeasurer(Replay):
    """A recorded GPU: each call takes `seconds`; calls named in `deadly` end the process, as a fault of the host would.

    Args:
        recording: "large" (an H200) or "tiny".
        seconds: that a call takes; 0.026 on the H200.
        deadly: keys of calls.
        canary: factors of the canary's time by GPU number, 1 for the others.
    """

    def __init__(self, recording: str, seconds: float, deadly: Sequence[str], canary: dict[str, float]) -> None:
        found = RECORDINGS[recording]
        super().__init__(found.environment, found.measurements, found.ceilings)
        self._seconds, self._deadly, self._canary = seconds, set(deadly), canary

    @cached_property
    def uuid(self) -> str:
        return f"GPU-{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"

    processes = 1

    def start(self) -> None:
        """Start nothing."""

    def close(self) -> None:
        """End nothing."""

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for race in races:
            for call in race:
                checkpoint()
                if call.key == CANARY.key:
                    us = CANARY_US * self._canary.get(self.uuid.removeprefix("GPU-"), 1.0)
                    yield call, Measurement("ok", us, us, us)
                    continue
                if call.key in self._deadly:
                    os._exit(1)
                time.sleep(self._seconds)
                if call.key in self.recorded:
                    yield call, self.recorded[call.key]

    def ceilings(self, dtypes: object) -> Roofline:  # noqa: ARG002
        return self.recorded_ceilings


def replaying(
    _beside: Callable[[], int],
    *,
    recording: str = "large",
    seconds: float = 0.026,
    deadly: Sequence[str] = (),
    canary: dict[str, float] | None = None,
    **_others: Any,
) -> ReplayingMeasurer:
    """Return the measurer of a made-up GPU; the arguments of a real one are ignored."""
    return ReplayingMeasurer(recording, seconds, deadly, canary or {})
