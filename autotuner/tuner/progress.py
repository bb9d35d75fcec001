"""Progress of a tuning run, and the protocol of the measurer that it uses."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from time import monotonic
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from autotuner.ir.records import Call, Environment, Measurement
from autotuner.measure.roofline import NO_ROOFLINE, Roofline
from autotuner.tuner.costliest import PlannedCall

Result = tuple[Call, Measurement]

ROUNDING = 1e-9


class MeasurerProtocol(Protocol):
    """Interface of a measurer, as `autotuner.measure.Measurer` and `Replay` implement it."""

    @property
    def environment(self) -> Environment: ...

    @property
    def devices(self) -> int:
        """The number of devices that time calls at once, all of the same environment."""

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for a device that another process held."""

    def hear(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called with the holder of the device while it is waited for, and with "" when that is over."""

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        """Compile calls, and yield each with None, or with the measurement that says why it failed."""

    @property
    def compiles_beside(self) -> bool:
        """True where calls may be compiled while others are timed."""

    def compile_beside(self, calls: Sequence[Call]) -> None:
        """Have calls compiled in this order while others are timed, in place of those that wait for it.

        Where no calls are given, compiling ends.
        """

    def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
        """Return the calls whose compilation has ended since this was asked: with None, or with why it failed."""

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        """Time races, and yield each result as it comes, of any race that is under way.

        A race is taken from `races` when a device is free for it, in the thread that iterates: the caller may still
        decide by then that it is not needed. An empty race says that the next one is still to be compiled: another is
        taken when some call is. Closing the iterator gives up what is under way.
        """

    def noise_floor(self) -> float: ...

    def ceilings(self, dtypes: Collection[str]) -> Roofline: ...


class Shared(Protocol):
    """A run whose calls other runs may be timing as well."""

    under_way: set[str]
    """Keys of calls that were sent and have no result yet."""

    def look_up_again(self, calls: Sequence[Call]) -> None:
        """Look up calls that were sent: those that other runs have stored become known, and are no longer under way."""

    def flush(self) -> None:
        """Store the results that are not stored yet."""


@runtime_checkable
class SharingMeasurer(Protocol):
    """A measurer whose devices several runs use at once, and that times what they have in common once."""

    def measure_shared(self, races: Iterable[Sequence[Call]], run: Shared) -> Iterator[Result]:
        """Time races as `measure` does, less what other runs have stored by the time a device is free for it.

        What another run has in hand comes last, and is then looked up. Each result is stored before the next one is
        yielded, while there are other runs.
        """


class Replay:
    """A measurer that answers from recorded measurements, and leaves out what is not recorded.

    Args:
        environment: of the recording.
        recorded: measurements by call key.
        ceilings: the roofline of that device; without it, the bound of a call that is not measured is 0.
    """

    def __init__(
        self, environment: Environment, recorded: Mapping[str, Measurement], ceilings: Roofline = NO_ROOFLINE
    ) -> None:
        self.environment = environment
        self.recorded = recorded
        self.recorded_ceilings = ceilings
        self.waited_s = 0.0

    @property
    def devices(self) -> int:
        return 1

    def hear(self, tell: Callable[[str], None]) -> None:
        """Never wait."""

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        yield from ((call, None) for call in calls)

    @property
    def compiles_beside(self) -> bool:
        return False

    def compile_beside(self, calls: Sequence[Call]) -> None:
        """Compile nothing."""

    def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
        return ()

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        for race in races:
            yield from ((call, self.recorded[call.key]) for call in race if call.key in self.recorded)

    def noise_floor(self) -> float:
        return 0.0

    def ceilings(self, dtypes: Collection[str]) -> Roofline:  # noqa: ARG002
        return self.recorded_ceilings


@dataclass(frozen=True)
class Spent:
    """The part of a job's limits that is used up, by every worker that ran it.

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
        """Read it from a job's progress; nothing is spent where that does not say."""
        return cls(float(progress.get("spent_s", 0.0)), int(progress.get("spent_measurements", 0)))


NOTHING_SPENT = Spent()

Stage = Literal["space", "search", "ceilings", "compile", "measure", "confirm", "solve", "end_to_end", "done"]
ORDER: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Progress:
    """Progress of a tuning run, told after each change.

    Args:
        stage: the current one.
        done, total: calls of this stage.
        measured, reused, failed: calls of the whole run so far.
        refused: of the failed ones, those that a kernel refused.
        best_us: predicted time of the best plan so far; None while there is none.
        bound_us: proven: no plan takes less, however long the calls take that are not measured yet.
        estimated_us: by learned costs of those calls, no plan takes less.
        eta_s: until this stage is over, at its pace so far, or the limit is reached; None while that is not known.
        left_s: until the plan is chosen, at the pace of each stage so far; None while the calls of some stage, or how
            long they take, are not known. Timing the plan end to end comes on top.
        spent_s, spent_measurements: of the job's limits, by every worker that ran it.
        default_us: predicted time of every operator alone, with every tensor as declared; None while that is not known.
        default_is_marked: some of those times were taken while the device was busy or changed its speed.
        note: the holder of a device that is waited for; "" while none is.
        costliest: the calls of the best plan so far that take longest, the longest first; five at most.
    """

    stage: Stage
    done: int
    total: int
    _: KW_ONLY
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
    default_us: float | None = None
    default_is_marked: bool = False
    left_s: float | None = None
    refused: int = 0
    costliest: tuple[PlannedCall, ...] = ()

    @property
    def stage_number(self) -> int:
        """The place of the stage among all that a run may have, from 1; a run that is done is at the last one."""
        return min(ORDER.index(self.stage) + 1, self.stages)

    @property
    def stages(self) -> int:
        """The number of stages that a run may have. Few runs have all, and some stages come again."""
        return len(ORDER) - 1

    @property
    def gap(self) -> float | None:
        """The share by which the best plan may be longer than the optimum; None while that is not known."""
        return gap(self.best_us, self.bound_us)

    @property
    def estimated_gap(self) -> float | None:
        """The same by learned costs: an expectation, no proof."""
        return gap(self.best_us, self.estimated_us)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.gap, "estimated_gap": self.estimated_gap}


Watch = Callable[[Progress], None]


def gap(best_us: float | None, bound_us: float | None) -> float | None:
    """Return by what share one time lies above another, not less than 0; None where one is not known, or is 0."""
    if best_us is None or not bound_us:
        return None
    above = best_us / bound_us - 1
    return above if above > ROUNDING else 0.0
