"""Numbers as people read them, the scale of the range bars, and shares of the time."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import binary, change, duration, microseconds, moment, percent, ratio, span
from autotuner.plan.report import shares
from autotuner.plan.report.steps import MOST_TICKS, Range, Scale
from autotuner.settings import parsed_bytes


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.0, "0 µs"), (4.992, "4.99 µs"), (66.94, "66.9 µs"), (999.4, "999 µs"), (999.5, "1.00 ms"), (2410.0, "2.41 ms"),
     (999_500.0, "1.00 s"), (143.3e6, "143 s"), (None, "–")],  # noqa: RUF001
)  # fmt: skip
def test_a_time_has_three_digits_and_the_unit_that_suits_it(us: float | None, text: str) -> None:
    assert duration(us) == text


@pytest.mark.parametrize(("us", "text"), [(66.94, "66.9"), (99.96, "100"), (1240.4, "1,240"), (9.996, "10.0")])
def test_a_column_of_times_is_in_microseconds(us: float, text: str) -> None:
    assert microseconds(us) == text


@given(st.integers(0, 1 << 49))
@example(1_072_693_249)  # one more than 1,023 MiB
@example(1_047_999_999)  # 999.45 MiB
def test_bytes_that_are_rounded_up_are_enough_where_they_are_given_as_a_budget(count: int) -> None:
    assert count <= (parsed_bytes(binary(count, up=True), "--budget") or 0) <= max(count + 1, round(count * 1.011))


def test_sums_of_the_same_times_in_another_order_read_alike() -> None:
    assert microseconds(sum([9.23] * 5)) == microseconds(46.15)


def test_shares_differences_and_bytes_carry_their_sign_and_unit() -> None:
    assert (percent(0.123), percent(-0.273, signed=True), percent(0.5, signed=True)) == ("12.3 %", "−27.3 %", "+50.0 %")  # noqa: RUF001
    assert (change(12.54), change(-6.3), change(-0.01)) == ("+12.5", "−6.3", "0.0")  # noqa: RUF001
    assert (binary(512), binary(2 << 20), binary(1_572_864)) == ("512 B", "2.00 MiB", "1.50 MiB")
    counts = (512, 2 << 20, (3 << 19) + 1, (100 << 30) - 1, 1023 << 20)
    assert [binary(count, up=True) for count in counts] == ["512 B", "2.00 MiB", "1.51 MiB", "100 GiB", "1.00 GiB"]
    assert ratio(1.914) == "1.91×"  # noqa: RUF001


def test_an_interval_names_its_unit_once_where_it_can() -> None:
    assert span(38.5, 46.5) == "38.5 to 46.5 µs"
    assert span(990.0, 1010.0) == "990 µs to 1.01 ms"


def test_a_date_reads_as_one_and_another_text_stays() -> None:
    assert moment("2026-11-20T08:05:00+00:00") == "20 November 2026, 08:05 UTC"
    assert moment("last week") == "last week"


def test_the_scale_begins_at_the_best_and_is_logarithmic() -> None:
    scale = Scale.over([Range(10.0, 20.0, 40.0, 1000.0), Range(5.0, 5.0)])
    assert (scale.place(1.0), scale.place(10.0), scale.place(100.0)) == pytest.approx((0.0, 0.5, 1.0))
    assert scale.ticks == (1.0, 10.0, 100.0)
    assert Scale.over([Range(10.0, 60.0)]).ticks == (1.0, 2.0, 5.0)


def test_a_default_below_the_best_of_a_fused_set_has_a_place_too() -> None:
    scale = Scale.over([Range(10.0, 12.0, 5.0, 20.0)])
    assert scale.place(0.5) == 0.0
    assert 0 < scale.x(0.5) < scale.x(1.0) < scale.x(2.0) < scale.width


def test_a_best_that_is_not_known_or_takes_no_time_has_no_multiples() -> None:
    assert Range(None, 10.0).multiples == Range(0.0, 10.0).multiples == {}
    assert Scale.over([Range(None, 10.0)]) == Scale.over([])


@pytest.mark.parametrize("high", [1.5, 8.0, 90.0, 3e4])
def test_ticks_stay_few_enough_to_be_read(high: float) -> None:
    ticks = Scale(1.0, high).ticks
    assert 1 <= len(ticks) <= MOST_TICKS
    assert all(1.0 <= tick <= high for tick in ticks)


@pytest.mark.slow
def test_shares_add_up_to_the_whole(encoder: Configuration) -> None:
    total = sum(step.predicted_us for step in encoder.steps)
    classes = shares.by_class(encoder)
    assert sum(found.us for found in classes) == pytest.approx(total)
    assert sum(found.steps for found in classes) == len(encoder.steps)
    assert sum(found.operators for found in classes) == len(encoder.graph().operators)
    for share in ("share", "flop_share", "bytes_share"):
        assert sum(getattr(found, share) for found in classes) == pytest.approx(1.0)
    for found in (shares.by_kind(encoder), shares.by_kernel(encoder)):
        assert sum(share.us for share in found) == pytest.approx(total)
        assert [share.us for share in found] == sorted((share.us for share in found), reverse=True)
    kinds = {share.name: share.number for share in shares.by_kind(encoder)}
    assert kinds["conversion"] == sum(step.is_conversion for step in encoder.steps)
    assert sum(kinds.values()) == len(encoder.graph().operators) + kinds["conversion"]
