"""What measures for the tuner, and how far a walk is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from autotuner.records import Call, Environment, Measurement

Result = tuple[Call, Measurement]


class Asked(Protocol):
    """What measures for the tuner; `autotuner.measure.Measurer` is one, `Replay` another."""

    @property
    def environment(self) -> Environment: ...

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]: ...

    def measure(self, races: Sequence[Sequence[Call]]) -> Iterator[Result]: ...

    def noise_floor(self) -> float: ...


class Replay:
    """Recorded measurements in place of a device: answers what it knows, and nothing else.

    Args:
        environment: where they were recorded.
        recorded: measurements by call key.
    """

    def __init__(self, environment: Environment, recorded: Mapping[str, Measurement]) -> None:
        self.environment = environment
        self.recorded = recorded

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        yield from ((call, None) for call in calls)

    def measure(self, races: Sequence[Sequence[Call]]) -> Iterator[Result]:
        for race in races:
            yield from ((call, self.recorded[call.key]) for call in race if call.key in self.recorded)

    def noise_floor(self) -> float:
        return 0.0


Stage = Literal["space", "compile", "measure", "confirm", "solve", "end_to_end", "done"]


@dataclass(frozen=True)
class Progress:
    """How far a walk is, after each change.

    Args:
        stage: what happens now.
        done, total: calls of this stage.
        measured, reused, failed: calls of the whole walk so far.
        best_us: the best plan so far, predicted; None while there is none.
        bound_us: no plan takes less, whatever the calls will take that are not measured yet.
        eta_s: until this stage is over, at its pace so far; None while that is not known.
    """

    stage: Stage
    done: int
    total: int
    measured: int = 0
    reused: int = 0
    failed: int = 0
    best_us: float | None = None
    bound_us: float | None = None
    eta_s: float | None = None

    @property
    def gap(self) -> float | None:
        """By what share the best plan may be longer than the best there can be; None while that is not known."""
        if self.best_us is None or not self.bound_us:
            return None
        return max(0.0, self.best_us / self.bound_us - 1)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.gap}


Watch = Callable[[Progress], None]
