from math import prod

import pytest

from autotuner.plan.memory_planner import MemoryPlan, make_plan, memory
from tests.runtime.plans import TINY, WITH_DROPOUT, configuration, model
from tests.runtime.regions import shared_model

DOUBLE = 8


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return make_plan(configuration(model(p=WITH_DROPOUT), 0))


@pytest.mark.slow
def test_the_arena_is_what_is_live_at_most_and_hardly_more(plan: MemoryPlan) -> None:
    needs = memory(plan)
    arena = [buffer for buffer in plan.buffers if buffer.role == "arena"]
    live = max(sum(b.size_bytes for b in arena if b.first <= tick <= b.last) for tick in range(len(plan.steps) + 2))
    assert live <= needs.arena_bytes <= 1.05 * live


def test_what_backward_reads_of_forward_is_held_once(plan: MemoryPlan) -> None:
    made = {place for step in plan.steps if step.phase == "forward" for place in step.outputs} | {*plan.inputs.values()}
    read = {place for step in plan.steps if step.phase == "backward" for place in step.inputs}
    buffers = {plan.buffer_of[place] for place in made & read if place is not None}
    assert memory(plan).held_bytes == sum(plan.buffers[number].size_bytes for number in buffers) > 0


@pytest.mark.slow
def test_output_and_gradients_are_handed_out_beside_the_arena() -> None:
    found = make_plan(configuration(model(), 0))
    gradients = [name for name in found.outputs if name.startswith("grad_")]
    elements = sum(prod(found.graph.shape(name)) for name in gradients) + TINY["b"] * TINY["l"] * TINY["h"]
    assert not found.held_outputs
    assert memory(found).outputs_bytes == DOUBLE * elements


def test_an_output_that_backward_reads_is_held_and_handed_out_as_a_copy() -> None:
    found = make_plan(configuration(shared_model(), 0))
    (held,) = found.held_outputs
    assert [name for name, _ in found.buffers[held].offsets] == ["key"]
    once = sum(buffer.size_bytes for buffer in found.buffers if buffer.role == "output")
    assert memory(found).outputs_bytes == once + found.buffers[held].size_bytes


def test_the_peak_has_the_largest_workspace_in_it_and_no_other(plan: MemoryPlan) -> None:
    one, other = plan.steps[0].call.key, plan.steps[-1].call.key
    assert one != other
    assert memory(plan, {one: 700, other: 500}).peak_bytes == memory(plan).peak_bytes + 700


def test_a_held_tensor_makes_room_when_backward_has_read_it(plan: MemoryPlan) -> None:
    (earliest, *_) = sorted(plan.saved, key=lambda number: plan.buffers[number].last)
    assert plan.boundary < plan.buffers[earliest].last < plan.tick(len(plan.steps) - 1)
