"""Branches at run time: queued over streams in a capture, one by one elsewhere, with the same numbers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Schedule
from autotuner.plan.overlap import slack_us
from autotuner.plan.parts import Overlap
from autotuner.plan.step import Branches
from autotuner.runtime import TunedModule, with_measured_overlap
from autotuner.runtime.branching import BranchingCalls
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.peers.on_gpu import captured
from autotuner.runtime.peers.training_loop import TrainingLoop
from tests.runtime.layers import CUDA, assert_equal, batch, gradients, tuned, x_on
from tests.runtime.made_up_device import MadeUpDevice
from tests.runtime.plans import WITH_DROPOUT, configuration, model

STEPS = 5


SCHEDULE = Schedule((frozenset(), frozenset({0}), frozenset({0}), frozenset({1, 2})), 4, ((1,),))
"""Step 3 reads from 1 and 2, which read from 0; 1 is on a branch."""


def run(numbers: tuple[int, ...] = (0, 1, 2, 3), *, capturing: bool = True) -> list[str]:
    """Return what a device writes down of such steps."""
    device = MadeUpDevice(capturing=capturing)

    def step(number: int) -> None:
        device.log.append(f"{number} on {device.current()}")

    BranchingCalls({number: partial(step, number) for number in numbers}, SCHEDULE, device).run()
    return device.log


def test_outside_of_a_capture_steps_run_one_by_one_on_the_callers_stream() -> None:
    assert run(capturing=False) == [f"{number} on stream 1" for number in range(4)]


def test_in_a_capture_branches_fork_wait_and_join_and_steps_are_queued_in_the_plans_order() -> None:
    assert run() == [
        "lane 0 joins stream 1", "lane 1 joins stream 1",
        "0 on lane 0",
        "lane 1 waits for 0 on lane 0", "1 on lane 1",
        "2 on lane 0",
        "lane 0 waits for 1 on lane 1", "3 on lane 0",
        "stream 1 joins lane 0", "stream 1 joins lane 1",
    ]  # fmt: skip


def test_a_step_that_is_left_out_is_waited_for_and_waits_as_if_it_took_no_time() -> None:
    assert run((0, 1, 2))[-3:-2] == ["lane 0 waits for 1 on lane 1"]
    log = run((0, 2))
    assert not any(line.startswith("1 on") for line in log)
    assert [line.split(" waits")[0] for line in log if "waits" in line] == ["lane 1", "lane 0"]


def everything_beside(found: Configuration, count: int = 2) -> Configuration:
    """Return a configuration with all steps that have slack on branches."""
    free = [number for number, us in enumerate(slack_us(found.steps)) if us > 0]
    branches: Branches = tuple(tuple(free[place::count]) for place in range(count))
    return replace(found, overlap=Overlap(branches, 1.0, 0.5, 1.5))


def test_on_a_cpu_a_configuration_with_branches_runs_as_without() -> None:
    of = model(p=WITH_DROPOUT)
    found = []
    for each in (configuration(of), everything_beside(configuration(of))):
        torch.manual_seed(3)
        found.append(gradients(tuned(encoder_layer(of), each), batch()))
    assert_equal(found[1], found[0], 0.0)


def test_on_a_cpu_no_overlap_is_measured() -> None:
    found = configuration(model())
    assert with_measured_overlap(found) is found


def overlapping(of_seed: int = 0, p: float = 0.0, *, graphs: bool = True) -> tuple[TunedModule, TunedModule]:
    """Return two tuned layers with the same values on a CUDA device, the first with branches."""
    of = model(p=p)
    plain = configuration(of, of_seed, CUDA)
    return (
        tuned(encoder_layer(of, 0, CUDA), everything_beside(plain), graphs),
        tuned(encoder_layer(of, 0, CUDA), plain, graphs),
    )


def assert_alike(layers: tuple[TunedModule, TunedModule]) -> None:
    """Fail where two layers give different results from the same input and seed."""
    for step in range(STEPS):
        found = []
        for layer in layers:
            torch.manual_seed(step)
            found.append(gradients(layer, x_on(step)))
        assert_equal(found[0], found[1], 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_every_step_with_branches_equals_the_framework(seed: int) -> None:
    twin = encoder_layer(model(), 0, CUDA)
    layer, _ = overlapping(seed)
    for step in range(STEPS):
        assert_equal(gradients(layer, x_on(step)), gradients(twin, x_on(step)), 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_branches_draw_the_same_masks(seed: int) -> None:
    assert_alike(overlapping(seed, WITH_DROPOUT))


@pytest.mark.gpu
def test_where_only_some_gradients_are_wanted_branches_give_the_same() -> None:
    layers = overlapping(1, WITH_DROPOUT)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("norm" in name or name.endswith("bias"))
    assert_alike(layers)


@pytest.mark.gpu
def test_in_a_graph_of_the_callers_branches_give_the_same() -> None:
    call = MadeUpCall.of(model(p=WITH_DROPOUT), device=CUDA)
    found = []
    for layer in overlapping(0, WITH_DROPOUT, graphs=False):
        loop = TrainingLoop(layer, call)
        loop.warm()
        side = captured(loop)
        torch.manual_seed(7)
        side._step()
        torch.cuda.synchronize()
        _, gradients_of = side._kept
        found.append({str(place): grad.clone() for place, grad in enumerate(gradients_of)})
    assert_equal(found[0], found[1], 1e-10)


@pytest.mark.gpu
def test_an_overlap_is_chosen_by_measurement_and_what_is_chosen_gains() -> None:
    chosen = with_measured_overlap(configuration(model(p=WITH_DROPOUT), 0, CUDA))
    assert chosen.overlap is None or chosen.overlap.low_us > 0
    layer = tuned(encoder_layer(chosen.model, 0, CUDA), chosen)
    for step in range(STEPS):
        assert all(bool(value.isfinite().all()) for value in gradients(layer, x_on(step)).values())
