"""Racing decided on samples that are fed in."""

import pytest

from autotuner.measure.race import Race, interval


def race_of(*looks_us: float, limit_us: float = 1e9) -> Race:
    """Return a race in which everyone was looked at, and whoever needs it again, always with the same result."""
    race = Race(len(looks_us), samples_min=3, samples_max=10, limit_us=limit_us)
    while (index := race.next()) is not None and race.is_look(index):
        race.add(index, looks_us[index])
    return race


def run(race: Race, *us: float) -> list[int]:
    """Feed each candidate its own constant time until the race is over, and return the turns taken."""
    turns = []
    while (index := race.next()) is not None:
        turns.append(index)
        race.add(index, us[index])
    return turns


@pytest.mark.parametrize(
    ("count", "ranks"), [(1, (1, 1)), (3, (1, 3)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (30, (10, 21))]
)
def test_the_interval_of_a_median_is_made_of_order_statistics(count: int, ranks: tuple[int, int]) -> None:
    assert interval([float(count - i) for i in range(count)]) == ranks


def test_everyone_is_looked_at_once_in_the_order_given() -> None:
    race = Race(3, samples_min=3, samples_max=10, limit_us=1e9)
    for index, look_us in enumerate((5.0, 3.0, 4.0)):
        assert race.next() == index
        race.add(index, look_us)
    assert [runner.looks_us for runner in race.runners] == [[5.0], [3.0], [4.0]]


def test_who_would_be_out_is_looked_at_again_after_somebody_else_was() -> None:
    race = Race(3, samples_min=3, samples_max=10, limit_us=1e9)
    race.add(0, 100.0)
    race.add(1, 900.0)
    assert not race.runners[1].out, "one look ends nobody"
    assert race.next() == 2
    race.add(2, 110.0)
    assert race.next() == 1
    race.add(1, 905.0)
    assert race.runners[1].out


def test_one_absurd_look_is_forgotten_once_others_do_not_show_it() -> None:
    race = Race(2, samples_min=3, samples_max=10, limit_us=1e9)
    race.add(0, 100.0)
    race.add(1, 30_000.0)
    assert race.next() == 1
    race.add(1, 95.0)
    assert run(race, 100.0, 95.0).count(1) == 3
    assert race.runners[1].time_us == 95.0


def test_looks_that_disagree_are_followed_by_more_and_the_least_is_kept() -> None:
    race = Race(2, samples_min=3, samples_max=10, limit_us=1e9)
    race.add(0, 100.0)
    for look_us in (30_000.0, 800.0):
        race.add(1, look_us)
        assert race.next() == 1
    race.add(1, 810.0)
    assert race.runners[1].out
    assert (race.runners[1].time_us, race.runners[1].kept_us) == (800.0, [30_000.0, 800.0, 810.0])


def test_four_looks_are_enough_however_much_they_differ() -> None:
    race = Race(2, samples_min=3, samples_max=10, limit_us=1e9)
    race.add(0, 1.0)
    for look_us in (80.0, 40.0, 20.0, 10.0):
        race.add(1, look_us)
    assert race.runners[1].out
    assert race.runners[1].time_us == 10.0


def test_one_bad_sample_ends_nobody() -> None:
    race = race_of(100.0, 101.0, 102.0)
    for index, sample_us in ((1, 101.0), (2, 5_000.0), (0, 100.0)):
        race.add(index, sample_us)
    assert not race.runners[2].out
    run(race, 100.0, 101.0, 102.0)
    assert race.runners[2].time_us == 102.0


def test_a_look_above_twice_the_incumbent_is_out_and_may_leave_one() -> None:
    race = race_of(100.0, 201.0, 199.0)
    assert [runner.out for runner in race.runners] == [False, True, False]
    assert [runner.out for runner in race_of(100.0, 300.0).runners] == [False, True]


def test_one_sample_above_one_and_a_half_and_two_above_one_point_two_are_out() -> None:
    race = race_of(100.0, 100.0, 160.0, 130.0)
    turns = run(race, 100.0, 101.0, 160.0, 130.0)
    assert turns.count(2) == 1
    assert turns.count(3) == 2, "looks agree with the samples"
    assert turns.count(0) == turns.count(1) == 3


def test_later_rules_leave_two_alive() -> None:
    race = race_of(100.0, 190.0)
    assert run(race, 100.0, 190.0) == [0, 1, 1, 0, 0, 1]


def test_a_lucky_sample_of_the_incumbent_ends_no_other_for_good() -> None:
    race = race_of(40.0, 100.0, 110.0)
    assert [runner.out for runner in race.runners] == [False, True, True]
    turns = run(race, 100.0, 101.0, 102.0)
    assert {turns.count(1), turns.count(2)} == {3}


def test_each_round_starts_one_candidate_further() -> None:
    race = race_of(100.0, 100.0, 100.0)
    assert run(race, 100.0, 100.0, 100.0) == [0, 1, 2, 1, 2, 0, 2, 0, 1]


def test_samples_that_scatter_end_at_the_cap_and_those_that_agree_at_three() -> None:
    scattered, agreeing = race_of(100.0), race_of(100.0)
    for place in range(10):
        assert scattered.next() == 0
        scattered.add(0, 100.0 + 10 * (place % 2))
    assert scattered.next() is None
    assert run(agreeing, 100.0) == [0, 0, 0]


def test_half_a_microsecond_settles_what_one_percent_would_not() -> None:
    race = race_of(2.0)
    for sample_us in (2.0, 2.2, 2.4):
        race.add(0, sample_us)
    assert race.next() is None


def test_the_time_limit_ends_rounds_but_no_look() -> None:
    race = race_of(100.0, 100.0, limit_us=250.0)
    taken = 0
    while (index := race.next()) is not None:
        race.add(index, 100.0 + taken, spent_us=100.0)
        taken += 1
    assert taken == 3


def test_what_failed_gets_no_turn_and_no_say() -> None:
    race = Race(2, samples_min=3, samples_max=10, limit_us=1e9)
    race.fail(0)
    assert race.next() == 1
    race.add(1, 50.0)
    assert run(race, 0.0, 50.0) == [1, 1, 1]


def test_going_back_forgets_samples_and_remembers_failures() -> None:
    race = race_of(100.0, 100.0)
    before = race.copy()
    race.add(0, 500.0)
    race.fail(1)
    again = race.back_to(before)
    assert again.runners[0].samples_us == []
    assert again.runners[1].failed
    assert before.runners[1].failed is False


def test_looks_count_only_where_there_are_fewer_than_three_samples() -> None:
    race = race_of(100.0, 300.0)
    race.add(0, 90.0)
    assert race.runners[0].kept_us == [100.0, 90.0]
    assert race.runners[1].kept_us == [300.0, 300.0]
    race.add(0, 91.0)
    race.add(0, 92.0)
    assert race.runners[0].kept_us == [90.0, 91.0, 92.0]


def test_a_round_is_everybody_who_is_left_in_it_and_a_look_is_a_turn_of_its_own() -> None:
    race = Race(3, samples_min=3, samples_max=10, limit_us=1e9)
    assert race.turns() == [0]
    for index in range(3):
        race.add(index, 100.0)
    assert race.turns() == [0, 1, 2]
    race.add(0, 100.0)
    assert race.turns() == [1, 2]
    for index in (1, 2):
        race.add(index, 100.0)
    assert race.turns() == [1, 2, 0], "the next round starts one place further"


def test_a_race_that_is_over_has_no_turns() -> None:
    assert Race(0, samples_min=3, samples_max=10, limit_us=1e9).turns() == []
