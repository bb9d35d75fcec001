"""Batches: races in parts for several devices, and their results joined, whatever becomes of a device."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.ir.records import Call, Candidate, Measurement, Node, Subgraph, TensorType
from autotuner.tuner.batches import CALLS_MAX, SECONDS, SPREAD_MAX, Batch, Batches
from autotuner.tuner.progress import Result


def race_of(length: int, subgraphs: int = 1, kernel: str = "torch_bias") -> list[Call]:
    """Return distinct calls of a few subgraphs, each subgraph's spread over the race."""
    return [call_of(number, number % subgraphs, kernel) for number in range(length)]


def call_of(number: int, subgraph: int = 0, kernel: str = "torch_bias") -> Call:
    matrix, vector = TensorType((8, 16 + subgraph), "float32"), TensorType((16 + subgraph,), "float32")
    bias = Subgraph((Node("bias", "ab,b->ab", (0, 1), (2,)),), (matrix, vector, matrix), (0, 1), (2,))
    return Call(bias, Candidate(kernel, ("ab", "a", "ab"), (("number", number),)))


def timed(calls: tuple[Call, ...], us: dict[str, float] | float, share: float = 0.001) -> list[Result]:
    """Return a time for each call, with an interval of a share of it to either side."""
    times = {call.key: us if isinstance(us, float) else us[call.key] for call in calls}
    intervals = {key: (us, us * (1 - share), us * (1 + share)) for key, us in times.items()}
    return [(call, Measurement("ok", *intervals[call.key], (times[call.key],))) for call in calls]


def test_a_race_that_fits_into_a_batch_goes_to_one_device_as_it_is() -> None:
    race = race_of(CALLS_MAX)
    (batch,) = Batches(8).cut(race)
    assert (batch.calls, batch.leads) == (tuple(race), "")


def test_one_device_splits_nothing() -> None:
    race = race_of(256)
    (batch,) = Batches(1).cut(race)
    assert (batch.calls, batch.leads) == (tuple(race), "")


def test_every_part_of_a_large_race_is_led_by_its_first_call_and_every_other_call_is_in_one_part() -> None:
    race = race_of(256)
    batches = Batches(8).cut(race)
    assert all(batch.calls[0] == race[0] and batch.leads == race[0].key for batch in batches)
    assert max(len(batch.calls) for batch in batches) <= CALLS_MAX
    assert max(batch.estimated_s for batch in batches) <= 1.1 * SECONDS + batches[0].estimated_s / len(batches[0].calls)
    followers = Counter(call.key for batch in batches for call in batch.calls[1:])
    assert followers == Counter(call.key for call in race[1:])


def test_calls_of_one_subgraph_stay_together() -> None:
    batches = Batches(8).cut(race_of(61, subgraphs=5))
    parts = Counter(signature for batch in batches for signature in {c.subgraph.signature for c in batch.calls[1:]})
    assert parts.total() < len(batches) + 5  # a subgraph is in two parts only where one ends


def test_what_takes_long_is_cut_into_smaller_parts() -> None:
    batches = Batches(8)
    for kernel, took_s in (("torch_bias", 0.02), ("inductor", 4.0)):
        (batch,) = batches.cut(race_of(16, kernel=kernel))
        batches.join(batch, timed(batch.calls, 1.0), took_s)
    assert [len(batch.calls) for batch in batches.cut(race_of(2 * CALLS_MAX - 1))] == [CALLS_MAX, CALLS_MAX]
    assert {len(batch.calls) for batch in batches.cut(race_of(61, kernel="inductor"))} == {5}


def test_a_part_is_led_by_the_fastest_known_call_when_it_is_handed_out() -> None:
    batches = Batches(8)
    race = race_of(60)
    first, second, *_ = batches.cut(race)
    times = {call.key: 10.0 + number for number, call in enumerate(first.calls)} | {first.calls[3].key: 5.0}
    batches.join(first, timed(first.calls, times))
    renewed = batches.renewed(second)
    assert renewed.calls == (first.calls[3], *second.calls[1:])
    assert renewed.leads == first.calls[3].key


