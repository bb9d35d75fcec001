"""What measures for the tuner, and how far a walk is."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import Any, Literal, Protocol

from autotuner.ir.records import Call, Environment, Measurement
from autotuner.measure.roofline import NO_ROOFLINE, Roofline
from autotuner.tuner.outlook import gap

Result = tuple[Call, Measurement]


class Asked(Protocol):
    """What measures for the tuner; `autotuner.measure.Measurer` is one, `Replay` another."""

    @property
    def environment(self) -> Environment: ...

    waited_s: float
    """For how long it has waited for the device, which somebody else held."""

    def hear(self, tell: Callable[[str], None]) -> None:
        """Have told who holds the device while that is waited for, and "" when that is over."""

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]: ...

    def measure(self, races: Sequence[Sequence[Call]]) -> Iterator[Result]: ...

    def noise_floor(self) -> float: ...

    def ceilings(self, dtypes: Collection[str]) -> Roofline: ...


class Replay:
    """Recorded measurements in place of a device: answers what it knows, and nothing else.

    Args:
        environment: where they were recorded.
        recorded: measurements by call key.
        ceilings: what that device can do at best; without them, a call that is not measured may cost nothing.
    """

    def __init__(
        self, environment: Environment, recorded: Mapping[str, Measurement], ceilings: Roofline = NO_ROOFLINE
    ) -> None:
        self.environment = environment
        self.recorded = recorded
        self.recorded_ceilings = ceilings
        self.waited_s = 0.0

    def hear(self, tell: Callable[[str], None]) -> None:
        """Never wait."""

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        yield from ((call, None) for call in calls)

    def measure(self, races: Sequence[Sequence[Call]]) -> Iterator[Result]:
        for race in races:
            yield from ((call, self.recorded[call.key]) for call in race if call.key in self.recorded)

    def noise_floor(self) -> float:
        return 0.0

    def ceilings(self, dtypes: Collection[str]) -> Roofline:  # noqa: ARG002
        return self.recorded_ceilings


@dataclass(frozen=True)
class Spent:
    """What a job has used of its limits, by whoever ran it until now.

    Args:
        seconds: of working on it.
        measurements: that were new.
    """

    seconds: float = 0.0
    measurements: int = 0

    def and_since(self, began: float) -> "Spent":
        """Return this with the seconds since a moment, by `time.monotonic`."""
        return replace(self, seconds=self.seconds + monotonic() - began)

    @classmethod
    def of(cls, progress: Mapping[str, Any]) -> "Spent":
        """Read what a job's progress says of it; nothing where it says nothing."""
        return cls(float(progress.get("spent_s", 0.0)), int(progress.get("spent_measurements", 0)))


NOTHING_SPENT = Spent()

Stage = Literal["space", "search", "ceilings", "compile", "measure", "confirm", "solve", "end_to_end", "done"]


@dataclass(frozen=True)
class Progress:
    """How far a walk is, after each change.

    Args:
        stage: what happens now.
        done, total: calls of this stage.
        measured, reused, failed: calls of the whole walk so far.
        best_us: the best plan so far, predicted; None while there is none.
        bound_us: no plan takes less, whatever the calls will take that are not measured yet.
        estimated_us: by learned costs of those calls, no plan takes less.
        eta_s: until this stage is over, at its pace so far; None while that is not known.
        spent_s, spent_measurements: of the job's limits, those before it was taken once more included.
        note: what is waited for now, and who has it; "" while nothing is.
    """

    stage: Stage
    done: int
    total: int
    measured: int = 0
    reused: int = 0
    failed: int = 0
    best_us: float | None = None
    bound_us: float | None = None
    estimated_us: float | None = None
    eta_s: float | None = None
    spent_s: float = 0.0
    spent_measurements: int = 0
    note: str = ""

    @property
    def gap(self) -> float | None:
        """By what share the best plan may be longer than the best there can be; None while that is not known."""
        return gap(self.best_us, self.bound_us)

    @property
    def estimated_gap(self) -> float | None:
        """The same against what learned costs make of the best there can be: an expectation, no proof."""
        return gap(self.best_us, self.estimated_us)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.gap, "estimated_gap": self.estimated_gap}


Watch = Callable[[Progress], None]
