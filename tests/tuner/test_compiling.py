"""Calls that are compiled while others are timed: each is timed once it is compiled, and the answer is the same."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest

from autotuner.database import Database
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.measure.roofline import Roofline
from autotuner.settings import Limits
from autotuner.solve import exact
from autotuner.solve.problem.formulate import formulate
from autotuner.tuner import Progress
from autotuner.tuner import state as state_module
from autotuner.tuner.compiling import Compilation
from autotuner.tuner.state import TuningState
from tests.made_up import CPU, space_of, times
from tests.tuner.asking import Asking, tune
from tests.tuner.beside import CompilingBeside
from tests.tuner.conftest import Recorded


class Beside(CompilingBeside, Asking):
    """Answers from recorded measurements, and compiles beside that."""


def compiling(small: Model) -> set[str]:
    return {key for key, call in space_of(small).calls.items() if KERNELS[call.candidate.kernel].compiles}


@pytest.mark.parametrize("asked", [{}, {"gap": 0.0}], ids=["everything", "what matters"])
def test_a_run_finds_the_same_whether_it_compiles_ahead_or_beside(small: Model, database: Database, asked: Any) -> None:
    known = times(space_of(small).calls)
    measurer = Beside(known)
    stages: list[Progress] = []
    found = tune(small, CPU, database, measurer, watch=stages.append, **asked)
    ahead = tune(small, CPU, database, Asking(known), remeasure=True, **asked)
    assert found.steps == ahead.steps
    assert found.certificate.predicted_us == ahead.certificate.predicted_us
    assert measurer.order
    assert sorted(measurer.order) == sorted(set(measurer.order)) == sorted(compiling(small) & set(measurer.asked))
    assert stages[-1].stage == "done"


def test_what_needs_no_compiler_is_timed_while_the_rest_is_compiled(small: Model, database: Database) -> None:
    measurer = Beside(times(space_of(small).calls))
    tune(small, CPU, database, measurer)
    first = min(measurer.answered.index(key) for key in compiling(small))
    assert first >= 2
    assert measurer.rested <= len(compiling(small)), "races wait only where there is no other"


def test_what_does_not_compile_beside_timing_is_stored_and_not_timed(small: Model, database: Database) -> None:
    class Unbuilt(Beside):
        def fails(self, _call: Call) -> Measurement | None:
            return Measurement("error", message="no compiler")

    measurer = Unbuilt(times(space_of(small).calls))
    stages: list[Progress] = []
    found = tune(small, CPU, database, measurer, watch=stages.append)
    measuring = [(progress.done, progress.total) for progress in stages if progress.stage == "measure"]
    assert measuring[-1] == (len(space_of(small).calls),) * 2
    assert compiling(small)
    assert set(measurer.asked) == set(space_of(small).calls) - compiling(small)
    assert found.counts["status_error"] == len(compiling(small))


def test_a_limit_of_seconds_gives_up_what_is_not_compiled_by_then(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that each race that cannot begin moves on by ten seconds."""
    now = [0.0]
    monkeypatch.setattr(state_module, "monotonic", lambda: now[0])

    class Slow(Beside):
        def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
            now[0] += 10.0 if not self.waiting else 1.0
            return ()

    measurer = Slow(times(space_of(small).calls))
    found = tune(small, CPU, database, measurer, limits=Limits(seconds=60.0))
    assert set(measurer.asked) == set(space_of(small).calls) - compiling(small)
    assert found.counts["unknown"] == len(compiling(small))
    assert measurer.waiting == []


def test_what_was_given_up_is_compiled_when_it_is_asked_for_again(small: Model) -> None:
    space = space_of(small)
    call = space.calls[min(compiling(small))]
    compilation = Compilation(Beside({}), TuningState(space, lambda _: None))
    compilation.beside([call])
    assert compilation.give_up() == {call.key}
    assert compilation.is_compiled([call])
    compilation.beside([call])
    assert not compilation.is_compiled([call])


