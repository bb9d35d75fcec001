"""What a sample is made of."""

import itertools
import time

import pytest

from autotuner.measure import sampling
from autotuner.measure.policy import Policy
from autotuner.measure.sampling import Sampler


def sampler(pause_us: float, sets: int, **policy: float) -> tuple[Sampler, list[int]]:
    order: list[int] = []

    def make(number: int) -> object:
        def run() -> None:
            order.append(number)
            until = time.perf_counter() + pause_us / 1e6
            while time.perf_counter() < until:
                pass

        return run

    made = Sampler([make(number) for number in range(sets)], Policy(0, **policy))  # type: ignore[arg-type,misc]
    return made, order


def test_every_operand_set_is_called_before_the_first_sample() -> None:
    _, order = sampler(10.0, 4)
    assert order == [0, 1, 2, 3]


def test_a_sample_lasts_long_enough_and_rotates_through_the_operand_sets() -> None:
    made, order = sampler(10.0, 3)
    order.clear()
    call_us, spent_us = made.sample()
    assert call_us >= 10.0
    assert spent_us >= 10.0 * len(order)
    assert 3 <= len(order) <= 20
    assert order == [place % 3 for place in range(len(order))]


def test_the_next_sample_goes_on_where_the_last_one_ended() -> None:
    made, order = sampler(150.0, 16)
    order.clear()
    for _ in range(3):
        made.sample()
    assert len(order) >= 3
    assert order == [(order[0] + place) % 16 for place in range(len(order))]


def test_a_call_that_is_long_enough_is_a_sample_by_itself() -> None:
    made, order = sampler(2_000.0, 2, single_us=1_000.0)
    order.clear()
    made.sample()
    assert len(order) == 1
    order.clear()
    made.look()
    assert len(order) == 1


def test_short_calls_are_timed_after_other_operators_whose_time_does_not_count() -> None:
    order: list[str] = []

    def neighbours() -> None:
        order.append("neighbours")
        time.sleep(0.002)

    made = Sampler([lambda: order.append("call")], Policy(0, sample_us=1.0), neighbours)
    order.clear()
    call_us, spent_us = made.sample()
    assert order[:2] == ["neighbours", "call"]
    assert order.count("neighbours") == order.count("call")
    assert call_us < 1_000.0 < spent_us


def test_a_look_is_the_least_of_three_samples() -> None:
    made, order = sampler(300.0, 1)
    order.clear()
    assert made.look() >= 300.0
    assert len(order) == 3


def test_a_sample_that_waited_for_a_core_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, order = sampler(300.0, 1)
    readings = iter([0.0, 5_000.0, 5_000.0, 5_000.0])
    monkeypatch.setattr(sampling, "core_wait_us", lambda: next(readings))
    order.clear()
    call_us, spent_us = made.sample()
    assert len(order) == 2
    assert spent_us >= 2 * 300.0 > call_us / 2


def test_on_a_busy_machine_the_least_disturbed_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, order = sampler(300.0, 1)
    waited = itertools.count(0.0, 1e6)
    monkeypatch.setattr(sampling, "core_wait_us", lambda: next(waited))
    order.clear()
    call_us, spent_us = made.sample()
    assert len(order) == sampling.ATTEMPTS
    assert call_us <= spent_us / sampling.ATTEMPTS


def test_waiting_for_a_core_is_counted_or_not_known() -> None:
    first = sampling.core_wait_us()
    assert 0 <= first <= sampling.core_wait_us()
