"""The bench actor: JSON in and out, one measurer per policy, and when it leaves."""

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autotuner.errors import MeasureError
from autotuner.fleet.actor import CANARY, MEASURERS_MAX, BenchActor
from autotuner.fleet.roster import gpu_from_json
from autotuner.fleet.spec import MeasurerSpec
from autotuner.ir.records import Call, Measurement
from autotuner.plan.configuration import Configuration
from scripts.recorded import LARGE
from scripts.replaying import CANARY_US, ReplayingMeasurer
from tests.made_up import made_up_configuration, small_model

PATIENCE_S = 60.0


def spec(**arguments: Any) -> str:
    return MeasurerSpec("scripts.replaying:replaying", {"seconds": 0.0, **arguments}).to_text()


@pytest.fixture
def left() -> threading.Event:
    return threading.Event()


@pytest.fixture
def actor(left: threading.Event) -> Iterator[BenchActor]:
    made = BenchActor("one/0", left.set)
    yield made
    made.close()


def test_it_says_which_gpu_it_has_and_times_a_canary(actor: BenchActor) -> None:
    seen = json.loads(actor.look(spec()))
    assert (seen["device_type"], seen["device_name"]) == ("cuda", "NVIDIA H200")
    opened = json.loads(actor.open(spec()))
    gpu = gpu_from_json(opened["gpu"])
    assert (gpu.slot, gpu.canary_us, gpu.environment) == ("one/0", CANARY_US, LARGE.environment)


def test_it_says_when_it_begins_and_answers_with_results(actor: BenchActor) -> None:
    request = json.dumps({"calls": [CANARY.to_json()]})
    began, text = actor.measure(spec(), request)
    assert began == "began"
    answer = json.loads(text)
    assert [(key, value["median_us"]) for key, value in answer["results"]] == [(CANARY.key, CANARY_US)]
    assert answer["waited_s"] == 0.0
    assert answer["canary_us"] == CANARY_US
    assert json.loads(actor.compile(spec(), request))["results"] == [[CANARY.key, None]]
    assert json.loads(actor.ask(spec(), '{"do": "noise"}'))["noise"] == 0.0
    assert json.loads(actor.ask(spec(), '{"do": "ceilings", "dtypes": []}'))["ceilings"]


def test_it_keeps_few_measurers_and_closes_the_one_used_longest_ago(actor: BenchActor) -> None:
    for number in range(MEASURERS_MAX + 2):
        actor.open(spec(half_step_bytes=number))
    assert len(actor._measurers) == MEASURERS_MAX
    assert actor._beside() == MEASURERS_MAX - 1


def test_a_measurer_that_fails_is_told_and_the_actor_leaves(actor: BenchActor, left: threading.Event) -> None:
    answer = json.loads(actor.open(spec(recording="unknown")))
    assert "KeyError" in answer["failed"]
    assert left.wait(PATIENCE_S)


def test_an_error_of_the_question_leaves_the_actor_alone(actor: BenchActor, left: threading.Event) -> None:
    wrong = MeasurerSpec("tests.fleet.test_actor:refusing", {}).to_text()
    answer = json.loads(actor.open(wrong))
    assert (answer["error"], answer["refused"]) == ("InputError", "not like this")
    assert not left.wait(0.8)


def refusing(_beside: object) -> None:
    from autotuner.errors import InputError

    raise InputError("not like this")


def test_it_leaves_when_nobody_has_asked_for_long_and_not_before(left: threading.Event) -> None:
    actor = BenchActor("one/0", left.set, idle_s=2.0)
    for _ in range(5):
        time.sleep(0.5)
        actor.look(spec())
    assert not left.is_set()
    assert left.wait(PATIENCE_S)


def test_processes_are_started_by_threads_that_stay(actor: BenchActor) -> None:
    """The kernel kills a measuring process when the thread that started it ends."""
    names = set()
    for _ in range(3):
        asked = threading.Thread(target=lambda: names.add(actor._timing.submit(threading.get_ident).result()))
        asked.start()
        asked.join()
    assert len(names) == 1


class Compiling(ReplayingMeasurer):
    """A measurer that compiles until it is told to end, and fails where it is closed meanwhile."""

    def __init__(self) -> None:
        super().__init__("large", 0.0, (), {})
        self.begun, self.end = threading.Event(), threading.Event()
        self.closed_by: list[str] = []
        self.is_compiling = False

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        self.is_compiling = True
        self.begun.set()
        assert self.end.wait(PATIENCE_S)
        if self.closed_by:
            raise MeasureError("a compiling process was lost")
        self.is_compiling = False
        yield from ((call, None) for call in calls)

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


COMPILING: list[Compiling] = []


def compiling(_beside: object, **_arguments: Any) -> Compiling:
    COMPILING.append(Compiling())
    return COMPILING[-1]


def test_a_plan_is_timed_as_a_whole_after_what_other_jobs_compile_and_that_ends_well(
    actor: BenchActor, left: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made_up_configuration(small_model(tmp_path))
    seen: list[tuple[bool, list[str]]] = []

    def timed(configuration: Configuration, samples: int) -> Configuration:
        warnings.warn(f"{samples} samples", stacklevel=1)
        seen.append((COMPILING[0].is_compiling, list(COMPILING[0].closed_by)))
        return configuration

    monkeypatch.setattr("autotuner.fleet.actor.time_apart", timed)
    COMPILING.clear()
    others, request = MeasurerSpec("tests.fleet.test_actor:compiling", {}).to_text(), {"calls": [CANARY.to_json()]}
    with ThreadPoolExecutor(2) as asking:
        built = asking.submit(actor.compile, others, json.dumps(request))
        assert wait_until(lambda: bool(COMPILING))
        assert COMPILING[0].begun.wait(PATIENCE_S)
        whole = {"do": "whole", "configuration": found.to_json(), "samples": 7}
        timing = asking.submit(actor.ask, spec(), json.dumps(whole))
        time.sleep(0.3)
        assert not seen, "the compilers use the GPU"
        COMPILING[0].end.set()
        assert json.loads(built.result(PATIENCE_S)) == {"results": [[CANARY.key, None]], "warnings": []}
        answer = json.loads(timing.result(PATIENCE_S))
    assert Configuration.from_json(answer["configuration"]) == found
    assert answer["warnings"] == ["7 samples"]
    ((is_compiling, closed_by),) = seen
    assert not is_compiling
    assert closed_by, "its processes are gone while the whole is timed"
    assert all(name.startswith("compiling") for name in closed_by), "the thread that started them closes them"
    assert json.loads(actor.compile(spec(), json.dumps(request)))["results"] == [[CANARY.key, None]]
    assert not left.wait(0.8), "the GPU does not count as failing"


def test_a_whole_that_fails_is_told_and_the_actor_leaves(
    actor: BenchActor, left: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise MeasureError("the process that times end to end was lost")

    monkeypatch.setattr("autotuner.fleet.actor.time_apart", lost)
    found = made_up_configuration(small_model(tmp_path))
    answer = json.loads(actor.ask(spec(), json.dumps({"do": "whole", "configuration": found.to_json(), "samples": 1})))
    assert answer["failed"] == "the process that times end to end was lost"
    assert left.wait(PATIENCE_S)


def wait_until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
