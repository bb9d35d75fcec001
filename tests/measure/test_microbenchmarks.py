"""Roofline, measured on this device: ladders that rise, and no call of the plainest kernels below them."""

import pytest
import torch

from autotuner.errors import KernelError
from autotuner.measure import microbenchmarks as measuring
from autotuner.measure.devices.cpu_sampling import CpuTimer
from autotuner.measure.policy import CpuPolicy
from autotuner.measure.timer import Sweep

POLICY = CpuPolicy(1 << 16, sets=4, sample_us=50.0)
SWEEP = Sweep(bytes_max=1 << 14, extents=(16, 25, 40, 64), passes=1)


@pytest.mark.slow
def test_ladders_reach_from_the_least_to_the_most_and_time_all_that_is_asked_for() -> None:
    found = measuring.measure_roofline(CpuTimer(POLICY), 1 << 30, ["float32", "bfloat16"], SWEEP)
    assert [amount for amount, _ in found.moved.rungs] == [1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14]
    assert set(found.products) == {"float32", "bfloat16"}
    assert [amount for amount, _ in found.products["float32"].rungs] == [2 * n**3 for n in (16, 25, 40, 64)]
    assert 0 < found.call_us < float("inf")
    for ladder in (found.moved, *found.products.values()):
        assert all(0 < us < float("inf") for _, us in ladder.rungs)


@pytest.mark.slow
def test_no_rung_takes_more_than_its_part_of_memory() -> None:
    found = measuring.measure_roofline(CpuTimer(POLICY), measuring.BYTES_HELD_SHARE << 12, [], SWEEP)
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


def test_products_of_float32_on_a_processor_are_measured_by_torch_and_by_the_kernel_of_this_package() -> None:
    one, other = torch.randn(5, 7), torch.randn(7, 3)
    made = [torch.empty(5, 3) for _ in measuring._multipliers(torch.float32, torch.device("cpu"))]
    assert len(made) == 2
    for multiply, target in zip(measuring._multipliers(torch.float32, torch.device("cpu")), made, strict=True):
        multiply(one, other, target)()
        torch.testing.assert_close(target, one @ other)
    assert len(list(measuring._multipliers(torch.bfloat16, torch.device("cpu")))) == 1
    assert len(list(measuring._multipliers(torch.float32, torch.device("cuda")))) == 1


def test_without_a_compiler_products_are_measured_by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise KernelError("own CPU kernels need a C++ compiler")

    monkeypatch.setattr(measuring, "matrix_product", refused)
    assert len(list(measuring._multipliers(torch.float32, torch.device("cpu")))) == 1
