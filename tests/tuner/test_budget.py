"""A budget of memory: the plan's peak, as it is simulated, stays within it."""

from functools import cache

import pytest
import yaml

from autotuner.errors import BudgetError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.models.model import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import make_plan, memory
from autotuner.space import Space, build_space
from autotuner.tuner import build_configuration
from tests.made_up import CPU, FEED_FORWARD, HERE
from tests.solve.problem.test_formulate import costs_of


@cache
def of() -> Model:
    definition = parse_definition(yaml.safe_load(FEED_FORWARD), "feed-forward")
    return ModelFile("feed-forward", definition).instantiate("small")


@cache
def space() -> Space:
    return build_space(training_graph(of().graph()), CPU, saving=True)


@cache
def known() -> dict[str, Measurement]:
    return {key: Measurement("ok", median_us=cost) for key, cost in costs_of(space(), 5).items()}


@cache
def plan(budget_bytes: int | None) -> Configuration:
    return build_configuration(of(), space(), known(), HERE, {}, budget_bytes=budget_bytes)


def peak_bytes(configuration: Configuration) -> int:
    return memory(make_plan(configuration)).peak_bytes


def test_a_budget_that_the_fastest_plan_keeps_changes_nothing() -> None:
    roomy = plan(1 << 30)
    assert roomy.certificate.predicted_us == plan(None).certificate.predicted_us
    assert roomy.certificate.proven_gap == 0
    assert roomy.memory is not None
    assert (roomy.memory.budget_bytes, roomy.memory.peak_bytes) == (1 << 30, peak_bytes(roomy))


@pytest.mark.parametrize("share", [0.98, 0.94])
def test_the_peak_stays_within_the_budget_and_costs_time(share: float) -> None:
    budget = int(share * peak_bytes(plan(None)))
    tight = plan(budget)
    assert peak_bytes(tight) <= budget
    certificate = tight.certificate
    assert certificate.solver == "budgeted"
    assert plan(None).certificate.predicted_us <= certificate.lower_bound_us <= certificate.predicted_us


@pytest.mark.slow
def test_a_budget_that_no_plan_keeps_is_refused_with_what_would_do() -> None:
    with pytest.raises(
        BudgetError, match=r"no plan fits into 1,000 bytes: the smallest that was found needs [\d,]+ "
    ) as e:
        plan(1000)
    least = e.value.least_bytes
    assert 1000 < least < peak_bytes(plan(None))
    assert peak_bytes(plan(least)) <= least
