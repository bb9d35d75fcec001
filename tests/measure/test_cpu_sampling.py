"""What a sample is made of, on a clock that only these tests move."""

import itertools

import pytest

from autotuner.measure.devices import cpu_sampling as sampling
from autotuner.measure.devices.cpu_sampling import CpuSampler
from autotuner.measure.policy import CpuPolicy
from autotuner.measure.timer import Run


class Clock:
    def __init__(self) -> None:
        self.now_us = 0.0

    def perf_counter_ns(self) -> int:
        return round(self.now_us * 1e3)

    def sleep(self, seconds: float) -> None:
        self.now_us += seconds * 1e6


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sampling, "perf_counter_ns", made.perf_counter_ns)
    monkeypatch.setattr(sampling, "sleep", made.sleep)
    monkeypatch.setattr(sampling, "core_wait_us", lambda: 0.0)
    return made


def sampler(clock: Clock, call_us: float, sets: int, **policy: float) -> tuple[CpuSampler, list[int]]:
    """Return a sampler of calls that take exactly so long, and the list of which operand set each call used."""
    order: list[int] = []

    def make(number: int) -> Run:
        def run() -> None:
            order.append(number)
            clock.now_us += call_us

        return run

    return CpuSampler([make(number) for number in range(sets)], CpuPolicy(0, **policy)), order  # type: ignore[arg-type]


def test_every_operand_set_is_called_before_the_first_sample(clock: Clock) -> None:
    _, order = sampler(clock, 10.0, 4)
    assert order == [0, 1, 2, 3]


def test_a_sample_lasts_long_enough_and_rotates_through_the_operand_sets(clock: Clock) -> None:
    made, order = sampler(clock, 10.0, 3, sample_us=200.0)
    order.clear()
    assert made.sample() == (10.0, 200.0)
    assert order == [place % 3 for place in range(20)]


def test_the_next_sample_goes_on_where_the_last_one_ended(clock: Clock) -> None:
    made, order = sampler(clock, 150.0, 16)
    order.clear()
    for _ in range(3):
        made.sample()
    assert order == [0, 1, 2, 3, 4, 5]


def test_a_call_that_is_long_enough_is_a_sample_by_itself(clock: Clock) -> None:
    made, order = sampler(clock, 2_000.0, 2, single_us=1_000.0)
    order.clear()
    made.sample()
    assert len(order) == 1
    order.clear()
    made.look()
    assert len(order) == 1


def test_short_calls_are_timed_after_other_operators_whose_time_does_not_count(clock: Clock) -> None:
    order: list[str] = []

    def timed() -> None:
        order.append("call")
        clock.now_us += 20.0

    def neighbours() -> None:
        order.append("neighbours")
        clock.now_us += 2_000.0

    made = CpuSampler([timed], CpuPolicy(0, sample_us=60.0), neighbours)
    order.clear()
    assert made.sample() == (20.0, 3 * 2_020.0)
    assert order == ["neighbours", "call"] * 3


def test_a_look_is_the_least_of_two_samples(clock: Clock) -> None:
    took_us = iter([300.0, 500.0, 300.0])

    def timed() -> None:
        clock.now_us += next(took_us)

    assert CpuSampler([timed], CpuPolicy(0)).look() == 300.0
    assert next(took_us, None) is None


def test_a_sample_that_waited_for_a_core_is_taken_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    made, order = sampler(clock, 300.0, 1)
    readings = iter([0.0, 5_000.0, 5_000.0, 5_000.0])
    monkeypatch.setattr(sampling, "core_wait_us", lambda: next(readings))
    order.clear()
    assert made.sample() == (300.0, 600.0)
    assert len(order) == 2


def test_on_a_busy_machine_the_least_disturbed_sample_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    took_us = itertools.chain([300.0, 900.0, 700.0, 350.0], itertools.repeat(800.0))

    def timed() -> None:
        clock.now_us += next(took_us)

    made = CpuSampler([timed], CpuPolicy(0))
    waited = itertools.count(0.0, 1e6)
    monkeypatch.setattr(sampling, "core_wait_us", lambda: next(waited))
    assert made.sample() == (350.0, 900.0 + 700.0 + 350.0 + 800.0 * (sampling.ATTEMPTS - 3))


def test_waiting_for_a_core_is_counted_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    first = sampling.core_wait_us()
    assert 0 <= first <= sampling.core_wait_us()
