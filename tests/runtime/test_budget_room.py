"""How much of a budget predictions may take."""

import pytest

from autotuner.runtime.budget_room import MARGIN, SHORT, SPARE, TAKEN, TRIES, BudgetRoom

BUDGET = 1_000_000


def room(peak: int = 500_000, reserved: int = 540_000) -> BudgetRoom:
    made = BudgetRoom(BUDGET)
    made.begin(peak, reserved)
    return made


def test_an_allocator_without_blocks_leaves_all_of_it() -> None:
    found = room(reserved=0)
    assert found.predicted_bytes == BUDGET
    assert found.least_budget(700_000) == 700_000
    assert not found.grow(1)


def test_what_is_held_beside_and_a_share_are_left_free_and_the_least_budget_has_just_that_room() -> None:
    found = room()
    assert found.predicted_bytes == pytest.approx((1 - SPARE) * BUDGET - 40_000)
    exact = BudgetRoom(found.least_budget(600_000))
    exact.begin(500_000, 540_000)
    assert exact.predicted_bytes == pytest.approx(600_000, abs=2)


def test_a_step_above_the_budget_leaves_less_and_then_nothing_grows() -> None:
    found = room()
    before = found.predicted_bytes
    found.shrink(BUDGET + 30_000)
    assert before - found.predicted_bytes == pytest.approx(30_000 + MARGIN * BUDGET, abs=1)
    assert not found.grow(BUDGET // 2)


def test_most_of_what_a_step_leaves_is_taken_but_no_more_than_was_left_free() -> None:
    found = room()
    before = found.predicted_bytes
    assert found.grow(BUDGET - 20_000)
    assert found.predicted_bytes - before == pytest.approx(TAKEN * 20_000)
    assert not found.grow(BUDGET - 9_000)  # too little for another choice
    assert found.grow(BUDGET - 300_000)
    assert found.predicted_bytes == BUDGET - 40_000
    assert not found.grow(BUDGET - 300_000)


def test_after_some_tries_nothing_grows() -> None:
    found = room()
    found.tries = TRIES
    assert not found.grow(BUDGET // 2)
    assert not found.has_tries


def test_each_step_that_finds_no_memory_counts_as_twice_as_much_above_the_budget() -> None:
    found = room()
    assert [found.lacked_bytes() for _ in range(3)] == [round(BUDGET * (1 + SHORT * times)) for times in (1, 2, 4)]
