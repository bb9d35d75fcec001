"""Steps over streams: what waits for what, when a step may run, and that steps beside each other share no memory."""

import random
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from autotuner.errors import ConfigurationError
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import MemoryPlan, Schedule, make_plan
from autotuner.plan.overlap import proposed_branches, slack_us
from autotuner.plan.parts import Overlap
from autotuner.plan.step import Branches
from tests.runtime.plans import WITH_DROPOUT, configuration, model


def of(sources: str, forward: int, branches: Branches = ()) -> Schedule:
    """Return a schedule of steps that read from steps: "- 0 01" for three steps, the last of which reads from both."""
    return Schedule(tuple(frozenset(int(n) for n in step if n != "-") for step in sources.split()), forward, branches)


def test_without_branches_each_step_has_its_tick_and_waits_for_nobody() -> None:
    schedule = of("- 0 1 2", forward=2)
    assert schedule.windows == ((1, 1), (2, 2), (4, 4), (5, 5))
    assert [schedule.waits(number) for number in range(4)] == [[], [], [], []]


def test_a_step_on_a_branch_may_run_from_what_it_reads_until_its_first_reader() -> None:
    """Step 1 reads from 0, and 3 reads from it: it runs beside step 2, and may end when one that waits for 2 begins."""
    schedule = of("- 0 0 12", forward=4, branches=((1,),))
    assert schedule.streams == (0, 1, 0, 0)
    assert schedule.windows == ((1, 1), (2, 4), (3, 3), (4, 4))
    assert (schedule.waits(1), schedule.waits(2), schedule.waits(3)) == ([0], [], [1])
    assert schedule.awaited == {0, 1}


def test_a_step_that_reads_nothing_may_run_from_the_beginning_of_its_phase_and_an_unread_one_until_its_end() -> None:
    schedule = of("- 0 - 0 3 -", forward=3, branches=((2, 5),))
    assert schedule.windows[2] == (1, 3)
    assert schedule.windows[5] == (5, 7)


def test_steps_of_one_branch_run_one_after_the_other() -> None:
    """Step 1 is read by step 4, so it is over when that begins; 3 comes after it, and 1 comes before what reads 3."""
    schedule = of("- 0 0 2 1 3", forward=6, branches=((1, 3),))
    assert schedule.windows[1] == (2, 5)
    assert schedule.windows[3] == (4, 6)


def test_a_step_may_run_as_early_as_one_of_another_branch_that_it_reads_from() -> None:
    schedule = of("- 0 1 0 0", forward=5, branches=((1,), (2,)))
    assert schedule.windows[2] == (2, 5)
    assert schedule.waits(2) == [1]


@pytest.mark.parametrize("branches", [((4,),), ((1, 1),), ((1,), (1,)), ((2, 1),), ((),), ((-1,),)])
def test_branches_that_are_not_of_the_steps_are_refused(branches: Branches) -> None:
    with pytest.raises(ConfigurationError, match="must list steps from 0 to 3"):
        of("- 0 1 2", forward=2, branches=branches)


def with_branches(found: Configuration, branches: Branches) -> Configuration:
    return replace(found, overlap=Overlap(branches, 1.0, 0.5, 1.5))


def test_a_step_that_waits_for_the_one_before_a_reader_may_run_beside_what_is_read() -> None:
    """Step 5 reads from 3 and 4. Step 1 is over when 3 begins; step 4 may begin when 2 is over."""
    schedule = of("- 0 0 01 2 34", forward=6, branches=((4, 5), (1,)))
    assert schedule.windows[1][1] >= schedule.windows[4][0]


def spans(plan: MemoryPlan, draw: random.Random, needed: Collection[int]) -> list[tuple[float, float]]:
    """Return when each step runs, if each takes a random time, as its stream lets it; others take none."""
    schedule = plan.schedule
    found: list[tuple[float, float]] = []
    free: dict[int, float] = {}
    began = 0.0
    for number in range(len(plan.steps)):
        if number == plan.forward:
            began = max((end for _, end in found), default=0.0) + 1.0
            free = {}
        start = max([began, free.get(schedule.streams[number], 0.0), *(found[n][1] for n in schedule.waits(number))])
        found.append((start, start + (draw.choice([0.01, 1.0, 5.0]) if number in needed else 0.0)))
        free[schedule.streams[number]] = found[-1][1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_however_long_steps_take_no_two_that_are_needed_at_once_share_bytes(seed: int) -> None:
    draw = random.Random(seed)
    found = configuration(model(p=WITH_DROPOUT), seed)
    free = [number for number, us in enumerate(slack_us(found.steps)) if us > 0]
    assert len(free) > 4
    streams = [draw.randrange(3) for _ in free]
    branches = tuple(tuple(n for n, s in zip(free, streams, strict=True) if s == place) for place in range(3))
    plan = make_plan(with_branches(found, tuple(filter(None, branches))))
    assert plan.arena_bytes > make_plan(found).arena_bytes
    gradients = [name for name in plan.outputs if name.startswith("grad_")]
    forward = set(range(plan.forward))
    for turn in range(40):
        wanted = gradients if turn % 2 else draw.sample(gradients, draw.randint(1, len(gradients)))
        needed = forward | plan.needed(wanted)
        times = spans(plan, draw, needed)
        lives: dict[int, list[float]] = {}
        for number, ((start, end), step) in enumerate(zip(times, plan.steps, strict=True)):
            for place in (*step.inputs, *step.outputs) if number in needed else ():
                if place is not None:
                    lives.setdefault(plan.buffer_of[place], []).extend((start, end))
        for place in plan.inputs.values():
            lives[plan.buffer_of[place]].append(-1.0)
        for place in plan.given.values():
            lives[plan.buffer_of[place]].append(times[plan.forward - 1][1])
        arena = [number for number, buffer in enumerate(plan.buffers) if buffer.role == "arena" and number in lives]
        for one, other in combinations(arena, 2):
            a, b = plan.buffers[one], plan.buffers[other]
            together = min(lives[one]) < max(lives[other]) and min(lives[other]) < max(lives[one])
            apart = a.start_bytes + a.size_bytes <= b.start_bytes or b.start_bytes + b.size_bytes <= a.start_bytes
            assert apart or not together, (a, b)


def test_without_sharing_every_buffer_of_the_arena_has_bytes_of_its_own() -> None:
    plan = make_plan(configuration(model(), 0), shares=False)
    arena = sorted(
        (b for b in plan.buffers if b.role == "arena"), key=lambda buffer: (buffer.start_bytes, buffer.size_bytes)
    )
    assert all(a.start_bytes + a.size_bytes <= b.start_bytes for a, b in pairwise(arena))


def test_what_forward_holds_for_backward_is_the_same_with_branches() -> None:
    found = configuration(model(p=WITH_DROPOUT), 1)
    plans = [make_plan(each) for each in (found, with_branches(found, proposed_branches(found)))]
    held = [sorted(plan.buffers[number].size_bytes for number in plan.saved) for plan in plans]
    assert held[0] == held[1]
