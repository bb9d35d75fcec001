"""Hand-out of batches: windows, lost actors, calls to blame, second copies of late batches."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from autotuner.fleet.handout import LATE_AT_LEAST_S, LATE_FACTOR, LATER_S, HandOut, Order
from autotuner.ir.records import Call
from autotuner.tuner.batches import CALL_S, Batches
from tests.fleet.calls import call, calls, timed


def races(count: int, size: int = 2) -> list[list[Call]]:
    return [calls(size, number * size) for number in range(count)]


def handing(asked: Sequence[Sequence[Call]] | Iterator[Sequence[Call]], window: int = 2) -> HandOut:
    return HandOut(asked, Batches(2), window)


def answer(handout: HandOut, order: Order, now: float = 1.0, took_s: float = 0.05) -> list[Call]:
    """Answer a batch as a whole, and return the calls that are new."""
    found = handout.answered(order.ticket, {each.key: timed() for each in order.batch.calls}, took_s, now)
    return [each for each, _ in found]


def give(handout: HandOut, slots: str, now: float = 0.0) -> list[Order]:
    return handout.orders(list(slots), now)


def test_races_are_drawn_as_gpus_have_room() -> None:
    drawn = []

    def source() -> Iterator[list[Call]]:
        for race in races(9):
            drawn.append(race)
            yield race

    handout = handing(source())
    assert not handout.is_done
    first = give(handout, "a")
    assert len(drawn) == 2
    answer(handout, first[0])
    give(handout, "a")
    assert len(drawn) == 3


def test_after_an_empty_race_the_next_one_is_drawn_the_next_time() -> None:
    handout = handing([calls(1), (), calls(1, start=1)])
    assert [order.batch.calls for order in give(handout, "ab")] == [tuple(calls(1))]
    assert not handout.is_done
    assert [order.batch.calls for order in give(handout, "ab")] == [tuple(calls(1, start=1))]


def test_parts_of_a_race_are_led_by_the_fastest_call_that_is_known_when_they_are_handed_out() -> None:
    race = calls(60)
    handout = handing([race], window=1)
    (first,) = give(handout, "a")
    measured = {each.key: timed(2.0) for each in first.batch.calls} | {first.batch.calls[3].key: timed(1.0)}
    assert len(handout.answered(first.ticket, measured, 0.4, 1.0)) == len(first.batch.calls)
    (second,) = give(handout, "a")
    assert second.batch.calls[0] == first.batch.calls[3]


def test_what_the_gate_keeps_back_comes_later_and_what_it_drops_never() -> None:
    first, second, third, fourth = calls(4)
    later = {second.key}

    def gate(asked: Sequence[Call]) -> tuple[Sequence[Call], Sequence[Call]]:
        left = [each for each in asked if each != third]
        return [each for each in left if each.key not in later], [each for each in left if each.key in later]

    handout = HandOut([[first, second], [third], [fourth]], Batches(2), 2, gate=gate)
    orders = give(handout, "a")
    assert [order.batch.calls for order in orders] == [(first,), (fourth,)]
    for order in orders:
        answer(handout, order)
    assert give(handout, "a", LATER_S / 2) == []
    assert give(handout, "a", LATER_S) == [], "it is still kept back"
    later.clear()
    assert not handout.is_done
    (last,) = give(handout, "a", 2 * LATER_S)
    assert answer(handout, last) == [second]
    assert give(handout, "a", 3 * LATER_S) == []
    assert handout.is_done


def test_gpus_with_least_in_hand_come_first_up_to_the_window() -> None:
    handout = handing(races(5))
    orders = give(handout, "ab")
    assert [order.slot for order in orders] == ["a", "b", "a", "b"]
    assert give(handout, "ab") == []
    assert answer(handout, orders[1]) == list(orders[1].batch.calls)
    assert [order.slot for order in give(handout, "ab", 1.0)] == ["b"]
    assert len(handing(races(9), window=4).orders(["a"], 0.0)) == 4


def test_batches_of_a_lost_actor_go_to_the_front_in_their_order() -> None:
    handout = handing(races(6))
    first = give(handout, "ab")
    mine = [order.batch for order in first if order.slot == "a"]
    assert handout.lost("a") == []
    assert [order.batch for order in give(handout, "c")] == mine


def test_only_the_batch_that_was_worked_on_is_blamed() -> None:
    handout = handing(races(2, size=1))
    for _ in range(5):
        first, second = give(handout, "a")
        handout.began(first.ticket, 0.0)
        assert second.batch.calls == (call(1),)
        crashed = handout.lost("a")
        if crashed:
            break
    assert [(each, measured.status) for each, measured in crashed] == [(call(0), "crashed")]
    (left,) = give(handout, "a")
    assert answer(handout, left) == [call(1)]
    assert handout.is_done


def test_a_batch_that_costs_two_actors_is_sent_call_by_call_and_a_call_that_costs_two_alone_is_crashed() -> None:
    handout = handing(races(1, size=3))
    done: list[Call] = []
    crashed = []
    for _ in range(20):
        for order in give(handout, "a"):
            handout.began(order.ticket, 0.0)
            if call(1) in order.batch.calls:
                crashed += handout.lost("a")
                break
            done += answer(handout, order)
    assert handout.is_done
    assert sorted(done, key=str) == sorted([call(0), call(2)], key=str)
    ((blamed, measured),) = crashed
    assert (blamed, measured.status) == (call(1), "crashed")
    assert "alone" in measured.message


def test_a_lost_host_and_a_failing_gpu_are_no_fault_of_the_batch() -> None:
    handout = handing(races(1, size=1))
    for _ in range(5):
        (order,) = give(handout, "a")
        handout.began(order.ticket, 0.0)
        assert handout.lost("a", blamed=False) == []


LATE_S = max(LATE_AT_LEAST_S, LATE_FACTOR * CALL_S * 2) + 0.1


def test_a_late_batch_is_given_out_a_second_time_to_a_gpu_that_rests_and_the_first_answer_counts() -> None:
    handout = handing(races(1))
    (first,) = give(handout, "ab")
    handout.began(first.ticket, 0.0)
    assert give(handout, "ab", 1.0) == []
    (second,) = give(handout, "ab", LATE_S)
    assert (second.slot, second.batch) == ("b", first.batch)
    assert give(handout, "abc", 3 * LATE_S) == [], "there are never three"
    assert answer(handout, second, LATE_S) == list(first.batch.calls)
    assert handout.is_done
    assert answer(handout, first, LATE_S) == []
    assert answer(handout, first, LATE_S) == []


def test_what_waits_goes_before_second_copies_and_a_pace_sets_what_is_late() -> None:
    handout = handing(races(3))
    (first,) = give(handout, "a")[:1]
    handout.began(first.ticket, 0.0)
    assert [list(order.batch.calls) for order in give(handout, "b", LATE_S)] == [races(3)[2]]
    slow = handing(races(2), window=1)
    one, two = give(slow, "ab")
    for order in (one, two):
        slow.began(order.ticket, 0.0)
    answer(slow, one, 20.0, took_s=20.0)
    assert give(slow, "ab", 100.0) == [], "a batch takes 20 s here"
    assert len(give(slow, "ab", 201.0)) == 1


def test_a_copy_that_is_lost_leaves_the_other_one_alone() -> None:
    handout = handing(races(1))
    (first,) = give(handout, "a")
    (second,) = give(handout, "b", LATE_S)
    assert handout.lost("a") == []
    assert give(handout, "c", LATE_S) == []
    assert answer(handout, second, LATE_S) == list(first.batch.calls)
    assert handout.is_done


@pytest.mark.parametrize("seed, slots", list(product(range(8), (1, 3))))
def test_every_batch_is_answered_once_whatever_is_lost(seed: int, slots: int) -> None:
    import random

    chance = random.Random(seed)
    wanted = races(30, size=3)
    handout = handing(wanted, window=chance.randint(1, 3))
    names, out, found, now = [str(n) for n in range(slots)], dict[int, Order](), list[Call](), 0.0
    while not handout.is_done:
        now += chance.choice([0.1, LATE_S])
        out |= {order.ticket: order for order in handout.orders(names, now)}
        assert len(handout.out) <= 3 * slots
        if not out:
            break
        pick = chance.choice(list(out))
        if chance.random() < 0.3:
            found += [each for each, _ in handout.lost(out[pick].slot, blamed=chance.random() < 0.5)]
            out = {t: o for t, o in out.items() if o.slot != out[pick].slot}
        else:
            handout.began(pick, now)
            found += answer(handout, out.pop(pick), now + 0.05)
    assert handout.is_done
    assert sorted(each.key for each in found) == sorted(each.key for race in wanted for each in race), "each once"
