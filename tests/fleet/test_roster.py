"""The roster: classes of GPUs, failing ones, canaries."""

from dataclasses import replace

from autotuner.fleet.roster import FAILURES_WITHIN_S, Roster, gpu_from_json, gpu_to_json
from tests.fleet.calls import H100, H200, gpu


def slots(roster: Roster, now: float = 0.0) -> list[str]:
    return [each.slot for each in roster.usable(now)]


def test_gpus_of_one_environment_form_the_class_and_others_are_left_out_with_a_reason() -> None:
    roster = Roster()
    for each in (gpu(0), gpu(1, H100), gpu(2)):
        roster.join(each)
    assert slots(roster) == ["one/0", "one/2"]
    assert roster.why_not("one/1", 0.0) == "another class: it is NVIDIA H100, and the job runs on NVIDIA H200"
    newer = replace(H200, facts=(("driver", "2"), ("power_limit_w", 400)))
    roster.join(gpu(3, newer))
    assert roster.why_not("one/3", 0.0) == (
        "another class: driver is 2 here and 1 on the others; power_limit_w is 400 here and None on the others"
    )
    named = Roster(device_name="NVIDIA H100")
    for each in (gpu(0), gpu(1, H100)):
        named.join(each)
    assert (named.environment, slots(named)) == (H100, ["one/1"])


def test_a_gpu_is_left_out_after_three_failures_within_five_minutes_and_tried_again_later() -> None:
    roster = Roster(H200)
    for now in (0.0, 100.0, 200.0):
        roster.join(gpu(0))
        assert slots(roster, now) == ["one/0"]
        roster.lose("one/0", now, "the GPU is lost")
    roster.join(gpu(0))
    assert slots(roster, 200.0) == []
    assert roster.is_hopeless(200.0)
    assert "3 actors failed" in roster.shown(200.0)[0].reason
    assert slots(roster, FAILURES_WITHIN_S + 1) == ["one/0"]
    slow = Roster(H200)
    for now in (0.0, 200.0, 400.0, 600.0):
        slow.join(gpu(0))
        slow.lose("one/0", now, "it failed")
    slow.join(gpu(0))
    assert slots(slow, 600.0) == ["one/0"]


def test_an_actor_that_is_killed_is_no_failure_of_its_gpu() -> None:
    roster = Roster(H200)
    for now in range(10):
        roster.join(gpu(0))
        roster.lose("one/0", float(now))
    assert slots(roster) == []
    roster.join(gpu(0))
    assert slots(roster) == ["one/0"]


def test_a_gpu_without_an_actor_is_shown_with_what_became_of_it() -> None:
    roster = Roster(H200)
    for number in range(3):
        roster.join(gpu(number))
    roster.lose("one/0", 0.0, host=True)
    roster.lose("one/1", 0.0, "no memory left")
    roster.lose("two/0", 0.0, "no driver")
    assert [(each.slot, each.used, each.reason) for each in roster.shown(0.0)] == [
        ("one/0", False, "its host is gone"),
        ("one/1", False, "its actor is being started after: no memory left"),
        ("one/2", True, ""),
        ("two/0", False, "its actor is being started after: no driver"),
    ]
    assert [(each.host, each.device_name) for each in roster.shown(0.0)[2:]] == [("one", "NVIDIA H200"), ("", "")]


def test_a_canary_2_percent_off_is_shown_and_one_5_percent_off_leaves_the_gpu_out() -> None:
    roster = Roster(H200)
    for number, us in enumerate((100.0, 100.0, 100.0, 101.9, 104.9, 94.0, 106.0)):
        roster.join(gpu(number, canary_us=us))
    shown = [(row.reason, row.used) for row in roster.shown(0.0)]
    assert shown[:4] == [("", True)] * 4
    assert shown[4] == ("its canary is +4.9% off its class", True)
    assert shown[5:] == [("its canary is -6.0% off its class", False), ("its canary is +6.0% off its class", False)]


def test_of_two_gpus_the_slower_one_is_off() -> None:
    roster = Roster(H200)
    for number, us in enumerate((100.0, 106.0)):
        roster.join(gpu(number, canary_us=us))
    assert slots(roster) == ["one/0"]
    roster.note_canary("one/1", 103.0)
    assert slots(roster) == ["one/0", "one/1"]
    assert roster.shown(0.0)[1].reason == "its canary is +3.0% off its class"
    assert roster.shown(0.0)[0].reason == ""


def test_another_gpu_in_the_same_slot_has_no_past() -> None:
    roster = Roster(H200)
    for now in range(3):
        roster.join(gpu(0))
        roster.lose("one/0", float(now), "it failed")
    other = gpu(0)
    roster.join(replace(other, host="two", uuid="GPU-new"))
    assert slots(roster, 3.0) == ["one/0"]


def test_a_gpu_travels_as_json() -> None:
    assert gpu_from_json(gpu_to_json(gpu(0, canary_us=1.5))) == gpu(0, canary_us=1.5)
