"""Processes that are started ahead, by the progress of a tuning run."""

import pytest

from autotuner.ir.models import Model
from autotuner.plan.request import Request
from autotuner.server.worker import ahead
from autotuner.server.worker.ahead import StartedAhead
from autotuner.tuner import Progress, Replay, Stage
from tests.made_up import HERE
from tests.server.worker.device import NoProcess


class Machine(Replay):
    """A measurer that can be begun, and may compile beside timing."""

    def __init__(self, *, beside: bool) -> None:
        super().__init__(HERE, {})
        self.beside, self.begun = beside, 0

    def begin(self) -> None:
        self.begun += 1

    @property
    def compiles_beside(self) -> bool:
        return self.beside


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "TimingProcess", NoProcess)


def told(watch: StartedAhead, *stages: Stage) -> NoProcess | None:
    for stage in stages:
        watch(Progress(stage, 0, 0))
    assert watch.process is None or isinstance(watch.process, NoProcess)
    return watch.process


def test_the_measuring_process_begins_with_the_space_and_what_times_end_to_end_once_all_is_measured(
    small: Model,
) -> None:
    heard: list[str] = []
    machine = Machine(beside=False)
    with StartedAhead(Request(small), machine, lambda progress: heard.append(progress.stage), 30, 1) as watch:
        assert told(watch, "space") is None
        assert machine.begun == 1
        assert told(watch, "search", "measure", "confirm") is None
        process = told(watch, "solve", "solve", "done")
        assert process is not None
        assert process.asked == [(small, "cpu", 30, 1)]
        assert process.compiles
        assert not process.is_closed
    assert process.is_closed
    assert machine.begun == 1
    assert heard == ["space", "search", "measure", "confirm", "solve", "solve", "done"]


def test_where_calls_may_be_compiled_beside_timing_it_imports_while_chosen_calls_are_confirmed(small: Model) -> None:
    with StartedAhead(Request(small), Machine(beside=True), lambda _: None, 0, None) as watch:
        assert told(watch, "measure") is None
        process = told(watch, "confirm", "confirm")
        assert process is not None
        assert process.asked == []
        assert told(watch, "solve") is process
        assert process.asked == [(small, "cpu", 0, None)]
        assert not process.compiles


def test_nothing_that_times_end_to_end_is_started_where_it_is_not_wanted_or_a_replay_measures(small: Model) -> None:
    with StartedAhead(Request(small), Replay(HERE, {}), lambda _: None, None, 1) as watch:
        assert told(watch, "space", "confirm", "solve") is None


def test_a_process_that_cannot_be_started_ahead_ends_nothing(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*, compiles: bool) -> NoProcess:  # noqa: ARG001
        raise BlockingIOError

    monkeypatch.setattr(ahead, "TimingProcess", none_left)
    with StartedAhead(Request(small), Machine(beside=True), lambda _: None, 30, 1) as watch:
        assert told(watch, "confirm", "solve", "done") is None


def test_it_is_ended_where_the_run_fails(small: Model) -> None:
    watch = StartedAhead(Request(small), Machine(beside=True), lambda _: None, 30, 1)

    def fail() -> None:
        with watch:
            told(watch, "confirm")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert isinstance(watch.process, NoProcess)
    assert watch.process.is_closed
