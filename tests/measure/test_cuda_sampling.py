"""Decisions of timing on a CUDA device, on fakes: no device is needed."""

from types import SimpleNamespace
from typing import Any

import pytest

from autotuner.measure.devices import cuda_sampling
from autotuner.measure.devices.cuda_sampling import CudaTimer, GraphSampler, graph_calls
from autotuner.measure.devices.nvml import SmClock, foreign
from autotuner.measure.policy import CudaPolicy

POLICY = CudaPolicy(0)


@pytest.mark.parametrize(
    ("call_us", "sets", "calls"),
    [
        (10.0, 4, 20),  # five turns over the sets are 200 us
        (10.0, 3, 21),  # and all sets equally often
        (300.0, 4, 4),  # longer than a sample: each set once
        (0.0, 1, 512),  # no graph is endless
        (0.0, 16, 512),
        (9_000.0, 4, 2),  # 36 ms in one replay are too much: two sets are left out
        (50_000.0, 4, 1),
    ],
)
def test_a_graph_lasts_as_long_as_a_sample_and_uses_all_operand_sets_equally(
    call_us: float, sets: int, calls: int
) -> None:
    assert graph_calls(call_us, sets, POLICY) == calls


def test_a_clock_below_three_quarters_of_the_highest_is_low() -> None:
    clock = SmClock()
    assert [clock.is_low(mhz) for mhz in (1000, 1980, 1485, 1484, None)] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("processes", "others"),
    [(None, 0), ([], 0), ([7], 0), ([7, 8], 0), ([7, 9], 1), ([90], 0), ([90, 91], 1)],
)
def test_who_else_computes_is_told_by_process_number(processes: list[int] | None, others: int) -> None:
    """Own are 7 and 8; where neither is listed, the numbers are the host's, and one of them is ours."""
    assert foreign(processes, {7, 8}) == others


def test_a_parent_that_computes_is_nobody_else_by_whatever_number() -> None:
    """As a training script is, whose layer lies on the device while it is tuned."""
    assert [foreign(processes, {7, 8}, 2) for processes in ([90, 91], [90, 91, 92], [7, 8], [7, 8, 9], [90])] == [
        0, 1, 0, 1, 0,
    ]  # fmt: skip


class Fake:
    """A sampler whose samples take as long as said, the last one for good."""

    def __init__(self, *took_us: float) -> None:
        self.took_us, self.sample_us, self.queued = list(took_us), took_us[0], 0

    def queue(self) -> None:
        self.queued += 1

    def call_us(self) -> float:
        self.sample_us = self.took_us.pop(0) if len(self.took_us) > 1 else self.took_us[0]
        return self.sample_us / 10


def timing(monkeypatch: pytest.MonkeyPatch, *clock_mhz: int) -> tuple[Any, list[str]]:
    done: list[str] = []
    monkeypatch.setattr(cuda_sampling, "sleep", lambda seconds: done.append(f"pause {seconds:g}"))
    readings = iter(clock_mhz)
    made: Any = CudaTimer.__new__(CudaTimer)
    made._uuid, made._clock = "GPU-1", SmClock()
    made._nvml = SimpleNamespace(sm_clock_mhz=lambda _uuid: next(readings, 1980))
    made._stream = SimpleNamespace(synchronize=lambda: done.append("wait"))
    return made, done


def test_a_round_is_queued_whole_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, done = timing(monkeypatch)
    assert made.samples([Fake(200.0), Fake(300.0)]) == [(20.0, 200.0), (30.0, 300.0)]
    assert done == ["pause 0", "wait"]


def test_no_more_is_queued_than_half_a_second_but_always_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = timing(monkeypatch)
    assert len(made.samples([Fake(300_000.0), Fake(150_000.0), Fake(100_000.0)])) == 2
    assert len(made.samples([Fake(900_000.0), Fake(1.0)])) == 1


def test_what_ran_at_a_low_clock_is_taken_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    made, done = timing(monkeypatch, 1980, 1000, 900, 1900)
    made.samples([Fake(200.0)])
    done.clear()
    assert made.samples([Fake(500.0, 400.0, 200.0)]) == [(20.0, 200.0)]
    assert done == ["pause 0", "wait", "pause 0.05", "wait", "pause 0.1", "wait"]


def test_a_clock_that_stays_low_ends_in_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = timing(monkeypatch, 1980, *[500] * 100)
    made.samples([Fake(200.0)])
    slow = Fake(400.0)
    assert made.samples([slow]) == [(40.0, 400.0)]
    assert slow.queued == cuda_sampling.ATTEMPTS


@pytest.mark.parametrize(
    ("first_us", "captured"),
    [
        (100.0, [2, 40]),  # the first call took long because it was the first: two calls are no sample
        (6.0, [34]),  # nearly right: 170 us are enough
        (5.0, [40]),
    ],
)
def test_a_graph_that_turns_out_too_short_is_captured_anew(
    monkeypatch: pytest.MonkeyPatch, first_us: float, captured: list[int]
) -> None:
    """Calls take 5 us in truth."""
    made: list[int] = []

    class FivePerCall:
        def __init__(self, inside: bool) -> None:
            assert inside

        def begin(self) -> None: ...

        def end(self) -> None: ...

        def us(self) -> float:
            return 5.0 * made[-1]

    def capture(schedule: list[object], _pool: object) -> SimpleNamespace:
        made.append(len(schedule) - 2)
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(cuda_sampling, "_Pair", FivePerCall)
    monkeypatch.setattr(cuda_sampling, "_first_us", lambda _runs: first_us)
    monkeypatch.setattr(cuda_sampling, "_captured", capture)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    sampler = GraphSampler([lambda: None], POLICY, None)
    assert made == captured
    assert sampler.look() == 5.0
