"""The tuner's measurer over made-up actors: results come once each, whatever is lost."""

from collections.abc import Iterator, Sequence

import pytest

from autotuner.checkpoint import watched
from autotuner.errors import InputError, MeasureError
from autotuner.fleet.fleet_measurer import FIRST_S, FleetMeasurer
from autotuner.fleet.roster import Roster
from autotuner.ir.records import Call
from autotuner.tuner.batches import CALLS_MAX
from tests.fleet.calls import H200, Clock, PlannedPool, call, calls, gpu


def fleet(count: int = 2, **faults: object) -> tuple[FleetMeasurer, PlannedPool]:
    clock = Clock()
    pool = PlannedPool([gpu(number) for number in range(count)], clock, **faults)  # type: ignore[arg-type]
    return FleetMeasurer(pool, Roster(), gpus=count, clock=clock), pool


def statuses(measurer: FleetMeasurer, *races: Sequence[Call]) -> dict[str, str]:
    found = list(measurer.measure(races))
    assert len(found) == len({each.key for each, _ in found}), "each call once"
    return {each.key: measured.status for each, measured in found}


def test_races_are_measured_on_all_gpus_and_each_call_is_yielded_once() -> None:
    measurer, pool = fleet(3)
    assert (measurer.devices, measurer.environment) == (3, H200)
    race = calls(100)
    assert set(statuses(measurer, race)) == {each.key for each in race}
    assert {slot for slot, *_ in pool.sent} == {"one/0", "one/1", "one/2"}
    assert all(len(keys) <= CALLS_MAX for _, _, keys in pool.sent)


def test_nothing_is_lost_when_actors_die_and_come_back() -> None:
    measurer, _ = fleet(2, deaths={3.0: ["one/0"], 5.0: ["one/0", "one/1"], 14.0: ["one/1"]})
    race = calls(150)
    assert set(statuses(measurer, race).values()) == {"ok"}
    assert measurer.waited_s > 0, "a job's time stands still while there is no GPU"


def test_a_deadly_call_is_crashed_and_costs_no_other() -> None:
    deadly = call(7)
    measurer, _ = fleet(2, deadly=[deadly.key])
    found = statuses(measurer, calls(40))
    assert [key for key, status in found.items() if status != "ok"] == [deadly.key]
    assert found[deadly.key] == "crashed"
    assert len(found) == 40


def test_a_stuck_actor_costs_a_second_copy_and_no_result() -> None:
    measurer, pool = fleet(2, stuck=["one/0"])
    assert len(statuses(measurer, calls(80))) == 80
    assert pool.forgotten, "what the stuck actor has is not waited for"


def test_a_gpu_that_fails_is_left_out_and_the_others_finish() -> None:
    measurer, pool = fleet(2, failing=["one/1"])
    assert len(statuses(measurer, calls(200))) == 200
    assert sum(slot == "one/1" for slot, *_ in pool.sent) >= 1


def test_without_a_gpu_that_works_it_says_why() -> None:
    measurer, _ = fleet(1, failing=["one/0"])
    with pytest.raises(MeasureError, match=r"no GPU of the fleet can measure: one one/0: 3 actors failed.*is lost"):
        statuses(measurer, calls(2))
    clock = Clock()
    with pytest.raises(MeasureError, match="no GPU of the fleet"):
        FleetMeasurer(PlannedPool([], clock), Roster(), clock=clock)
    assert clock.now > FIRST_S


def test_a_job_that_is_cancelled_hands_out_no_more_and_forgets_what_is_out() -> None:
    measurer, pool = fleet(2)

    def look() -> None:
        if len(pool.sent) > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched(look):
        statuses(measurer, calls(400))
    assert len(pool.sent) < 10
    assert pool.forgotten


