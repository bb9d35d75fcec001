"""The choice between a shape and a larger one that is compiled, by times."""

import numpy as np
import pytest

from autotuner.runtime.padding.batches import tokens_in
from autotuner.runtime.padding.choice import KEPT, PaddingChoice

LARGE, SMALLER, NEAR = ((8, 100),), ((8, 25),), ((8, 90),)


@pytest.fixture
def choice() -> PaddingChoice:
    """Return a choice whose marks are times in microseconds."""
    return PaddingChoice(lambda began, ended: float(ended - began), limit=3)


def test_one_more_shape_is_compiled_where_padding_has_lost_as_much_as_that_takes(choice: PaddingChoice) -> None:
    times = choice.add(LARGE)
    assert choice.shape_of(SMALLER, LARGE) == LARGE  # nothing is known
    for _ in range(2):
        times.keep(0, 100, host_us=1000)
    # A step loses 75 of 100 us, and compiling took 1,000.
    assert [choice.shape_of(SMALLER, LARGE) for _ in range(14)] == [LARGE] * 13 + [SMALLER]
    assert set(choice.times) == {LARGE, SMALLER}


def test_the_shape_is_added_to_which_padding_would_have_saved_most(choice: PaddingChoice) -> None:
    for _ in range(2):
        choice.add(LARGE).keep(0, 100, host_us=1000)
    lengths = [50, 45, 40, 48, 95, 96, 10]
    ran = []
    while len(choice.times) == 1:
        for length in lengths:
            shape = ((8, length),)
            ran.append(choice.shape_of(shape, choice.targets(shape)[0]))
    assert set(choice.times) == {LARGE, ((8, 50),)}
    assert len(ran) <= 4 * len(lengths)  # a round loses 316 us
    assert choice.targets(((8, 45),)) == choice.targets(((4, 50),)) == [((8, 50),), LARGE]


def test_of_shapes_that_are_compiled_there_is_a_limit(choice: PaddingChoice) -> None:
    for _ in range(2):
        choice.add(LARGE).keep(0, 100, host_us=1)
    for length in range(10, 90, 10):
        shape = ((8, length),)
        choice.shape_of(shape, choice.targets(shape)[0])
    assert len(choice.times) == 3


def test_a_shape_that_ran_is_padded_only_where_that_is_measured_to_be_faster(choice: PaddingChoice) -> None:
    for shape, step_us in ((LARGE, 100), (SMALLER, 120)):
        for number in range(KEPT + 1):
            assert number == 0 or shape == LARGE or choice.shape_of(SMALLER, LARGE) == SMALLER
            choice.add(shape).keep(0, step_us, host_us=1000)
    assert choice.shape_of(SMALLER, LARGE) == LARGE
    for _ in range(2 * KEPT):
        choice.times[SMALLER].keep(0, 90, host_us=0)
    assert choice.shape_of(SMALLER, LARGE) == SMALLER


def test_the_larger_shape_with_the_least_time_is_padded_to(choice: PaddingChoice) -> None:
    for shape in (LARGE, NEAR):
        choice.add(shape)
    assert choice.targets(SMALLER)[0] == NEAR
    assert choice.targets(LARGE) == []
    assert choice.targets(((9, 10),)) == []
    for _ in range(2):
        choice.times[LARGE].keep(0, 100, host_us=1000)
    assert choice.targets(SMALLER)[0] == NEAR  # 90 us, by its tokens
    for _ in range(2):
        choice.times[NEAR].keep(0, 150, host_us=1000)
    assert choice.targets(SMALLER)[0] == LARGE


@pytest.mark.parametrize("calls, added, shapes", [(100, 0.62, 1), (1000, 0.12, 5), (10_000, 0.07, 8)])
def test_a_longer_loop_compiles_more_shapes_and_pads_less(calls: int, added: float, shapes: int) -> None:
    """Batches of 8 lognormal lengths; 137 us a token, 10 s to compile the first shape and 3 s for each other."""
    drawn = np.random.default_rng(0).lognormal(np.log(0.2 * 128), 0.8, (calls, 8)).clip(4, 128).astype(int)
    choice = PaddingChoice(lambda began, ended: float(ended - began), limit=8)
    choice.add(((8, 128),))
    tokens = places = 0
    for number, lengths in enumerate(drawn):
        shape = ((8, int(lengths.max())),)
        larger = choice.targets(shape)
        found = choice.shape_of(shape, larger[0]) if larger else shape
        times, step_us = choice.add(found), 137.0 * tokens_in(found)
        first = not any(each.steps for each in choice.times.values())
        compile_us = 0.0 if times.steps else 10e6 if first else 3e6
        times.keep(0, step_us, host_us=step_us + compile_us)
        if number >= calls // 2:
            tokens, places = tokens + tokens_in(shape), places + tokens_in(found)
    assert places / tokens - 1 <= added
    assert sum(each.steps > 0 for each in choice.times.values()) == shapes
