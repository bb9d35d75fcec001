"""The choice between a shape and a larger one that is compiled, by times."""

import pytest

from autotuner.runtime.padding.choice import KEPT, PaddingChoice


@pytest.fixture
def choice() -> PaddingChoice:
    """Return a choice whose marks are times in microseconds."""
    return PaddingChoice(lambda began, ended: float(ended - began))


LARGE, SMALLER, NEAR = ((8, 100),), ((8, 25),), ((8, 90),)


def test_a_shape_is_padded_until_it_has_lost_the_time_of_compiling(choice: PaddingChoice) -> None:
    times = choice.add(LARGE)
    assert choice.pays(SMALLER, LARGE)  # nothing is known
    for _ in range(2):
        times.keep(0, 100, host_us=1000)
    # A step loses 75 of 100 us, and compiling took 1,000.
    assert [choice.pays(SMALLER, LARGE) for _ in range(15)] == [True] * 13 + [False] * 2


def test_a_shape_that_ran_is_padded_only_where_that_is_measured_to_be_faster(choice: PaddingChoice) -> None:
    for shape, step_us in ((LARGE, 100), (SMALLER, 120)):
        for number in range(KEPT + 1):
            assert number == 0 or shape == LARGE or not choice.pays(SMALLER, LARGE)
            choice.add(shape).keep(0, step_us, host_us=1000)
    assert choice.pays(SMALLER, LARGE)
    for _ in range(2 * KEPT):
        choice.times[SMALLER].keep(0, 90, host_us=0)
    assert not choice.pays(SMALLER, LARGE)


def test_the_larger_shape_with_the_least_time_is_padded_to(choice: PaddingChoice) -> None:
    for shape in (LARGE, NEAR):
        choice.add(shape)
    assert choice.target(SMALLER) == NEAR
    assert choice.target(LARGE) is None
    assert choice.target(((9, 10),)) is None
    for _ in range(2):
        choice.times[LARGE].keep(0, 100, host_us=1000)
    assert choice.target(SMALLER) == NEAR  # 90 us, by its tokens
    for _ in range(2):
        choice.times[NEAR].keep(0, 150, host_us=1000)
    assert choice.target(SMALLER) == LARGE
