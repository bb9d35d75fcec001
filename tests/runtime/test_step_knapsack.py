"""Ways of a step's regions within what each moment leaves, against every combination."""

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.runtime import step_knapsack
from autotuner.runtime.step_knapsack import Room, Way, fastest_ways


def fits(ways: list[list[Way]], places: tuple[int, ...], room: Room) -> bool:
    held = 0
    for number, place in enumerate(places):
        way = ways[number][place]
        if held + way.forward_bytes > room.forward[number] or held + way.backward_bytes > room.backward[number]:
            return False
        held += way.held_bytes
        if held > room.behind[number]:
            return False
    return True


def time_us(ways: list[list[Way]], places: list[int] | tuple[int, ...]) -> float:
    return sum(options[place].time_us for options, place in zip(ways, places, strict=True))


BYTES = st.integers(0, 40)
WAYS = st.builds(Way, st.integers(1, 50).map(float), BYTES, BYTES, BYTES)
ROOM = st.one_of(st.just(inf), st.integers(0, 120).map(float))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_combination_that_fits_is_faster(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    ways = [data.draw(st.lists(WAYS, min_size=1, max_size=4)) for _ in range(count)]
    room = Room(*(data.draw(st.lists(ROOM, min_size=count, max_size=count)) for _ in range(3)))
    all_that_fit = [places for places in product(*map(range, map(len, ways))) if fits(ways, places, room)]
    found = fastest_ways(ways, room)
    if not all_that_fit:
        assert found is None
        return
    assert found is not None
    assert fits(ways, tuple(found), room)
    assert time_us(ways, found) == min(time_us(ways, places) for places in all_that_fit)


def test_equal_layers_mix_two_ways_where_one_is_too_slow_and_the_other_too_large() -> None:
    options = [Way(100.0, 50, 60, 60), Way(110.0, 20, 60, 60)]
    found = fastest_ways([options] * 10, Room([inf] * 10, [inf] * 10, [inf] * 9 + [350]))
    assert found is not None
    assert sorted(found) == [0] * 5 + [1] * 5


def test_of_many_combinations_some_are_dropped_and_what_is_found_fits_and_is_nearly_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_knapsack, "MOST_LABELS", 50)
    monkeypatch.setattr(step_knapsack, "PARTS", 40)
    ways = [[Way(100.0 + n, 1000 + 37 * n, 0, 0), Way(111.0 + 3 * n, 300 + 91 * n, 0, 0)] for n in range(16)]
    room = Room([inf] * 16, [inf] * 16, [inf] * 15 + [17_500])
    found = fastest_ways(ways, room)
    assert found is not None
    held = sum(options[place].held_bytes for options, place in zip(ways, found, strict=True))
    monkeypatch.undo()
    exact = fastest_ways(ways, room)
    assert exact is not None
    best = time_us(ways, exact)
    assert 16_500 <= held <= 17_500
    assert best <= time_us(ways, found) <= 1.01 * best
