"""Learned costs: what is said of calls that are not measured, by those that are."""

import json
import random
from dataclasses import replace

import pytest

from autotuner.database import open_database
from autotuner.database.recorded import recordings, unpacked
from autotuner.measure.roofline import Work, work_of
from autotuner.tuner.learned import ALIKE, COVERAGE, Traits, learned_costs, traits_of
from autotuner.tuner.priors import FILE, priors_of, priors_of_database, shipped_priors, written
from tests.tuner.conftest import Recorded


@pytest.mark.parametrize("seed", range(3))
def test_most_calls_take_at_least_what_was_learned(recorded: Recorded, seed: int) -> None:
    """On a sample drawn at random: 9 in 10 were asked for; the greater of two such costs holds for fewer."""
    calls = recorded.space.calls
    optimistic = {key: recorded.ceilings.optimistic_us(work_of(call)) for key, call in calls.items()}
    times = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    measured = {key: times[key] for key in random.Random(seed).sample(sorted(times), 200)}
    learned = learned_costs(traits_of(calls), optimistic, measured).likely_us
    assert learned.keys() == calls.keys() - measured.keys()
    assert all(us >= optimistic[key] for key, us in learned.items())
    holds = sum(times[key] >= us for key, us in learned.items()) / len(learned)
    assert holds >= COVERAGE - 0.12
    assert sum(us > 1.1 * optimistic[key] for key, us in learned.items()) > len(learned) / 4, "something was learned"


def test_half_of_the_calls_take_at_least_the_learned_median(recorded: Recorded) -> None:
    calls = recorded.space.calls
    optimistic = {key: recorded.ceilings.optimistic_us(work_of(call)) for key, call in calls.items()}
    times = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    measured = {key: times[key] for key in random.Random(0).sample(sorted(times), 200)}
    learned = learned_costs(traits_of(calls), optimistic, measured)
    assert all(us >= learned.likely_us[key] for key, us in learned.median_us.items())
    assert 0.4 <= sum(times[key] >= us for key, us in learned.median_us.items()) / len(learned.median_us) <= 0.6


def test_one_call_says_what_others_of_its_family_with_as_much_work_or_more_take_at_least() -> None:
    traits = {
        "a": traits_with("one", 100.0), "same": traits_with("one", 100.0), "more": traits_with("one", 150.0),
        "half": traits_with("one", 50.0), "other": traits_with("two", 100.0),
    }  # fmt: skip
    learned = learned_costs(traits, dict.fromkeys(traits, 1.0), {"a": 10.0}).likely_us
    assert learned == {"same": 10.0 * ALIKE, "more": 10.0 * ALIKE, "half": 5.0 * ALIKE, "other": 1.0}


def test_work_that_is_more_in_bytes_and_less_in_flop_counts_by_the_lesser_share() -> None:
    traits = {"a": traits_with("one", 100.0, float32=8.0), "b": traits_with("one", 200.0, float32=2.0)}
    assert learned_costs(traits, {"a": 1.0, "b": 1.0}, {"a": 20.0}).likely_us == {"b": 5.0 * ALIKE}
    assert learned_costs(traits, {"a": 1.0, "b": 1.0}, {"b": 20.0}).likely_us == {"a": 10.0 * ALIKE}


def test_how_alike_calls_of_a_family_are_is_learned_from_them() -> None:
    """Of nine measured calls the fastest takes 12, three quarters of what the others show; of eight, too few are."""
    traits = {str(n): traits_with("one", 100.0) for n in range(10)}
    optimistic = {key: 0.001 if key == "9" else 1.0 for key in traits}
    times = {str(n): 16.0 if n else 12.0 for n in range(9)}
    assert learned_costs(traits, optimistic, times).likely_us == {"9": 0.75 * 12.0}
    fewer = {key: us for key, us in times.items() if key != "8"}
    assert learned_costs(traits, optimistic, fewer).likely_us["9"] == ALIKE * 12.0


def test_too_few_measured_calls_say_nothing() -> None:
    """8 say nothing of nine tenths, 9 that one more is likely above the least of them, and half above their median."""
    traits = {str(n): traits_with(str(n), 1.0) for n in range(10)}
    optimistic = dict.fromkeys(traits, 1.0)
    few = learned_costs(traits, optimistic, {str(n): 3.0 + n for n in range(8)})
    assert few.likely_us == {"8": 1.0, "9": 1.0}
    enough = learned_costs(traits, optimistic, {str(n): 3.0 + n for n in range(9)})
    assert (enough.likely_us, enough.median_us) == ({"9": 3.0}, {"9": 7.0})


def traits_with(family: str, moved_bytes: float, **flop: float) -> Traits:
    return Traits(family, Work(moved_bytes, flop))


def test_priors_say_what_is_expected_until_the_calls_of_a_family_do() -> None:
    """The closer name counts, before what every call says and behind what nine of the own family do."""
    traits = {str(n): replace(traits_with("one", 1.0), priors=("near", "far")) for n in range(11)}
    traits |= {"far": replace(traits_with("two", 1.0), priors=("no", "far")), "none": traits_with("three", 1.0)}
    optimistic = dict.fromkeys(traits, 1.0)
    priors = {"near": (4.0, 6.0), "far": (2.0, 3.0)}
    nothing = learned_costs(traits, optimistic, {}, priors=priors)
    assert (nothing.likely_us["0"], nothing.median_us["0"]) == (4.0, 6.0)
    assert (nothing.likely_us["far"], nothing.median_us["far"]) == (2.0, 3.0)
    assert (nothing.likely_us["none"], nothing.median_us["none"]) == (1.0, 1.0)
    measured = learned_costs(traits, optimistic, {str(n): 8.0 + n for n in range(10)}, priors=priors)
    assert measured.likely_us["10"] == 8.0
    assert measured.likely_us["far"] == 2.0
    assert measured.likely_us["none"] == 8.0


def test_priors_of_calls_are_what_they_took_above_the_roofline(recorded: Recorded) -> None:
    times = [(recorded.space.calls[key], m.median_us) for key, m in recorded.measurements.items() if m.median_us]
    found = priors_of(times, recorded.ceilings)
    kernel = "torch_matmul"
    ratios = sorted(
        us / recorded.ceilings.optimistic_us(work_of(call)) for call, us in times if call.candidate.kernel == kernel
    )
    assert len(ratios) >= 9
    likely, median = found[kernel]
    assert sum(ratio >= likely - 0.001 for ratio in ratios) >= COVERAGE * len(ratios)
    assert 0.4 <= sum(ratio >= median for ratio in ratios) / len(ratios) <= 0.6
    assert f"{kernel} contraction" in found
    assert json.loads(written(found)) == {name: list(pair) for name, pair in found.items()}


def test_priors_that_come_with_the_package_are_those_of_its_recording() -> None:
    (recording,) = recordings()
    with unpacked(recording) as file, open_database(file, make=False) as database:
        assert FILE.read_text() == written(priors_of_database(database)), "run scripts/record_measurements"
    assert shipped_priors("cuda")["triton_attention"][0] > 1.5
    assert shipped_priors("cpu") == {}
