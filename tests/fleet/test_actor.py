"""The bench actor: JSON in and out, one measurer per policy, and when it leaves."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autotuner.fleet.actor import CANARY, MEASURERS_MAX, BenchActor
from autotuner.fleet.roster import gpu_from_json
from autotuner.fleet.spec import MeasurerSpec
from scripts.recorded import LARGE
from scripts.replaying import CANARY_US


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
    assert left.wait(5)


def test_an_error_of_the_question_leaves_the_actor_alone(actor: BenchActor, left: threading.Event) -> None:
    wrong = MeasurerSpec("tests.fleet.test_actor:refusing", {}).to_text()
    answer = json.loads(actor.open(wrong))
    assert (answer["error"], answer["refused"]) == ("InputError", "not like this")
    assert not left.wait(0.8)


def refusing(_beside: object) -> None:
    from autotuner.errors import InputError

    raise InputError("not like this")


def test_it_leaves_when_nobody_has_asked_for_long_and_not_before(left: threading.Event) -> None:
    actor = BenchActor("one/0", left.set, idle_s=0.4)
    for _ in range(4):
        time.sleep(0.2)
        actor.look(spec())
    assert not left.is_set()
    assert left.wait(5)


def test_processes_are_started_by_threads_that_stay(actor: BenchActor) -> None:
    """The kernel kills a measuring process when the thread that started it ends."""
    names = set()
    for _ in range(3):
        asked = threading.Thread(target=lambda: names.add(actor._timing.submit(threading.get_ident).result()))
        asked.start()
        asked.join()
    assert len(names) == 1