def test_an_incumbent_that_failed_leads_no_other_part() -> None:
    batches = Batches(8)
    first, second, *_ = batches.cut(race_of(100))
    batches.join(first, [(call, Measurement("wrong", message="differs")) for call in first.calls])
    renewed = batches.renewed(second)
    assert renewed.calls == second.calls[1:]
    assert renewed.leads == second.calls[1].key


@pytest.mark.parametrize("slower, scaled", [(1.0005, False), (1.03, True)])
def test_the_times_of_a_slower_device_are_scaled_where_its_incumbent_differs(slower: float, scaled: bool) -> None:
    batches = Batches(2)
    first, second, *_ = batches.cut(race_of(50))
    batches.join(first, timed(first.calls, 100.0))
    found = batches.join(second, timed(second.calls, 100.0 * slower))
    assert {call.key for call, _ in found} == {call.key for call in second.calls[1:]}
    (us,) = {measurement.median_us for _, measurement in found}
    assert us == pytest.approx(100.0 if scaled else 100.0 * slower)
    assert not any(measurement.is_doubtful for _, measurement in found)


def test_the_times_of_a_sick_device_stay_and_are_doubtful() -> None:
    batches = Batches(2)
    first, second, *_ = batches.cut(race_of(50))
    batches.join(first, timed(first.calls, 100.0))
    found = batches.join(second, timed(second.calls, 100.0 * (1 + 2 * SPREAD_MAX)))
    (us,) = {measurement.median_us for _, measurement in found}
    assert us == pytest.approx(110.0)
    assert all(measurement.marks == ("drifted",) for _, measurement in found)


def test_an_incumbent_that_was_dropped_early_scales_nothing() -> None:
    batches = Batches(2)
    first, second, *_ = batches.cut(race_of(50))
    batches.join(first, timed(first.calls, 100.0))
    dropped = [(c, replace(m, marks=("eliminated",))) for c, m in timed(second.calls, 103.0)]
    assert {m.median_us for _, m in batches.join(second, dropped)} == {103.0}


def test_what_a_device_left_is_measured_with_the_incumbent_or_call_by_call() -> None:
    batches = Batches(2)
    first, *_ = batches.cut(race_of(50))
    assert len(batches.join(first, timed(first.calls, 1.0)[:5])) == 5
    rest = batches.rest(first)
    assert rest is not None
    assert rest.calls == (first.calls[0], *first.calls[5:])
    assert [batch.calls for batch in batches.singles(first)] == [(call,) for call in first.calls[5:]]
    batches.join(rest, timed(rest.calls, 1.0))
    assert batches.rest(first) is None
    assert batches.join(first, timed(first.calls, 2.0)) == [], "of a batch that was given out twice, the first counts"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    devices=st.integers(1, 8),
    fates=st.lists(st.sampled_from(["whole", "whole", "part", "dies", "twice", "all fail"]), min_size=1, max_size=30),
)
def test_no_call_is_lost_and_every_part_has_an_incumbent_whatever_becomes_of_devices(
    lengths: list[int], devices: int, fates: list[str]
) -> None:
    numbers = count()
    races = [[call_of(next(numbers), place % 3) for place in range(length)] for length in lengths]
    batches = Batches(devices)
    queue: list[Batch] = [batch for race in races for batch in batches.cut(race)]
    measured: Counter[str] = Counter()
    yielded: Counter[str] = Counter()
    turn = 0
    while queue:
        batch = batches.renewed(queue.pop(0))
        if batch.leads:
            assert batch.calls[0].key == batch.leads
            assert len(batch.calls) <= CALLS_MAX
        fate = fates[turn % len(fates)] if turn < 3 * len(fates) else "whole"
        turn += 1
        results = timed(batch.calls, 1.0)
        if fate == "dies":
            results = []
        elif fate == "part":
            results = results[: len(results) // 2]
        elif fate == "all fail":
            results = [(call, Measurement("crashed", message="killed")) for call, _ in results]
        for _ in range(1 + (fate == "twice")):
            measured.update(call.key for call, _ in results)
            yielded.update(call.key for call, _ in batches.join(batch, results, 0.1))
        if fate == "dies" and turn % 2:
            queue += batches.singles(batch)
        elif (rest := batches.rest(batch)) is not None:
            queue.append(rest)
    keys = {call.key for race in races for call in race}
    assert measured.keys() == keys
    assert yielded == Counter(keys)
