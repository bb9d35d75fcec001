"""A CPU whose speed changes: the first answer takes what it predicts, or ends after some rounds. Made-up times."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest

from autotuner.database import Database
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement
from autotuner.measure.lock import Waiting
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Measured
from autotuner.plan.request import Request
from autotuner.server.worker import attending, tune_attended
from autotuner.settings import Settings, TuneOptions
from autotuner.tuner import Replay
from tests.made_up import CPU, HERE, space_of, times
from tests.server.worker.device import Device


@dataclass
class Changing:
    """A machine on which everything takes `slowness` times what is recorded, until it changes to another speed.

    Args:
        next_slowness: after each time that a whole plan is timed; the last one stays.
        changes_at: after so many calls, a few are answered while the speed changes.
    """

    small: Model
    slowness: float
    next_slowness: list[float]
    changes_at: tuple[int, int] = (0, 0)
    answered: list[str] = field(default_factory=list)
    off: list[float] = field(default_factory=list)

    def measuring(self, _: Request) -> nullcontext[Device]:
        machine, known = self, times(space_of(self.small).calls)

        class Clocked(Device):
            def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
                for call, found in Replay.measure(self, races):
                    first, last = machine.changes_at
                    drifted = first <= len(machine.answered) < last
                    machine.answered.append(call.key)
                    us = (found.median_us or 0.0) * machine.slowness * (3.0 if drifted else 1.0)
                    yield call, replace(found, median_us=us, marks=("drifted",) if drifted else ())

        return nullcontext(Clocked(HERE, known))

    def timing(self, found: Configuration, samples: int, _: Waiting) -> Configuration:
        """Time the whole at the next speed: what its calls are recorded to take, times as long."""
        graph, known = found.graph(), times(space_of(self.small).calls)
        self.slowness = self.next_slowness.pop(0) if self.next_slowness else self.slowness
        us = self.slowness * sum(known[step.measured_call(graph).key].median_us or 0.0 for step in found.steps)
        measured = Measured(us, 0.0, {"eager": 2 * us}, samples)
        self.off.append(measured.predicted_over_measured(found.certificate.predicted_us))
        return found.with_measured(measured)

    def first_answer(self, database: Database, asked: TuneOptions | None = None) -> Configuration:
        request = Request(self.small, options=asked or TuneOptions())
        return tune_attended(request, database, CPU, Settings(), measuring=self.measuring, timing=self.timing)


@pytest.fixture(autouse=True)
def has_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "_is_timed", lambda _: True)


@pytest.mark.slow
@pytest.mark.parametrize("slowness", [0.77, 1.3])
@pytest.mark.parametrize("asked", [TuneOptions(), TuneOptions(remeasure=True)], ids=["as it is", "remeasured"])
def test_where_the_speed_changes_before_the_whole_is_timed_the_first_answer_is_within_a_tenth(
    slowness: float, asked: TuneOptions, small: Model, database: Database
) -> None:
    machine = Changing(small, slowness, [1.0])
    found = machine.first_answer(database, asked)
    count = len(space_of(small).calls)
    assert [round(off, 2) for off in machine.off] == [round(slowness - 1, 2), 0.0]
    assert found.measured is not None
    assert abs(found.measured.predicted_over_measured(found.certificate.predicted_us)) < 0.1
    assert found.counts["measured"] == count
    # Every call and the chosen ones once more, then these again.
    assert len(machine.answered) < 2 * count
    (job,) = database.queue.jobs()
    assert (job.progress["stage"], job.progress["measured"]) == ("end_to_end", count)
    stored = database.configurations.get(job.configuration_id or 0)
    assert stored.complete
    assert stored.measured_us == found.measured.plan_us


def test_a_steady_machine_is_timed_once(small: Model, database: Database) -> None:
    machine = Changing(small, 1.0, [])
    assert not machine.first_answer(database).doubts
    assert machine.off == [0.0]


@pytest.mark.slow
def test_a_machine_that_is_never_steady_gets_a_doubtful_answer_after_some_rounds(
    small: Model, database: Database
) -> None:
    machine = Changing(small, 1.0, [2.0, 4.0, 8.0, 16.0])
    found = machine.first_answer(database)
    assert [round(off, 2) for off in machine.off] == [-0.5, -0.5, -0.5]
    assert [doubt.reason for doubt in found.doubts] == ["end_to_end"]


def test_calls_that_were_timed_while_the_speed_changed_are_timed_again_in_the_same_tuning(
    small: Model, database: Database
) -> None:
    count = len(space_of(small).calls)
    machine = Changing(small, 1.0, [], changes_at=(count // 3, count // 2))
    found = machine.first_answer(database)
    assert not found.doubts
    assert machine.off == [0.0]
    again = set(machine.answered[count // 3 : count // 2])
    assert all(machine.answered.count(key) >= 2 for key in again)
    known = times(space_of(small).calls)
    assert database.find(HERE.key, tuple(again)) == {key: known[key] for key in again}


def test_where_every_timing_is_of_a_changing_machine_each_call_has_three_rounds_and_a_mark(
    small: Model, database: Database
) -> None:
    machine = Changing(small, 1.0, [3.0], changes_at=(0, 10**6))
    found = machine.first_answer(database)
    assert [doubt.reason for doubt in found.doubts] == ["drifted"]
    assert max(map(machine.answered.count, machine.answered)) <= 4
