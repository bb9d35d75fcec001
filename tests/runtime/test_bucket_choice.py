"""Buckets of gradients: which are exchanged together."""

from hypothesis import given
from hypothesis import strategies as st

from autotuner.runtime.bucket_choice import (
    MEBIBYTE,
    SIZES,
    Arrival,
    ExchangeTime,
    buckets_of,
    chosen_limit,
    exposed_us,
)

LAYER = 12 * MEBIBYTE


def layers(count: int, us: float) -> list[Arrival]:
    return [Arrival(LAYER, us=us * number) for number in range(1, count + 1)]


def test_gradients_fill_a_bucket_in_the_order_in_which_they_come() -> None:
    arrivals = [Arrival(size) for size in (4, 4, 4, 9, 1, 1)]
    assert buckets_of(arrivals, 8) == [[0, 1], [2], [3], [4, 5]]


def test_buckets_have_one_place_each_and_go_in_the_order_in_which_they_are_complete() -> None:
    arrivals = [Arrival(4, place) for place in ("a", "b", "a", "b", "b")]
    assert buckets_of(arrivals, 8) == [[0, 2], [1, 3], [4]]
    assert buckets_of(arrivals, 12) == [[0, 2], [1, 3, 4]]


def test_small_buckets_win_where_exchanges_are_as_slow_as_backward() -> None:
    # The exchange of a layer takes 0.9 of its backward: what counts is that the last bucket is small.
    time = ExchangeTime.fitted(MEBIBYTE, 10 + 90, 12 * MEBIBYTE, 10 + 12 * 90)
    assert (round(time.us), round(time.of(LAYER))) == (10, 1090)
    arrivals = layers(24, 1200.0)
    assert exposed_us(arrivals, LAYER, time) == time.of(LAYER)
    assert exposed_us(arrivals, 24 * LAYER, time) == time.of(24 * LAYER)
    assert chosen_limit(arrivals, time) == 16 * MEBIBYTE
    assert exposed_us(arrivals, 32 * MEBIBYTE, time) == time.of(2 * LAYER)  # which is 4 % of all exchanges more


def test_large_buckets_win_where_an_exchange_is_slow_by_itself() -> None:
    assert chosen_limit(layers(24, 10.0), ExchangeTime(1000.0, 1e-6)) == SIZES[-1]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from("ab"), st.floats(0, 1e4)), min_size=1, max_size=30),
    st.floats(0, 100), st.floats(0, 1e-3),
)  # fmt: skip
def test_no_size_is_much_better_than_the_chosen_one(
    drawn: list[tuple[int, str, float]], us: float, rate: float
) -> None:
    arrivals = [Arrival(size << 16, place, at) for size, place, at in sorted(drawn, key=lambda each: each[2])]
    time = ExchangeTime(us, rate)
    chosen = exposed_us(arrivals, chosen_limit(arrivals, time), time)
    allowed = 0.02 * time.of(sum(arrival.size for arrival in arrivals))
    assert chosen <= min(exposed_us(arrivals, limit, time) for limit in SIZES) + allowed + 1e-6
    for limit in SIZES:
        numbers = [number for bucket in buckets_of(arrivals, limit) for number in bucket]
        assert sorted(numbers) == list(range(len(arrivals)))
