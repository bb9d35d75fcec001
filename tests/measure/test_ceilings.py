"""Ceilings, measured on this device: ladders that rise, and no call of the plainest kernels below them."""

import pytest

from autotuner.measure import ceilings as measuring
from autotuner.measure.policy import Policy
from autotuner.measure.sampling import CpuTiming

POLICY = Policy(1 << 16, sets=4, sample_us=50.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BYTES_MAX", 1 << 14)
    monkeypatch.setattr(measuring, "PRODUCT_MAX", 64)
    monkeypatch.setattr(measuring, "PASSES", 1)


@pytest.mark.slow
def test_ladders_reach_from_the_least_to_the_most_and_time_all_that_is_asked_for() -> None:
    found = measuring.measure_ceilings(CpuTiming(POLICY), 1 << 30, ["float32", "bfloat16"])
    assert [amount for amount, _ in found.moved.rungs] == [1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14]
    assert set(found.products) == {"float32", "bfloat16"}
    assert [amount for amount, _ in found.products["float32"].rungs] == [2 * n**3 for n in (16, 25, 40, 64)]
    assert 0 < found.call_us < float("inf")
    for ladder in (found.moved, *found.products.values()):
        assert all(0 < us < float("inf") for _, us in ladder.rungs)
    assert not found.links, "a CPU's memory is the host's"


@pytest.mark.slow
def test_no_rung_takes_more_than_its_part_of_memory() -> None:
    found = measuring.measure_ceilings(CpuTiming(POLICY), measuring.BYTES_HELD_SHARE << 12, [])
    assert found.moved.rungs[-1][0] == 1 << 12


def test_a_larger_product_runs_at_least_at_the_rate_of_a_smaller_one() -> None:
    """A stall at one size does not count: 200 in 50 us is slower than 100 in 10."""
    assert list(measuring._risen([(100.0, 10.0), (200.0, 50.0), (400.0, 20.0)])) == [
        (100.0, 10.0), (200.0, 20.0), (400.0, 20.0)
    ]  # fmt: skip


def test_a_product_that_fills_its_last_wave_badly_counts_at_the_rate_of_the_next_larger_one() -> None:
    assert list(measuring._full_waves([(100.0, 10.0), (200.0, 50.0), (400.0, 20.0)])) == [
        (100.0, 10.0), (200.0, 10.0), (400.0, 20.0)
    ]  # fmt: skip
