"""What the best other way for an operator costs in all, and what could still be better within its interval."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotuner.ir.models import Model
from autotuner.ir.records import Measurement
from autotuner.solve import min_marginals
from autotuner.solve.problem import Solution
from autotuner.solve.problem.formulate import Formulation, formulate
from autotuner.tuner.explanation import Explanation, explained
from autotuner.tuner.solving import solved
from tests.made_up import space_of, times

Solved = tuple[Formulation, Solution, Mapping[str, Measurement]]


@pytest.fixture(scope="module")
def plain(small: Model) -> Solved:
    """A small model, solved at made-up times whose intervals have no width."""
    space = space_of(small)
    known = times(space.calls)
    return *solved(formulate(space), known, "exact"), known


def widened(given: Solved, key: str, low_us: float = 0.0, high_us: float = 0.0, **asked: int) -> Explanation:
    """Return the explanation where one call may take so much less, and so much more."""
    formulation, solution, known = given
    median_us = known[key].median_us or pytest.fail("it has a time")
    measured = replace(known[key], low_us=median_us - low_us, high_us=median_us + high_us)
    return explained(formulation, solution, {**known, key: measured}, **asked)


def test_the_best_other_way_takes_what_the_marginals_say(plain: Solved) -> None:
    formulation, solution, known = plain
    found = explained(formulation, solution, known)
    marginals = min_marginals(formulation.problem)
    for operator in formulation.offered.graph.operators:
        name = f"operator {operator.name}"
        least = min(us for state, us in marginals[name].items() if state != solution.states[name])
        alternative = found.by_operator[operator.name]
        assert operator.name in alternative.operators
        assert alternative.extra_us == pytest.approx(least - solution.total_us)
    assert found.by_operator.keys() == {operator.name for operator in formulation.offered.graph.operators}


def test_where_no_interval_has_a_width_nothing_could_overtake(plain: Solved) -> None:
    found = explained(*plain)
    for alternative in found.by_operator.values():
        assert alternative.extra_low_us == pytest.approx(alternative.extra_us)
    assert found.overtaking == ()
    assert found.overtaking_count == 0


def test_a_chosen_call_that_may_take_longer_is_overtaken_by_all_plans_without_it(plain: Solved) -> None:
    formulation, solution, _ = plain
    choice = formulation.chosen(solution)[0]
    uses = formulation.calls(solution).count(choice.call.key)
    found = widened(plain, choice.call.key, high_us=1000.0)
    alternative = found.by_operator[choice.cover.operators[0]]
    steps_less = (alternative.extra_us - alternative.extra_low_us) / 1000.0
    assert round(steps_less) in range(1, uses + 1)
    assert steps_less == pytest.approx(round(steps_less))
    assert alternative in found.overtaking
    lows = [each.extra_low_us for each in found.overtaking]
    assert lows == sorted(lows)
    assert lows[-1] < 0


def test_a_call_that_may_take_less_could_overtake_where_it_is_not_chosen_yet(plain: Solved) -> None:
    formulation, solution, known = plain
    chosen = set(formulation.calls(solution))
    alternatives = explained(formulation, solution, known).by_operator.values()
    of = {
        (choice.cover.operators, tuple(choice.by_tensor.items())): choice.call.key
        for choice in formulation.choices.values()
    }
    checked = 0
    for alternative in alternatives:
        key = of[alternative.operators, (*alternative.inputs, *alternative.outputs)]
        if key in chosen:
            continue
        wide = widened(plain, key, low_us=known[key].median_us or 0.0).by_operator
        again = next(a for a in wide.values() if (a.operators, a.inputs) == (alternative.operators, alternative.inputs))
        assert again.extra_us == alternative.extra_us
        assert again.extra_low_us <= alternative.extra_us - (known[key].median_us or 0.0) + 1e-9
        checked += 1
    assert checked


def test_of_many_that_could_overtake_the_likeliest_are_listed_and_all_are_counted(plain: Solved) -> None:
    formulation, solution, _ = plain
    key = formulation.chosen(solution)[0].call.key
    whole = widened(plain, key, high_us=1000.0)
    assert whole.overtaking_count == len(whole.overtaking) > 1
    cut = widened(plain, key, high_us=1000.0, overtaking_max=1)
    assert cut.overtaking == whole.overtaking[:1]
    assert cut.overtaking_count == whole.overtaking_count


def test_what_the_time_did_not_suffice_for_is_left_out(plain: Solved) -> None:
    found = explained(*plain, time_limit_s=0)
    assert (dict(found.by_operator), found.overtaking) == ({}, ())
