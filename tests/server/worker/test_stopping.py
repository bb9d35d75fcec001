"""Jobs that are cancelled, stopped at a limit, or refused, in every stage; a replay answers in the device's place."""

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from autotuner.checkpoint import OverError, checkpoint, until
from autotuner.database import Database, Job
from autotuner.errors import InfeasibleError, MeasureError, SpaceError, TunedWarning
from autotuner.ir.models import Model, named_model
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.server.worker import ahead, attending, loop, reporting, run, timing
from autotuner.settings import Limits
from autotuner.solve import exact
from autotuner.solve.problem.formulate import SpaceProblem, formulate
from autotuner.space import build_space, enumeration
from autotuner.tuner import (
    Progress,
    Spent,
    TuningPolicy,
    answer,
    explanation,
    measuring,
    relaxation,
    solving,
    tuning,
)
from tests.made_up import HERE, made_up_configuration, space_of, times
from tests.server.worker import device as device_tests
from tests.server.worker.device import Device, NoProcess, enqueue, taken, timed

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
LAZY = TuningPolicy(few_calls=0)


@pytest.fixture(autouse=True)
def device(small: Model, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(HERE, times(space_of(small).calls))
    for module in (attending, loop):
        monkeypatch.setattr(module, "Measurer", lambda **_: found)
    monkeypatch.setattr(attending, "_is_timed", lambda _: True)
    monkeypatch.setattr(attending, "time_apart", timed)
    monkeypatch.setattr(ahead, "TimingProcess", NoProcess)
    monkeypatch.setattr(reporting, "BEAT_S", 0.02)
    return found


run_taken = partial(device_tests.run_taken, policy=LAZY)


def submitted(database: Database, model: Model, **asked: Any) -> Job:
    """Return a job that was submitted, and taken by a worker."""
    enqueue(database, model, **asked)
    return taken(database)


STAGES: dict[str, tuple[object, str]] = {
    "space": (tuning, "build_space"),
    "search": (measuring, "known_by_cell"),
    "ceilings": (Device, "ceilings"),
    "compile": (Device, "prepare"),
    "measure": (Device, "measure"),
    "look": (relaxation, "bounds"),
    "confirm": (measuring, "solved"),
    "noise": (Device, "noise_floor"),
    "solve": (answer, "solved"),
    "explain": (explanation, "alternatives"),
    "baseline": (solving, "solve_in_order"),
    "end_to_end": (attending, "time_apart"),
}
"""What is done in each stage."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_that_is_cancelled_ends_in_whatever_stage_it_is(
    stage: str, small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(database, small)

    def endless(*_: object, **__: object) -> None:
        database.queue.cancel(job.id)
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S:
            checkpoint()
            time.sleep(0.01)
        pytest.fail("nobody ended it")

    owner, name = STAGES[stage]
    monkeypatch.setattr(owner, name, endless)
    assert run_taken(job, database) is None
    assert database.queue.job(job.id).state == "cancelled"


LIMITED = [stage for stage in STAGES if stage not in ("space", "search", "solve", "explain", "baseline")]
"""Stages that end at a limit by a checkpoint. Without a space there is no plan, a solution is told when to be there,
and here are no cells to search."""


@pytest.mark.parametrize("stage", LIMITED)
def test_a_job_ends_with_a_plan_at_its_limit_in_whatever_stage_it_is(
    stage: str, small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    real, missing = getattr(*STAGES[stage]), measuring.measure_missing
    has_opened = False

    def slow(*given: Any, **named: Any) -> Any:
        while has_opened and time.monotonic() - began < PATIENCE_S:
            checkpoint()
            time.sleep(0.01)
        return real(*given, **named)

    def opened(*given: Any, **named: Any) -> Any:
        nonlocal has_opened
        has_opened = True
        return missing(*given, **named)

    owner, name = STAGES[stage]
    monkeypatch.setattr(owner, name, slow)
    monkeypatch.setattr(tuning, "measure_missing", opened)
    expected: AbstractContextManager[Any] = nullcontext()
    if stage == "end_to_end":
        expected = pytest.warns(UserWarning, match="not timed end to end: the limit of 1.5 s was reached")
    with expected:
        assert run_taken(submitted(database, small, limits=Limits(seconds=1.5)), database) is not None
    assert time.monotonic() - began < PATIENCE_S


def test_what_times_end_to_end_is_not_started_behind_the_limit(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attending, "time_apart", lambda *_, **__: pytest.fail("it was started"))
    with pytest.warns(UserWarning, match="not timed end to end: the limit of 1e-09 s was reached"):
        assert run_taken(submitted(database, small, limits=Limits(seconds=1e-9)), database) is not None


def test_a_space_has_a_limit_of_its_own(small: Model, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object, **__: object) -> None:
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S:
            checkpoint()
        pytest.fail("nobody ended it")

    monkeypatch.setattr(tuning, "build_space", endless)
    job = submitted(database, small, limits=Limits(seconds=0.1))
    with pytest.raises(InfeasibleError, match=r"the space was not enumerated within 0\.5 s"):
        run_taken(job, database, policy=TuningPolicy(space_s=0.5))


def test_a_solution_of_a_job_at_its_limit_is_asked_for_in_a_time(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []
    real = exact

    def noted(problem: Any, *, time_limit_s: float | None = None) -> Any:
        asked.append(time_limit_s)
        return real(problem, time_limit_s=time_limit_s)

    def anew(unpriced: SpaceProblem, *given: Any) -> Any:
        return solving.solved(formulate(unpriced.space), *given)  # otherwise confirming has solved it

    monkeypatch.setattr(solving, "exact", noted)
    monkeypatch.setattr(answer, "solved", anew)
    run_taken(submitted(database, small, limits=Limits(seconds=1000.0)), database)
    assert asked
    assert all(limit_s is not None and 0 <= limit_s <= 1000 for limit_s in asked)


def test_measurements_of_those_who_had_a_job_before_count_towards_its_limit(small: Model, database: Database) -> None:
    operators = len(space_of(small).graph.operators)
    job = submitted(database, small, limits=Limits(measurements=operators + 4))

    def end(progress: Progress) -> None:
        if progress.measured == operators + 1:
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_taken(job, database, end)
    spent = Spent.of(database.queue.job(job.id).progress)
    assert 0 < spent.measurements <= operators + 1
    again = taken(database)
    assert run_taken(again, database) is not None
    ended = database.queue.job(job.id)
    assert Spent.of(ended.progress).measurements == spent.measurements + ended.counts["measured"]
    assert ended.counts["unknown"] > 0
    assert ended.counts["measured"] <= operators + 4 - spent.measurements + 1  # a race may end one above it


def test_seconds_of_those_who_had_a_job_before_count_towards_its_limit(small: Model, database: Database) -> None:
    job = submitted(database, small, limits=Limits(seconds=1000.0))
    database.queue.report(job.id, job.attempt, progress=Progress("measure", 1, 9, spent_s=999_999.0).to_json())
    database.queue.release(job.id, job.attempt)
    assert run_taken(taken(database), database) is not None
    ended = database.queue.job(job.id)
    assert ended.counts["measured"] == len(space_of(small).graph.operators)  # the plan to open with
    assert Spent.of(ended.progress).seconds >= 999_999


def test_a_job_from_before_its_use_was_stored_has_used_nothing() -> None:
    assert Spent.of({}) == Spent.of({"stage": "measure", "measured": 7}) == Spent()


def test_what_a_silent_stage_takes_is_stored_while_it_runs(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "KEEP_AFTER_S", 0.05)
    job = submitted(database, small, limits=Limits(seconds=1000.0))
    real = build_space

    def silent(*given: Any, **named: Any) -> Any:
        began = time.monotonic()
        while Spent.of(database.queue.job(job.id).progress).seconds < 0.2 and time.monotonic() - began < PATIENCE_S:
            checkpoint()
            time.sleep(0.01)
        assert Spent.of(database.queue.job(job.id).progress).seconds >= 0.2
        return real(*given, **named)

    monkeypatch.setattr(tuning, "build_space", silent)
    assert run_taken(job, database) is not None


def test_a_space_that_is_too_large_fails_its_job_with_a_sentence_and_the_worker_goes_on(
    small: Model, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enumeration, "KEPT_MAX", 3)
    request = Request(small).to_json()
    number = database.queue.enqueue(model=small.reference, request=request, device_type="cpu").id
    run(tmp_path / "jobs.sqlite", once=True)
    job = database.queue.job(number)
    assert job.state == "failed"
    assert job.message == (
        "the space of 'small:wide' is too large: it has more than 3 choices and conversions; tune one of the layers "
        "that repeat, give tensors fewer axes, or a search space with fewer kernels or `layouts: declared`"
    )


@pytest.mark.parametrize("bound", ["COVERS_MAX", "LOOKED_MAX"])
def test_covers_and_combinations_are_bounded_as_well(bound: str, small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, bound, 3)
    with pytest.raises(SpaceError, match="the space of 'small:wide' is too large: it has more than 3 "):
        space_of(small)


# Timing end to end, in a process of its own


def apart(program: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], Configuration]:
    """Return what times end to end in a process that runs this program; it has a `connection`."""
    head = "import json, os, sys, time; pipe, parent, path, _ = json.loads(sys.argv[1]); sys.path[:] = path\n"
    connection = "from multiprocessing.connection import Connection; connection = Connection(pipe)\n"
    monkeypatch.setattr(timing, "_PROGRAM", head + connection + program)
    return lambda model: timing.time_apart(made_up_configuration(model), 3, 1)


def test_timing_end_to_end_is_killed_where_it_is_not_to_go_on(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "number"
    run_apart = apart(f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)", monkeypatch)
    began = time.monotonic()
    over = False
    try:
        with until(lambda: note.exists() and note.read_text() != ""):
            run_apart(small)
    except OverError:
        over = True
    assert over
    assert time.monotonic() - began < PATIENCE_S
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_a_process_that_is_lost_while_it_times_end_to_end_says_its_last_words(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MeasureError, match="was lost: no more"):
        apart("connection.recv_bytes(); sys.exit('no more')", monkeypatch)(small)


ANSWERS = """
while "configuration" not in (asked := json.loads(connection.recv_bytes())):
    connection.send_bytes(json.dumps({"ready": True}).encode())
answer = {"configuration": asked["configuration"], "warnings": []}
connection.send_bytes(json.dumps(answer).encode()); time.sleep(600)
"""


@pytest.mark.parametrize("gets_ready", [True, False])
def test_a_process_that_was_started_before_times_the_plan(
    gets_ready: bool, small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(ANSWERS, monkeypatch)
    made = made_up_configuration(small)
    with closing(timing.TimingProcess()) as started:
        if gets_ready:
            started.get_ready(small, "cpu", 3, 1)
        monkeypatch.setattr(timing, "_PROGRAM", "raise SystemExit('another one')")
        assert timing.time_apart(made, 3, 1, started=started) == made


@pytest.mark.parametrize("gets_ready", [True, False])
def test_another_process_times_the_plan_where_the_one_that_was_started_before_is_lost(
    gets_ready: bool, small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart("sys.exit('it could not')" if not gets_ready else "connection.recv_bytes(); sys.exit(1)", monkeypatch)
    made = made_up_configuration(small)
    with closing(timing.TimingProcess()) as started:
        if not gets_ready:
            started._process.wait(PATIENCE_S)
        started.get_ready(small, "cpu", 3, 1)
        apart(ANSWERS, monkeypatch)
        assert timing.time_apart(made, 3, 1, started=started) == made


def test_a_process_that_gets_ready_is_killed_where_it_is_not_to_go_on(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "number"
    apart(f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)", monkeypatch)
    with closing(timing.TimingProcess()) as started, suppress(OverError):
        started.get_ready(small, "cpu", 3, 1)
        with until(lambda: note.exists() and note.read_text() != ""):
            timing.time_apart(made_up_configuration(small), 3, 1, started=started)
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_what_fails_in_timing_end_to_end_is_raised_here() -> None:
    """By the real process: torch takes no threads at all."""
    layer = named_model("bert-encoder:tiny", extents={"b": 1, "l": 2, "n": 1, "p": 2, "h": 2, "f": 2})
    with pytest.raises(MeasureError, match=r"timing end to end failed: RuntimeError: .* expects a positive integer"):
        timing.time_apart(made_up_configuration(layer), 3, 0)


def test_a_model_without_a_framework_layer_that_cannot_be_timed_keeps_its_answer(small: Model) -> None:
    """By the real process, as above."""
    made = made_up_configuration(small)
    with pytest.warns(
        TunedWarning, match="small:wide was not timed end to end: set_num_threads expects a positive integer"
    ):
        assert timing.time_apart(made, 3, 0) == made


def test_a_plan_without_peers_is_returned_untimed_where_it_can_have_no_overlap(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, as if it were the one that times."""
    monkeypatch.setattr(timing, "die_with", lambda _: None)
    made, (ours, theirs) = made_up_configuration(small), Pipe()
    ours.send_bytes(json.dumps({"configuration": made.to_json(), "samples": 0, "threads": 1}).encode())
    timing.main(os.dup(theirs.fileno()), os.getpid())
    answer = json.loads(ours.recv_bytes())
    while "waited_s" in answer:  # the device is in use by somebody else
        answer = json.loads(ours.recv_bytes())
    assert Configuration.from_json(answer["configuration"]) == made
    ours.close()
    theirs.close()
