"""The least time within a budget, against exhaustive search; costs and bytes are integers, so totals are exact."""

from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import BudgetError, InfeasibleError, ProblemError
from autotuner.solve import budgeted
from autotuner.solve.lagrangian_dual import lagrangian_dual
from autotuner.solve.lagrangian_relaxation import LagrangianRelaxation
from autotuner.solve.limits import SolverLimits
from autotuner.solve.problem import Factor, Problem, Solution
from scripts.bench.brute_force import brute_force
from scripts.sides import least_bytes
from tests.solve.drawing import shuffled, totals, weighed_problems

BUDGETED = import_module("autotuner.solve.budgeted")
PREPARED = import_module("autotuner.solve.lagrangian_dual")
LABELLING = import_module("autotuner.solve.label_setting")
EXACT = import_module("autotuner.solve.conditioning")
SPLITTING = import_module("autotuner.solve.variable_splitting")

# Dropping a mask to 1 byte takes 3 us more, dropping an activation to nothing takes 5 us more.
SMALL = Problem(
    (
        Factor("mask", ("mask",), {("raw",): 0.0, ("seed",): 3.0}, {("raw",): 8, ("seed",): 1}),
        Factor("kept", ("kept",), {("raw",): 0.0, ("absent",): 5.0}, {("raw",): 16}),
    )
)


@pytest.mark.parametrize("budget, total_us, held", [(30, 0.0, 24), (24, 0.0, 24), (23, 3.0, 17), (16, 5.0, 8)])
def test_time_is_bought_with_as_many_bytes_as_there_are(budget: int, total_us: float, held: int) -> None:
    found = budgeted(SMALL, budget)
    assert found.total_us == found.lower_bound_us == total_us
    assert found.held_bytes == held


def test_where_nothing_fits_the_least_budget_is_said() -> None:
    with pytest.raises(BudgetError, match=r"fits in 0 bytes; .* needs is 1 bytes") as raised:
        budgeted(SMALL, 0)
    assert raised.value.least_bytes == 1
    assert budgeted(SMALL, 1).total_us == 8.0
    assert least_bytes(SMALL) == 1


def test_a_contradiction_is_no_matter_of_budgets() -> None:
    problem = Problem((Factor("writes", ("x",), {("a",): 1.0}), Factor("reads", ("x",), {("b",): 1.0})))
    with pytest.raises(InfeasibleError, match="contradict") as raised:
        budgeted(problem, 0)
    assert not isinstance(raised.value, BudgetError)


def test_a_problem_that_was_made_ready_is_solved_alike_and_once_at_each_price(monkeypatch: pytest.MonkeyPatch) -> None:
    prices: list[float] = []
    priced = PREPARED.priced

    def counted(problem: Problem, encoded: object, given: LagrangianRelaxation, limits: SolverLimits) -> object:
        prices.append(given.price)
        return priced(problem, encoded, given, limits)

    monkeypatch.setattr(PREPARED, "priced", counted)
    alone = [budgeted(SMALL, budget) for budget in (23, 16)]
    apart = len(prices)
    prices.clear()
    ready = lagrangian_dual(SMALL, SolverLimits())
    assert [budgeted(SMALL, budget, ready=ready) for budget in (23, 16)] == alone
    assert 0 < len(prices) < apart
    late = ready.within(SolverLimits(ends_at=0.0))
    assert late.at(ready.given, 0.0) is ready.fastest
    late.at(ready.given, 0.1)
    assert 0.1 not in ready.known  # it was cut short


@pytest.mark.parametrize("budget, epsilon, reason", [(-1, 0.0, "-1 bytes"), (1, -0.5, "epsilon is -0.5")])
def test_what_is_no_budget_is_refused(budget: int, epsilon: float, reason: str) -> None:
    with pytest.raises(ProblemError, match=reason):
        budgeted(SMALL, budget, epsilon=epsilon)


def needs(problem: Problem) -> list[int]:
    """Return what the assignments that no factor forbids need in all, in order."""
    names = sorted(problem.variables)
    return sorted({problem.held_bytes(dict(zip(names, row, strict=True))) for row in totals(problem)})


def budget_of(data: st.DataObject, problem: Problem) -> int:
    every = needs(problem) or [0]
    return max(0, data.draw(st.sampled_from(every)) + data.draw(st.sampled_from((-1, 0, 0, 1))))


def assert_solved_as_exhaustively(problem: Problem, budget: int) -> Solution | None:
    try:
        best = brute_force(problem, budget)
    except BudgetError as error:
        least = error.least_bytes
        with pytest.raises(BudgetError) as raised:
            budgeted(problem, budget)
        assert needs(problem)[0] == least > budget
        assert raised.value.least_bytes == least
        return None
    except InfeasibleError:
        with pytest.raises(InfeasibleError) as other:
            budgeted(problem, budget)
        assert not isinstance(other.value, BudgetError)
        return None
    found = budgeted(problem, budget)
    assert found.total_us == found.lower_bound_us == best.total_us == problem.cost_us(found.states)
    assert found.held_bytes == problem.held_bytes(found.states) <= budget
    return found


@pytest.mark.slow
@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems(), data=st.data())
def test_the_least_time_within_a_budget_is_that_of_exhaustive_search(problem: Problem, data: st.DataObject) -> None:
    assert_solved_as_exhaustively(problem, budget_of(data, problem))


@pytest.mark.slow
@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems(), data=st.data())
def test_the_same_holds_where_every_limit_is_reached(problem: Problem, data: st.DataObject) -> None:
    """Small problems meet no limit of their own: labels would settle each at once, and nothing would be split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PREPARED, "FEW_LABELS", 0.0)
        patch.setattr(BUDGETED, "FEW_LABELS", 0.0)
        patch.setattr(BUDGETED, "MOST_PAIRS", data.draw(st.sampled_from((-1, 5))))
        patch.setattr(BUDGETED, "MOST_PRICES", data.draw(st.sampled_from((1, 3))))
        patch.setattr(LABELLING, "MOST_LABELS", 1.0)
        patch.setattr(EXACT, "MOST_ROWS", 0.5)
        patch.setattr(SPLITTING, "FEWEST_ROWS", 0)
        assert_solved_as_exhaustively(problem, budget_of(data, problem))


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems(), data=st.data(), seed=st.integers(0, 99))
def test_the_order_in_which_a_problem_is_written_changes_nothing(
    problem: Problem, data: st.DataObject, seed: int
) -> None:
    budget = budget_of(data, problem)
    found = assert_solved_as_exhaustively(problem, budget)
    if found is not None:
        assert dict(budgeted(shuffled(problem, seed), budget).states) == dict(found.states)


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    problem=weighed_problems(), data=st.data(), epsilon=st.sampled_from((0.0, 0.1)), time=st.sampled_from((0.0, None))
)
def test_what_is_returned_early_fits_and_its_bound_is_true(
    problem: Problem, data: st.DataObject, epsilon: float, time: float | None
) -> None:
    budget = budget_of(data, problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PREPARED, "FEW_LABELS", 0.0)
        patch.setattr(BUDGETED, "FEW_LABELS", 0.0)
        try:
            best = brute_force(problem, budget)
        except InfeasibleError as error:
            with pytest.raises(type(error)):
                budgeted(problem, budget, time_limit_s=time, epsilon=epsilon)
            return
        found = budgeted(problem, budget, time_limit_s=time, epsilon=epsilon)
    assert found.lower_bound_us <= best.total_us <= found.total_us == problem.cost_us(found.states)
    assert problem.held_bytes(found.states) <= budget
    if time is None:
        assert found.total_us <= (1 + epsilon) * found.lower_bound_us + 1e-6
