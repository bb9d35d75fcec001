from dataclasses import replace
from itertools import combinations

import pytest

from autotuner.errors import ConfigurationError
from autotuner.plan.memory_planner import Port, make_plan
from tests.runtime.plans import WITH_DROPOUT, configuration, model, space

TOGETHER = (("query_weight", "key_weight", "value_weight"), ("query_bias", "key_bias", "value_bias"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_is_needed_at_the_same_time_never_shares_bytes(seed: int) -> None:
    plan = make_plan(configuration(model(p=WITH_DROPOUT), seed), TOGETHER)
    backward = next(i for i, step in enumerate(plan.steps) if step.phase == "backward")
    lives: dict[int, tuple[float, float]] = {}

    def touch(place: tuple[str, str] | None, when: float) -> None:
        if place is not None:
            number = plan.buffer_of[place]
            first, last = lives.get(number, (when, when))
            lives[number] = (min(first, when), max(last, when))

    for place in plan.inputs.values():
        touch(place, -1)
    for place in plan.given.values():
        touch(place, backward - 0.5)
    for when, step in enumerate(plan.steps):
        for operand in (*step.inputs, *step.outputs):
            touch(operand, when)
    arena = [i for i, buffer in enumerate(plan.buffers) if buffer.role == "arena"]
    for one, other in combinations(arena, 2):
        a, b = plan.buffers[one], plan.buffers[other]
        together = lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]
        apart = a.start_bytes + a.size_bytes <= b.start_bytes or b.start_bytes + b.size_bytes <= a.start_bytes
        assert apart or not together, (a, b)
    assert plan.arena_bytes < sum(plan.buffers[i].size_bytes for i in arena)


def test_every_step_executes_a_call_that_the_space_measures() -> None:
    of = model(p=WITH_DROPOUT)
    plan = make_plan(configuration(of, 2))
    assert {step.call.key for step in plan.steps} <= set(space(of).calls)


@pytest.mark.slow
def test_what_the_framework_keeps_in_one_tensor_lies_in_one_buffer_and_so_does_its_gradient() -> None:
    plan = make_plan(configuration(model(), 4), TOGETHER)
    port = Port("in_proj_weight", TOGETHER[0], ("np", "h"))
    lies, gradient = plan.geometry(port), plan.geometry(port, "grad_")
    assert lies.shape == gradient.shape == (24, 8)
    assert lies.strides == gradient.strides


@pytest.mark.slow
def test_without_the_framework_a_parameter_has_a_buffer_of_its_own() -> None:
    plan = make_plan(configuration(model(), 1))
    with pytest.raises(ConfigurationError, match="several buffers"):
        plan.geometry(Port("in_proj_weight", TOGETHER[0], ("np", "h")))


def test_only_the_steps_that_a_gradient_needs_are_run_for_it() -> None:
    plan = make_plan(configuration(model(), 0))
    backward = {number for number, step in enumerate(plan.steps) if step.phase == "backward"}
    last = plan.needed(["grad_norm2_bias"])
    assert 1 <= len(last) < len(plan.needed(["grad_x"])) < len(backward)
    assert plan.needed([name for name in plan.outputs if name != "y"]) == backward
    assert plan.needed([]) == frozenset()


def test_a_step_that_reads_what_nothing_makes_is_refused() -> None:
    found = configuration(model(), 0)
    first = next(i for i, step in enumerate(found.steps) if "residual1" in dict(step.outputs))
    with pytest.raises(ConfigurationError, match="residual1"):
        make_plan(replace(found, steps=found.steps[:first] + found.steps[first + 1 :]))


def test_a_backward_step_before_a_forward_one_is_refused() -> None:
    found = configuration(model(), 0)
    with pytest.raises(ConfigurationError, match="forward steps come first"):
        make_plan(replace(found, steps=found.steps[::-1]))


def test_tensors_that_two_steps_want_in_other_orders_are_refused() -> None:
    found = configuration(model(), 0)
    number = next(i for i, step in enumerate(found.steps) if len(step.inputs) > 1)
    one, other = (name for name, _ in found.steps[number].inputs[:2])
    step = replace(found.steps[number], adjacent=((one, other), (other, one)))
    with pytest.raises(ConfigurationError, match="cannot lie right behind"):
        make_plan(replace(found, steps=(*found.steps[:number], step, *found.steps[number + 1 :])))


@pytest.mark.slow
def test_on_cuda_every_buffer_of_the_arena_starts_at_a_multiple_of_256_bytes() -> None:
    of = model(p=WITH_DROPOUT)
    for device_type, alignment_bytes in (("cpu", 64), ("cuda", 256)):
        plan = make_plan(configuration(of, 0, device_type))
        starts = {buffer.start_bytes for buffer in plan.buffers if buffer.role == "arena"}
        assert len(starts) > 2
        assert not any(start % alignment_bytes for start in starts)
    assert any(start % 256 for start in {b.start_bytes for b in make_plan(configuration(of)).buffers})
