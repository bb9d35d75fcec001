"""Overlap of steps: slack, branches that are worth trying, the choice among them, and the memory that they need."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotuner.plan.configuration import Configuration
from autotuner.plan.overlap import chosen_overlap, exceeds_budget, proposed_branches, slack_us, with_overlap
from autotuner.plan.parts import Memory, Overlap
from autotuner.plan.step import Branches, Step, sources_of
from tests.runtime.plans import WITH_DROPOUT, configuration, model


@pytest.fixture(scope="module")
def found() -> Configuration:
    return configuration(model(p=WITH_DROPOUT), 0)


def longest_us(steps: Sequence[Step], phase: str) -> float:
    """Return what a phase takes if steps that do not need each other run at the same time."""
    sources = sources_of(steps)
    ends: dict[int, float] = {}
    for number, step in enumerate(steps):
        if step.phase == phase:
            ends[number] = step.predicted_us + max((ends.get(source, 0.0) for source in sources[number]), default=0.0)
    return max(ends.values())


def test_a_step_may_take_longer_by_its_slack_before_the_whole_does(found: Configuration) -> None:
    slack = slack_us(found.steps)
    assert min(slack) == 0 < max(slack)
    for number, step in enumerate(found.steps):
        limit_us = longest_us(found.steps, step.phase)
        for more_us in (slack[number], slack[number] + 0.01 * limit_us):
            slower = replace(step, predicted_us=step.predicted_us + more_us)
            steps = (*found.steps[:number], slower, *found.steps[number + 1 :])
            grown = longest_us(steps, step.phase) > limit_us * (1 + 1e-9)
            assert grown == (more_us > slack[number]), step.label


def test_masks_and_weight_gradients_are_worth_trying_beside_others_and_each_step_in_one_branch(
    found: Configuration,
) -> None:
    light, heavy = proposed_branches(found)
    names = [{name for number in branch for name in found.steps[number].operators} for branch in (light, heavy)]
    assert {"output_dropout_mask", "grad_norm1_scale_and_norm1_bias"} <= names[0] | {
        name for step in found.steps if len(step.operators) > 1 for name in step.operators
    }
    assert any(name.endswith("_weight") for name in names[1])
    assert not set(light) & set(heavy)
    assert [*light] == sorted(light)


def comparing(gains: dict[int, float], asked: list[tuple[Branches, Branches]]) -> object:
    """Return a comparison in which each step on a branch gains so much, with an interval of 2 us."""

    def compared(before: Branches, after: Branches) -> Overlap:
        asked.append((before, after))
        total = [sum(gains[number] for branch in branches for number in branch) for branches in (before, after)]
        gain = total[1] - total[0]
        return Overlap(after, gain, gain - 1, gain + 1)

    return compared


def test_a_branch_that_helps_as_a_whole_loses_the_steps_that_harm() -> None:
    overlap = chosen_overlap(((1, 2, 3), (4,)), comparing({1: 5.0, 2: -2.0, 3: 0.0, 4: 0.5}, []))  # type: ignore[arg-type]
    assert overlap == Overlap(((1, 3),), 5.0, 4.0, 6.0)


def test_of_a_branch_that_does_not_help_as_a_whole_steps_that_do_are_taken_alone() -> None:
    overlap = chosen_overlap(((1, 2, 3),), comparing({1: -9.0, 2: 3.0, 3: 2.0}, []))  # type: ignore[arg-type]
    assert overlap == Overlap(((2, 3),), 5.0, 4.0, 6.0)


def test_without_a_gain_that_is_sure_all_steps_stay_on_one_stream() -> None:
    asked: list[tuple[Branches, Branches]] = []
    assert chosen_overlap(((1, 2),), comparing({1: 0.9, 2: 0.0}, asked)) is None  # type: ignore[arg-type]
    assert asked == [((), ((1, 2),)), ((), ((1,),)), ((), ((2,),))]


def test_an_overlap_needs_the_memory_of_its_branches_and_a_workspace_for_each(found: Configuration) -> None:
    planned = Memory(None, 100, 0)
    one = with_overlap(replace(found, memory=planned), None)
    assert one.memory == planned
    overlap = Overlap(proposed_branches(found), 1.0, 0.5, 1.5)
    plain = with_overlap(replace(found, memory=replace(planned, peak_bytes=10_000_000)), overlap)
    more = with_overlap(replace(found, memory=replace(planned, peak_bytes=10_000_001)), overlap)
    assert plain.memory is not None
    assert more.memory is not None
    assert more.memory.peak_bytes == plain.memory.peak_bytes + 3
    assert not exceeds_budget(plain)
    assert exceeds_budget(replace(plain, memory=replace(plain.memory, budget_bytes=plain.memory.peak_bytes - 1)))
