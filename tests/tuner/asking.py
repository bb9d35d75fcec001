"""A measurer for tests of tuning runs: answers from made-up or recorded measurements, and keeps what it was asked."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autotuner import tuner
from autotuner.database import Database
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Environment, Measurement
from autotuner.measure.roofline import NO_ROOFLINE, Roofline
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.settings import TuneOptions
from autotuner.space import SpaceFile
from autotuner.tuner import MeasurerProtocol, Replay, TuningPolicy, Watch
from tests.made_up import HERE


class Asking(Replay):
    """A replay that keeps what it was asked, first and once more, and may be interrupted after some results."""

    def __init__(
        self,
        recorded: Mapping[str, Measurement],
        environment: Environment = HERE,
        stop_after: int | None = None,
        ceilings: Roofline = NO_ROOFLINE,
    ) -> None:
        super().__init__(environment, recorded, ceilings)
        self.compiled: list[str] = []
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.confirmed: list[str] = []
        self.stop_after = stop_after

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        self.compiled += [call.key for call in calls]
        return super().prepare(calls)

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for race in races:
            keys = [call.key for call in race]
            self.confirmed += [key for key in keys if key in self.asked]
            self.asked += [key for key in keys if key not in self.confirmed]
            for call, measurement in super().measure([race]):
                if len(self.answered) == self.stop_after:
                    raise KeyboardInterrupt
                self.answered.append(call.key)
                yield call, measurement


def tune(
    model: Model,
    file: SpaceFile,
    database: Database,
    measurer: MeasurerProtocol,
    *,
    watch: Watch = lambda _: None,
    policy: TuningPolicy | None = None,
    **asked: Any,
) -> Configuration:
    """Tune; what is asked beside the model is given by name, as in `TuneOptions`."""
    policy = policy or TuningPolicy()
    request = Request(model, options=TuneOptions(**asked))
    return tuner.tune(request, file, database, measurer, watch=watch, policy=policy).configuration
