"""Sizes that are tried within a budget, for made-up steps whose needs grow evenly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.api.batch_sizes import TriedSize, next_size

BUDGET = 100_000
MOST = 12


def tried(base: int, least: int, fastest: int, *, knows: bool = True) -> list[TriedSize]:
    """Return the sizes that are tried where a step needs a base, and this much for each sample."""
    found: list[TriedSize] = []
    while (size := next_size(found, BUDGET)) is not None:
        assert size not in {each.size for each in found}
        needs, most = base + least * size, base + fastest * size
        fits = needs <= BUDGET
        found.append(TriedSize(size, fits, needs if fits or knows else None, most if fits else None))
        assert len(found) <= MOST
    return found


@given(st.integers(0, 90_000), st.integers(20, 9_000), st.floats(1.0, 4.0))
def test_the_largest_that_runs_is_found_and_the_largest_that_gives_nothing_up(
    base: int, least: int, more: float
) -> None:
    fastest = int(least * more)
    found = tried(base, least, fastest)
    ran = [each.size for each in found if each.fits]
    limit = (BUDGET - base) / least
    if limit < 1:
        assert ran == []
        return
    step = 8 if limit >= 16 else 2 if limit >= 4 else 1
    assert max(ran) == limit // step * step
    unhurried = (BUDGET - base) / fastest
    even = 8 if unhurried >= 16 else 2 if unhurried >= 4 else 1
    if len(ran) > 1 and unhurried >= 1:
        assert unhurried // even * even in ran


def test_a_size_that_finds_no_memory_says_nothing_of_what_it_needs_and_the_middle_is_tried() -> None:
    assert [each.size for each in tried(0, 8_000, 16_000, knows=False)] == [8, 16, 12, 6]


def test_where_nothing_runs_sizes_are_halved_down_to_one() -> None:
    assert [each.size for each in tried(BUDGET, 1, 1)] == [8, 4, 2, 1]


@pytest.mark.parametrize(("least", "sizes"), [(20_000, [8, 4]), (900, [8, 16, 64, 104])])
def test_sizes_that_are_tried(least: int, sizes: list[int]) -> None:
    assert [each.size for each in tried(0, least, least)] == sizes
