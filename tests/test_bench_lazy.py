"""The walks of scripts/bench_lazy: what its sentences say of them is what they found."""

import pytest

from scripts.bench.lazy_cases import made_up
from scripts.bench.lazy_walks import (
    BARS,
    DISTURBED,
    LEFT_OUT,
    cross_validated,
    disturbed,
    expectations,
    expected_walk,
    sentences,
    tuned_walk,
)


def test_a_walk_reaches_its_gaps_in_order_and_knows_how_far_off_it_was() -> None:
    case = made_up(12, 3, 0)
    reached = expected_walk(case)
    assert [each.bar for each in reached] == list(BARS)
    assert 0 < reached[0].share <= reached[1].share <= 1
    assert 0 <= reached[1].regret <= reached[0].regret


def test_parts_of_a_case_differ_and_have_a_plan() -> None:
    case = made_up(12, 3, 0)
    parts = [case.without(LEFT_OUT, seed) for seed in range(3)]
    assert len({frozenset(part.true_us) for part in parts}) == 3
    for part in parts:
        assert set(part.first) <= part.true_us.keys() < case.true_us.keys()
        assert part.solve(part.true_us).total_us >= case.solve(case.true_us).total_us


def test_a_sentence_counts_the_walks_in_which_an_estimate_was_right() -> None:
    found = [
        {"title": "one", "reached": [told(0.05, 0.1, 0.04), told(0.01, 0.2, 0.02)]},
        {"title": "two", "reached": [told(0.05, 0.3, 0.05), told(0.01, 0.4, 0.0)]},
    ]
    assert sentences(found)[-1] == (
        "- In all: an estimated 5% was right in 2 of 2 recorded walks (truly 5.0% above the optimum at most), after "
        "20.0% of the calls in the mean, 30.0% at most; an estimated 1% was right in 1 of 2 recorded walks (truly 2.0% "
        "above the optimum at most), after 30.0% of the calls in the mean, 40.0% at most."
    )
    assert len(sentences(found)) == 3
    assert len(sentences(found[:1])) == 1


def test_cross_validation_walks_as_often_as_it_is_told() -> None:
    found = cross_validated(made_up(12, 3, 0), 2)
    assert len(found["reached"]) == 2 * len(BARS)
    assert found["walks"] == 2


@pytest.mark.slow
def test_disturbed_times_differ_by_up_to_their_share_and_have_an_optimum_of_their_own() -> None:
    case = made_up(12, 3, 0)
    one, other = case.disturbed(DISTURBED, 1), case.disturbed(DISTURBED, 2)
    assert one.true_us.keys() == other.true_us.keys() == case.true_us.keys()
    assert one.true_us == case.disturbed(DISTURBED, 1).true_us != other.true_us
    ratios = [one.true_us[key] / us for key, us in case.true_us.items() if us]
    assert 1 - DISTURBED <= min(ratios) < 0.9 < 1.1 < max(ratios) <= 1 + DISTURBED
    for each in (one, other):
        reached = tuned_walk(each)
        assert [at.bar for at in reached] == list(BARS)
        assert 0 < reached[0].share <= reached[1].share <= 1
        assert reached[1].regret >= 0


@pytest.mark.slow
def test_what_to_expect_is_the_mean_of_walks_with_their_spread() -> None:
    reached = [told(0.05, 0.1, 0.04), told(0.01, 0.1, 0.02), told(0.05, 0.1, 0.06), told(0.01, 0.3, 0.0)]
    assert expectations([{"title": "one", "reached": reached}]) == [
        ("one", "5%", "10.0% ± 0.0%", "10.0%", "5.00% ± 1.41%", "6.00%", "1 of 2"),
        ("one", "1%", "20.0% ± 14.1%", "30.0%", "1.00% ± 1.41%", "2.00%", "1 of 2"),
    ]
    found = disturbed(made_up(12, 3, 0), 2)
    assert (found["walks"], len(found["reached"])) == (2, 2 * len(BARS))


def told(bar: float, share: float, regret: float) -> dict[str, float]:
    return {"bar": bar, "share": share, "regret": regret}
