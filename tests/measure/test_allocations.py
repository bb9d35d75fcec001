import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autotuner.measure.devices.cpu_sampling import allocated_bytes

KIBI = 1024


def test_the_most_that_is_held_at_one_time_counts_and_not_the_sum() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(KIBI, dtype=torch.uint8)

    assert allocated_bytes(one_after_the_other) == KIBI
    assert allocated_bytes(lambda: [torch.empty(KIBI, dtype=torch.uint8) for _ in range(3)]) == 3 * KIBI


def test_what_was_allocated_before_is_not_counted() -> None:
    x = torch.zeros(KIBI)
    assert allocated_bytes(lambda: x.add_(x)) == 0


def test_a_kernels_own_buffer_counts() -> None:
    x = torch.zeros(KIBI)
    out = torch.empty(KIBI, dtype=torch.bool)
    assert allocated_bytes(lambda: torch.gt(x + x, x, out=out)) == x.nbytes


def test_recording_ends_with_an_error() -> None:
    def fails() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            allocated_bytes(fails)


@pytest.mark.slow
def test_it_agrees_with_torchs_public_profiler() -> None:
    x = torch.randn(64, 64)
    held: list[torch.Tensor] = []

    def run() -> None:
        held.append(torch.softmax(x, 0) @ x)

    most = allocated_bytes(run)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    taken = sum(event.self_cpu_memory_usage for event in profiler.key_averages() if event.self_cpu_memory_usage > 0)
    assert most == taken == 2 * x.nbytes
