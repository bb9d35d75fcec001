"""The measurer of documents: recorded times of bert-encoder:tiny, made-up ones of all other calls."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autotuner.ir.autodiff import training_graph
from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.measure import Measurer, rotate_bytes
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.server.worker.ahead import StartedAhead
from autotuner.settings import Settings
from autotuner.tuner import MeasurerProtocol, Replay, Watch
from scripts.recorded import TINY

COMPILED_US = 10_000.0
"""What kernels that compile are made to take, so that a plan has none of them: compiling takes longer than all else."""


class RecordedTimes(Replay):
    """Says what a call took, or a time that follows from its key; nothing runs, and nothing is compiled."""

    def __enter__(self) -> "RecordedTimes":
        return self

    def __exit__(self, *ended: object) -> None:
        """Nothing is open."""

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for race in races:
            yield from ((call, self.recorded.get(call.key) or made_up(call)) for call in race)


def made_up(call: Call) -> Measurement:
    if KERNELS[call.candidate.kernel].compiles:
        return Measurement("ok", median_us=COMPILED_US)
    return Measurement("ok", median_us=1.0 + int(call.key[:8], 16) % 100)


def recorded(request: Request, settings: Settings) -> RecordedTimes:
    """Return the measurer of a request, in the environment that a real one has here."""
    real = Measurer(
        threads=settings.threads,
        timeout_s=settings.timeout_s,
        device_type=request.device_type,
        cache_dir=settings.cache_dir,
        rotate_bytes=rotate_bytes(training_graph(request.model.graph()), request.device_type),
    )
    return RecordedTimes(real.environment, TINY.measurements, TINY.ceilings)


class NotBegun:
    """Stands for a measurer whose process starts while a model is read."""

    waited_s = 0.0

    def __init__(self, _device_type: str, settings: Settings) -> None:
        self.settings = settings

    def __enter__(self) -> "NotBegun":
        return self

    def __exit__(self, *ended: object) -> None:
        """Nothing is open."""


def recorded_with(ahead: NotBegun, request: Request) -> RecordedTimes:
    return recorded(request, ahead.settings)


def untimed(found: Configuration, *_: Any, **__: Any) -> Configuration:
    """Return an answer as it is: timing it end to end takes a minute."""
    return found


class NoneAhead(StartedAhead):
    """Starts no process that would time an answer end to end: nobody asks it."""

    def __init__(self, request: Request, measurer: MeasurerProtocol, watch: Watch, *_: Any) -> None:
        super().__init__(request, measurer, watch, None, None)