def test_every_host_compiles_what_it_times() -> None:
    clock = Clock()
    gpus = [gpu(0), gpu(1), gpu(0, host="two")]
    pool = PlannedPool(gpus, clock, deaths={4.0: ["two/0"]})
    measurer = FleetMeasurer(pool, Roster(), gpus=3, clock=clock)
    compiled = [call(number, "inductor") for number in range(40)]
    plain = calls(3)
    assert [each for each, problem in measurer.prepare([*plain, *compiled]) if problem is None] != []
    for host in ("one", "two"):
        asked = {key for slot, question, keys in pool.sent if slot.startswith(host) for key in keys}
        assert asked == {each.key for each in compiled}


def test_calls_are_compiled_on_every_host_while_others_are_timed() -> None:
    clock = Clock()
    pool = PlannedPool([gpu(0), gpu(0, host="two")], clock, deaths={6.0: ["two/0"]})
    measurer = FleetMeasurer(pool, Roster(), gpus=2, clock=clock)
    assert measurer.compiles_beside
    left = {each.key: each for each in (call(number, "inductor") for number in range(40))}
    plain = calls(30, start=100)

    def races() -> Iterator[Sequence[Call]]:
        yield plain
        while left:
            ripe = [left.pop(each.key) for each, problem in measurer.take_compiled() if problem is None]
            yield ripe

    measurer.compile_beside(list(left.values()))
    found = list(measurer.measure(races()))
    assert len(found) == len({each.key for each, _ in found}) == 70
    questions = [question for _, question, _ in pool.sent]
    assert questions.index("compile") < questions.index("measure")
    timed_at = [place for place, (_, question, keys) in enumerate(pool.sent) if question == "measure" for _ in keys]
    compiled_at = [place for place, question in enumerate(questions) if question == "compile"]
    assert min(timed_at) < max(compiled_at) < max(timed_at)
    for host in ("one", "two"):
        asked = {
            k for slot, question, keys in pool.sent if slot.startswith(host) and question == "compile" for k in keys
        }
        assert len(asked) == 40


def test_what_is_compiled_beside_timing_is_given_up_when_nothing_is_asked_for() -> None:
    measurer, pool = fleet(1)
    measurer.compile_beside([call(number, "inductor") for number in range(40)])
    statuses(measurer, calls(2))
    measurer.compile_beside(())
    assert pool.forgotten
    before = len(pool.sent)
    statuses(measurer, calls(2, start=10))
    assert [question for _, question, _ in pool.sent[before:]] == ["measure"]


def test_noise_and_ceilings_are_asked_of_another_gpu_where_an_actor_is_lost() -> None:
    measurer, pool = fleet(2, deaths={2.0: ["one/0"]}, stuck=["one/0"])
    assert measurer.noise_floor() == 0.01
    assert [slot for slot, *_ in pool.sent] == ["one/0", "one/1"]


def test_an_error_of_the_question_is_raised_with_its_class() -> None:
    measurer, pool = fleet(1)
    pool.answer = lambda *_: {"refused": "no such thing", "error": "InputError", "warnings": []}  # type: ignore[method-assign]
    with pytest.raises(InputError, match="no such thing"):
        measurer.noise_floor()
    pool.answer = lambda *_: {"noise": 0.02, "warnings": ["others use the GPU"]}  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="others use the GPU"):
        assert measurer.noise_floor() == 0.02


def test_canaries_come_with_answers_and_leave_a_gpu_out() -> None:
    measurer, pool = fleet(2)
    plain = pool.answer

    def answer(question: object, keys: object, request: object) -> object:
        us = 107.0 if pool.now_slot == "one/1" else 100.0  # type: ignore[attr-defined]
        return {**plain(question, keys, request), "canary_us": us}  # type: ignore[arg-type]

    worked = pool._worked

    def work(slot: str) -> object:
        pool.now_slot = slot  # type: ignore[attr-defined]
        return worked(slot)

    pool.answer, pool._worked = answer, work  # type: ignore[method-assign, assignment]
    assert len(statuses(measurer, calls(300))) == 300
    assert sum(slot == "one/1" for slot, *_ in pool.sent) < 5
