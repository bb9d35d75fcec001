"""Hand-out of batches: windows, lost actors, calls to blame, second copies of late batches."""

from itertools import product

import pytest

from autotuner.fleet.batches import Batch, cut
from autotuner.fleet.handout import FIRST_ESTIMATE_S, LATE_AT_LEAST_S, LATE_FACTOR, HandOut, Order
from tests.fleet.calls import call, calls


def batches(count: int, size: int = 2) -> list[Batch]:
    return [Batch(tuple(calls(size, number * size))) for number in range(count)]


def give(handout: HandOut, slots: str, now: float = 0.0) -> list[Order]:
    return handout.orders(list(slots), now)


def test_a_race_is_cut_into_parts_of_at_most_16_calls_that_all_begin_with_the_incumbent() -> None:
    race = calls(40)
    parts = [batch.calls for batch in cut(race)]
    assert [len(part) for part in parts] == [16, 16, 10]
    assert {part[0] for part in parts} == {race[0]}
    assert {each for part in parts for each in part} == set(race)
    assert cut([race[0], race[0]]) == [Batch((race[0],))]
    assert cut([]) == []


def test_batches_are_drawn_as_gpus_have_room() -> None:
    drawn = []
    handout = HandOut(drawn.append(batch) or batch for batch in batches(9))  # type: ignore[func-returns-value]
    assert not handout.is_done
    first = give(handout, "a")
    assert len(drawn) == 2
    handout.answered(first[0].ticket, 1.0)
    give(handout, "a")
    assert len(drawn) == 3


def test_gpus_with_least_in_hand_come_first_up_to_the_window() -> None:
    handout = HandOut(batches(5))
    orders = give(handout, "ab")
    assert [order.slot for order in orders] == ["a", "b", "a", "b"]
    assert give(handout, "ab") == []
    assert handout.answered(orders[1].ticket, 1.0) == orders[1].batch
    assert [order.slot for order in give(handout, "ab", 1.0)] == ["b"]
    assert len(HandOut(batches(9), window=4).orders(["a"], 0.0)) == 4


def test_batches_of_a_lost_actor_go_to_the_front_in_their_order() -> None:
    handout = HandOut(batches(6))
    first = give(handout, "ab")
    mine = [order.batch for order in first if order.slot == "a"]
    assert handout.lost("a") == []
    assert [order.batch for order in give(handout, "c")] == mine


def test_only_the_batch_that_was_worked_on_is_blamed() -> None:
    handout = HandOut(batches(2, size=1))
    for _ in range(5):
        first, second = give(handout, "a")
        handout.began(first.ticket, 0.0)
        assert second.batch.calls == (call(1),)
        crashed = handout.lost("a")
        if crashed:
            break
    assert [(each, measured.status) for each, measured in crashed] == [(call(0), "crashed")]
    (left,) = give(handout, "a")
    handout.answered(left.ticket, 1.0)
    assert handout.is_done


def test_a_batch_that_costs_two_actors_is_sent_call_by_call_and_a_call_that_costs_two_alone_is_crashed() -> None:
    handout = HandOut(batches(1, size=3))
    done, crashed = [], []
    for _ in range(20):
        for order in give(handout, "a"):
            handout.began(order.ticket, 0.0)
            if call(1) in order.batch.calls:
                crashed += handout.lost("a")
                break
            done.append(order.batch)
            handout.answered(order.ticket, 0.0)
    assert handout.is_done
    assert sorted(done, key=str) == sorted([Batch((call(0),)), Batch((call(2),))], key=str)
    ((blamed, measured),) = crashed
    assert (blamed, measured.status) == (call(1), "crashed")
    assert "alone" in measured.message


def test_a_lost_host_and_a_failing_gpu_are_no_fault_of_the_batch() -> None:
    handout = HandOut(batches(1, size=1))
    for _ in range(5):
        (order,) = give(handout, "a")
        handout.began(order.ticket, 0.0)
        assert handout.lost("a", blamed=False) == []


LATE_S = max(LATE_AT_LEAST_S, LATE_FACTOR * FIRST_ESTIMATE_S * 2) + 0.1


def test_a_late_batch_is_given_out_a_second_time_to_a_gpu_that_rests_and_the_first_answer_counts() -> None:
    handout = HandOut(batches(1))
    (first,) = give(handout, "ab")
    handout.began(first.ticket, 0.0)
    assert give(handout, "ab", 1.0) == []
    (second,) = give(handout, "ab", LATE_S)
    assert (second.slot, second.batch, handout.second_times) == ("b", first.batch, 1)
    assert give(handout, "abc", 3 * LATE_S) == [], "there are never three"
    assert handout.answered(second.ticket, LATE_S) == first.batch
    assert handout.is_done
    assert handout.answered(first.ticket, LATE_S) is None
    assert handout.answered(first.ticket, LATE_S) is None


def test_what_waits_goes_before_second_copies_and_a_pace_sets_what_is_late() -> None:
    handout = HandOut(batches(3))
    (first,) = give(handout, "a")[:1]
    handout.began(first.ticket, 0.0)
    assert [order.batch for order in give(handout, "b", LATE_S)] == [batches(3)[2]]
    slow = HandOut(batches(2), window=1)
    one, two = give(slow, "ab")
    for order in (one, two):
        slow.began(order.ticket, 0.0)
    slow.answered(one.ticket, 20.0)
    assert give(slow, "ab", 100.0) == [], "a batch takes 20 s here"
    assert len(give(slow, "ab", 201.0)) == 1


def test_a_copy_that_is_lost_leaves_the_other_one_alone() -> None:
    handout = HandOut(batches(1))
    (first,) = give(handout, "a")
    (second,) = give(handout, "b", LATE_S)
    assert handout.lost("a") == []
    assert give(handout, "c", LATE_S) == []
    assert handout.answered(second.ticket, LATE_S) == first.batch
    assert handout.is_done


@pytest.mark.parametrize("seed, slots", list(product(range(8), (1, 3))))
def test_every_batch_is_answered_once_whatever_is_lost(seed: int, slots: int) -> None:
    import random

    chance = random.Random(seed)
    wanted = batches(30, size=3)
    handout = HandOut(wanted, window=chance.randint(1, 3))
    names, out, found, now = [str(n) for n in range(slots)], dict[int, Order](), list[Batch](), 0.0
    while not handout.is_done:
        now += chance.choice([0.1, LATE_S])
        out |= {order.ticket: order for order in handout.orders(names, now)}
        assert len(handout.out) <= 3 * slots
        if not out:
            break
        pick = chance.choice(list(out))
        if chance.random() < 0.3:
            assert handout.lost(out[pick].slot, blamed=chance.random() < 0.5) is not None
            out = {t: o for t, o in out.items() if o.slot != out[pick].slot}
        else:
            handout.began(pick, now)
            batch = handout.answered(pick, now + 0.05)
            found += [batch] if batch else []
            del out[pick]
    assert handout.is_done
    keys = [each.key for batch in found for each in batch.calls]
    assert sorted(keys) == sorted({each.key for batch in wanted for each in batch.calls}), "each once"
