"""What measures for the tuner, and how far a walk is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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


@dataclass(frozen=True)
class Progress:
    """How far a walk is, after each change.

    `stage` is what happens now; `done` of `total` are calls of this stage.
    """

    stage: Literal["space", "compile", "measure", "confirm", "solve", "done"]
    done: int
    total: int
    reused: int = 0
    failed: int = 0


Watch = Callable[[Progress], None]
