"""The recorded device that takes its time: its clock, and what is compiled beside timing."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotuner.ir.records import Call, Candidate, Measurement, Node, Subgraph, TensorType
from autotuner.measure.roofline import NO_ROOFLINE
from autotuner.tuner import state
from scripts.bench.timed_replay import (
    CALL_S,
    CHILD_S,
    COMPILE_S,
    ELEMENT_S,
    PROCESS_S,
    SETUP_S,
    WAIT_S,
    Clock,
    TimedReplay,
)
from tests.made_up import HERE

ROWS = 1 << 20
SLACK_S = 0.5
"""That the test itself may take of the processor."""


def bias(kernel: str) -> Call:
    matrix, vector = TensorType((ROWS, 16), "float32"), TensorType((16,), "float32")
    subgraph = Subgraph((Node("bias", "ab,b->ab", (0, 1), (2,)),), (matrix, vector, matrix), (0, 1), (2,))
    return Call(subgraph, Candidate(kernel, ("ab", "a", "ab")))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(clock: Clock) -> TimedReplay:
    layer: Any = SimpleNamespace(
        environment=HERE, recorded={}, ceilings=NO_ROOFLINE, measurement=lambda _: Measurement("ok", 1.0)
    )
    return TimedReplay(cast("Any", layer), clock)


def took_s(clock: Clock, device: TimedReplay, races: Sequence[Sequence[Call]]) -> float:
    began_s = clock()
    assert [call for call, _ in device.measure(races)] == [call for race in races for call in race]
    return clock() - began_s


def test_a_race_takes_what_its_operands_and_calls_take_and_the_first_waits_for_the_process(
    clock: Clock, device: TimedReplay
) -> None:
    race = [bias("torch_bias"), bias("cublas_bias")]
    own_s = SETUP_S + ELEMENT_S * (32 * ROWS + 16) + CALL_S["torch"] + CALL_S["cublas"]
    assert took_s(clock, device, [race]) == pytest.approx(CHILD_S + own_s, abs=SLACK_S)
    assert own_s <= took_s(clock, device, [race]) < own_s + SLACK_S
    assert WAIT_S <= took_s(clock, device, [[]]) < WAIT_S + SLACK_S


def test_what_compiles_beside_timing_is_there_when_its_time_is_over(clock: Clock, device: TimedReplay) -> None:
    call = bias("triton_bias")
    device.compile_beside([call])
    clock.wait(PROCESS_S + COMPILE_S["triton"] - SLACK_S)
    assert device.take_compiled() == []
    clock.wait(SLACK_S)
    assert device.take_compiled() == [(call, None)]
    assert device.take_compiled() == []


def test_while_the_clock_runs_a_tuning_reads_it(clock: Clock) -> None:
    with clock.running():
        assert cast("Any", state).monotonic is clock
    assert cast("Any", state).monotonic is time.monotonic
