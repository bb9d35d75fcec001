"""A made-up GPU for actors: calls of any small model, at made-up times."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from autotuner.ir.records import Call, Measurement
from autotuner.tuner import Replay
from tests.made_up import HERE, times


class MadeUpGpu(Replay):
    """A GPU that takes `seconds` for each call."""

    processes = 1

    def __init__(self, seconds: float) -> None:
        super().__init__(HERE, {})
        self.uuid = f"GPU-{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        self._seconds = seconds

    def start(self) -> None:
        """Start nothing."""

    def close(self) -> None:
        """End nothing."""

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for race in races:
            for call in race:
                time.sleep(self._seconds)
                yield call, times([call.key])[call.key]


def made_up_gpu(_beside: Callable[[], int], *, seconds: float, **_others: Any) -> MadeUpGpu:
    """Return the measurer of a made-up GPU; the arguments of a real one are ignored."""
    return MadeUpGpu(seconds)
