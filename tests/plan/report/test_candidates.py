"""Prices in the whole of an operator's candidates, against solving with each of them alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotuner.errors import InfeasibleError
from autotuner.ir.models import load_model
from autotuner.plan.report.candidates import WholeProblem, candidates_of, declared_us
from autotuner.solve import exact
from autotuner.solve.baselines import is_declared
from autotuner.solve.problem.formulate import formulate
from autotuner.solve.problem.offered import state_of
from autotuner.space import Space
from tests.made_up import feed_forward, made_up_configuration, space_of, times


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Space:
    return space_of(load_model(str(feed_forward(tmp_path_factory.mktemp("small")))).instantiate("small"))


@pytest.mark.parametrize("operator", ["product1", "y", "grad_weight2", "active"])
def test_a_price_is_what_the_best_plan_with_that_choice_takes_more(space: Space, operator: str) -> None:
    known = times(space.calls)
    costs = {key: found.median_us for key, found in known.items() if found.median_us is not None}
    whole = WholeProblem(space, known, 10.0).prices(operator)
    optimum = exact(formulate(space).priced(costs).problem).total_us
    checked = 0
    for state in {state_of(choice) for choice in space.choices if operator in choice.cover.operators}:
        only = tuple(c for c in space.choices if operator not in c.cover.operators or state_of(c) == state)
        price, is_exact = whole.of(state)
        try:
            extra_us = exact(formulate(replace(space, choices=only)).priced(costs).problem).total_us - optimum
        except InfeasibleError:
            assert price is None or not is_exact
            continue
        assert price is not None
        assert price == pytest.approx(extra_us, abs=1e-6) if is_exact else price <= extra_us + 1e-6
        checked += 1
    assert checked > 1


def test_the_chosen_candidate_costs_nothing_and_its_group_is_the_first(space: Space, tmp_path: Path) -> None:
    known = times(space.calls)
    model = load_model(str(feed_forward(tmp_path))).instantiate("small")
    configuration = made_up_configuration(model)
    problem = WholeProblem(space, known, 10.0)
    for step in configuration.steps:
        for name in step.operators:
            found = candidates_of(space, known, configuration, name, problem.prices(name))
            (chosen,) = [each for group in found.groups for each in group.candidates if each.chosen]
            assert (found.groups[0].chosen, chosen.us, chosen.extra_us) == (True, step.predicted_us, 0.0)


def test_the_best_plan_as_declared_has_no_other_form(space: Space) -> None:
    known = times(space.calls)
    found = declared_us(space, known, 10.0)
    declared = [choice for choice in space.choices if is_declared(space.graph, choice)]
    least = min(us for c in declared if (us := known[c.call.key].median_us) is not None)
    assert found is not None
    assert found >= least
    assert declared_us(space, {}, 10.0) is None