def test_nothing_begins_to_be_compiled_once_the_time_for_that_is_over(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(state_module, "monotonic", lambda: now[0])

    class Late(Beside):
        begun = 0

        def compile_beside(self, calls: Sequence[Call]) -> None:
            self.begun += bool(calls)
            super().compile_beside(calls)

        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
            for found in super().measure(races):
                now[0] = 81.0  # the first calls of all took long
                yield found

    measurer = Late(times(space_of(small).calls))
    found = tune(small, CPU, database, measurer, limits=Limits(seconds=100.0))
    assert measurer.begun == 0
    assert set(measurer.asked) == set(space_of(small).calls) - compiling(small)
    assert found.counts["unknown"] == len(compiling(small))


def test_the_noise_floor_is_not_measured_behind_the_limit(small: Model, database: Database) -> None:
    class Quiet(Beside):
        asked_for_noise = 0

        def noise_floor(self) -> float:
            self.asked_for_noise += 1
            return super().noise_floor()

    measurer = Quiet(times(space_of(small).calls))
    assert tune(small, CPU, database, measurer, limits=Limits(seconds=1e-9)).certificate.noise_floor is None
    assert measurer.asked_for_noise == 0
    tune(small, CPU, database, measurer)
    assert measurer.asked_for_noise == 1


class Roofed(Beside):
    """Has ceilings, and says when they and what is compiled were asked for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.events: list[str] = []

    def ceilings(self, dtypes: Collection[str]) -> Roofline:
        self.events.append("ceilings")
        return super().ceilings(dtypes)

    def compile_beside(self, calls: Sequence[Call]) -> None:
        self.events.append("compile" if calls else "give up")
        super().compile_beside(calls)

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for found in super().measure(races):
            self.events.append("measured")
            yield found


LIMITED: dict[str, Any] = {"limits": Limits(seconds=1000.0)}
"""Of what is asked of a run, which then looks for what is likely first."""


def roofed(recorded: Recorded) -> Roofed:
    return Roofed(recorded.measurements, recorded.environment, ceilings=recorded.ceilings)


@pytest.mark.slow
def test_what_is_likely_to_be_timed_is_compiled_while_the_first_plan_is_measured(
    recorded: Recorded, database: Database
) -> None:
    measurer = roofed(recorded)
    found = tune(recorded.model, recorded.file, database, measurer, **LIMITED, gap=0.5)
    assert measurer.events[:3] == ["ceilings", "compile", "measured"]
    assert measurer.events.count("ceilings") == 1
    opening = measurer.answered[: len(recorded.model.graph().operators)]
    assert not [key for key in opening if KERNELS[recorded.space.calls[key].candidate.kernel].compiles]
    assert len(measurer.order) == len(set(measurer.order)), "nothing is compiled twice"
    costs = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    best_us = exact(formulate(recorded.space).priced(costs).problem).total_us
    assert best_us * (1 - 1e-12) <= found.certificate.predicted_us <= 1.02 * best_us


@pytest.mark.parametrize("asked", [{}, {**LIMITED, "exhaustive": True}], ids=["no limit", "everything"])
def test_nothing_is_likely_where_there_is_no_limit_or_all_is_measured(
    recorded: Recorded, database: Database, asked: Any
) -> None:
    measurer = roofed(recorded)
    tune(recorded.model, recorded.file, database, measurer, **asked)
    assert measurer.events.index("measured") < measurer.events.index("ceilings")


@pytest.mark.slow
def test_a_likely_call_that_cannot_be_compiled_is_known_as_failed(recorded: Recorded, database: Database) -> None:
    class Unbuilt(Roofed):
        def fails(self, _call: Call) -> Measurement | None:
            return Measurement("error", message="no compiler")

    measurer = Unbuilt(recorded.measurements, recorded.environment, ceilings=recorded.ceilings)
    found = tune(recorded.model, recorded.file, database, measurer, **LIMITED, gap=0.5)
    assert found.counts["status_error"] == len(measurer.order) > 0
    assert not set(measurer.order) & set(measurer.asked)


def test_what_is_likely_is_given_up_where_the_first_plan_is_interrupted(recorded: Recorded, database: Database) -> None:
    measurer = Roofed(recorded.measurements, recorded.environment, 2, recorded.ceilings)
    with pytest.raises(KeyboardInterrupt):
        tune(recorded.model, recorded.file, database, measurer, **LIMITED)
    assert measurer.events[-1] == "give up"
    assert measurer.waiting == []
