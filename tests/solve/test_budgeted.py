"""The least time within a budget, against exhaustive search; costs and bytes are integers, so totals are exact."""

from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import BudgetError, InfeasibleError, ProblemError
from autotuner.solve import budgeted, budgeted_repeated, chained, exact, fronts, least_bytes, pareto
from autotuner.solve.brute_force import brute_force
from autotuner.solve.problem import Factor, Memory, Problem, Row, Solution
from tests.solve.drawing import shuffled, totals, weighed_problems

BUDGETED = import_module("autotuner.solve.budgeted")
PREPARED = import_module("autotuner.solve.prepared")
LABELLING = import_module("autotuner.solve.labelling")
EXACT = import_module("autotuner.solve.exact")
SPLITTING = import_module("autotuner.solve.splitting")

# Dropping a mask to 1 byte takes 3 us more, dropping an activation to nothing takes 5 us more and 4 bytes for a while.
SMALL = Problem(
    (
        Factor("mask", ("mask",), {("raw",): 0.0, ("seed",): 3.0}, {("raw",): 8, ("seed",): 1}),
        Factor("kept", ("kept",), {("raw",): 0.0, ("absent",): 5.0}, {("raw",): 16}, {("absent",): 4}),
    )
)


@pytest.mark.parametrize(
    "budget, total_us, held, transient", [(30, 0.0, 24, 0), (24, 0.0, 24, 0), (23, 3.0, 17, 0), (16, 5.0, 8, 4)]
)
def test_time_is_bought_with_as_many_bytes_as_there_are(
    budget: int, total_us: float, held: int, transient: int
) -> None:
    found = budgeted(SMALL, budget)
    assert found.total_us == found.lower_bound_us == total_us
    assert found.memory == Memory(held, transient)


def test_where_nothing_fits_the_least_budget_is_said() -> None:
    with pytest.raises(BudgetError, match=r"fits in 4 bytes; .* needs is 5 bytes, 1 of them held and 4 for") as raised:
        budgeted(SMALL, 4)
    assert raised.value.least_bytes == 5
    assert budgeted(SMALL, 5).total_us == 8.0
    assert least_bytes(SMALL).memory == Memory(1, 4)


def test_a_contradiction_is_no_matter_of_budgets() -> None:
    problem = Problem((Factor("writes", ("x",), {("a",): 1.0}), Factor("reads", ("x",), {("b",): 1.0})))
    with pytest.raises(InfeasibleError, match="contradict") as raised:
        budgeted(problem, 0)
    assert not isinstance(raised.value, BudgetError)


@pytest.mark.parametrize("budget, epsilon, reason", [(-1, 0.0, "-1 bytes"), (1, -0.5, "epsilon is -0.5")])
def test_what_is_no_budget_is_refused(budget: int, epsilon: float, reason: str) -> None:
    with pytest.raises(ProblemError, match=reason):
        budgeted(SMALL, budget, epsilon=epsilon)


def needs(problem: Problem) -> list[int]:
    """Return what the assignments that no factor forbids need in all, in order."""
    names = sorted(problem.variables)
    return sorted({problem.memory(dict(zip(names, row, strict=True))).total_bytes for row in totals(problem)})


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
    assert found.memory == problem.memory(found.states)
    assert found.memory.total_bytes <= budget
    return found


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems(), data=st.data())
def test_the_least_time_within_a_budget_is_that_of_exhaustive_search(problem: Problem, data: st.DataObject) -> None:
    assert_solved_as_exhaustively(problem, budget_of(data, problem))


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems(), data=st.data())
def test_the_same_holds_where_every_limit_is_reached(problem: Problem, data: st.DataObject) -> None:
    """Small problems meet no limit of their own: labels would settle each at once, and nothing would be split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PREPARED, "FEW_LABELS", 0.0)
        patch.setattr(BUDGETED, "FEW_LABELS", 0.0)
        patch.setattr(BUDGETED, "MOST_PAIRS", data.draw(st.sampled_from((-1, 5))))
        patch.setattr(BUDGETED, "FEW_PAIRS", -1)
        patch.setattr(BUDGETED, "MOST_PRICES", data.draw(st.sampled_from((1, 3))))
        patch.setattr(LABELLING, "MOST_LABELS", 1.0)
        patch.setattr(EXACT, "MOST_ROWS", 0.5)
        patch.setattr(SPLITTING, "FEWEST_ROWS", 0)
        assert_solved_as_exhaustively(problem, budget_of(data, problem))


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems(), data=st.data(), seed=st.integers(0, 99))
def test_the_order_in_which_a_problem_is_written_changes_nothing(
    problem: Problem, data: st.DataObject, seed: int
) -> None:
    budget = budget_of(data, problem)
    found = assert_solved_as_exhaustively(problem, budget)
    if found is not None:
        assert dict(budgeted(shuffled(problem, seed), budget).states) == dict(found.states)


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
    assert problem.memory(found.states).total_bytes <= budget
    if time is None:
        assert found.total_us <= (1 + epsilon) * found.lower_bound_us + 1e-6


def every_need(problem: Problem) -> dict[tuple[str, ...], tuple[float, Memory]]:
    """Return the total of each assignment that no factor forbids, and what it needs."""
    names = sorted(problem.variables)
    return {row: (us, problem.memory(dict(zip(names, row, strict=True)))) for row, us in totals(problem).items()}


def unbeaten(points: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the different points that no other is at least equal to in everything, in order."""
    different = sorted(set(points))
    return [
        point
        for point in different
        if not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in different)
    ]


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems())
def test_a_front_has_each_pair_of_time_and_bytes_that_nothing_beats(problem: Problem) -> None:
    every = every_need(problem)
    if not every:
        with pytest.raises(InfeasibleError):
            pareto(problem)
        return
    found = pareto(problem)
    assert [(s.total_us, s.memory.total_bytes) for s in found] == unbeaten(
        [(us, memory.total_bytes) for us, memory in every.values()]
    )
    for solution in found:
        assert problem.cost_us(solution.states) == solution.total_us == solution.lower_bound_us
        assert problem.memory(solution.states) == solution.memory


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(problem=weighed_problems())
def test_a_coarse_front_stands_for_every_assignment_with_a_share_more_bytes(problem: Problem) -> None:
    every = every_need(problem)
    found = pareto(problem, epsilon=0.5) if every else ()
    assert len(found) <= len(pareto(problem)) if every else True
    for us, memory in every.values():
        assert any(s.total_us <= us and s.memory.total_bytes <= 1.5 * memory.total_bytes for s in found)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(layer=weighed_problems(), data=st.data(), epsilon=st.sampled_from((0.0, 0.2)))
def test_fronts_of_a_layer_are_those_of_each_combination_of_ends(
    layer: Problem, data: st.DataObject, epsilon: float
) -> None:
    ends = data.draw(st.permutations(layer.variables))[: data.draw(st.integers(0, 2))]
    names = sorted(layer.variables)
    expected: dict[Row, list[tuple[float, ...]]] = {}
    for row, (us, memory) in every_need(layer).items():
        states = dict(zip(names, row, strict=True))
        point = (us, memory.held_bytes, memory.transient_bytes)
        expected.setdefault(tuple(states[name] for name in ends), []).append(point)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LABELLING, "FEW_LABELS", 0)
        found = fronts(layer, ends, epsilon=epsilon)
    assert list(found) == sorted(expected)
    for row, solutions in found.items():
        points = [(s.total_us, s.memory.held_bytes, s.memory.transient_bytes) for s in solutions]
        for solution, point in zip(solutions, points, strict=True):
            assert layer.memory(solution.states) == solution.memory
            assert point[0] == layer.cost_us(solution.states) >= solution.lower_bound_us
        if epsilon:
            slack = epsilon * min(us for each in expected.values() for us, *_ in each) + 1e-9
            for us, held, transient in expected[row]:
                assert any(p[0] <= us + slack and p[1] <= held and p[2] <= transient for p in points)
        else:
            assert points == unbeaten(expected[row])


def test_ends_that_a_layer_does_not_have_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"unknown: \['x'\]"):
        fronts(SMALL, ["mask", "x"])


# Two bytes are held by the fast way of the layer and none by the slow one, which needs 3 for a while.
LAYER = Problem(
    (
        Factor("way", ("way",), {("fast",): 1.0, ("slow",): 4.0}, {("fast",): 2}, {("slow",): 3}),
        Factor("ends", ("x", "y", "way"), {("a", "a", "fast"): 0.0, ("a", "a", "slow"): 0.0, ("a", "b", "slow"): 0.0}),
    )
)


def test_layers_differ_where_a_budget_makes_them() -> None:
    found = budgeted_repeated(LAYER, {"y": "x"}, 5, 9)
    assert found.total_us == found.lower_bound_us == 3 * 1.0 + 2 * 4.0
    assert found.memory == Memory(6, 3)
    with pytest.raises(BudgetError, match=r"of 5 layers fits in 2 bytes; .* is 3 bytes, 0 of them held") as raised:
        budgeted_repeated(LAYER, {"y": "x"}, 5, 2)
    assert raised.value.least_bytes == 3


@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(layer=weighed_problems(), data=st.data(), count=st.integers(1, 3), epsilon=st.sampled_from((0.0, 0.0, 0.1)))
def test_layers_in_a_row_within_a_budget_cost_what_they_cost_written_out(
    layer: Problem, data: st.DataObject, count: int, epsilon: float
) -> None:
    names = layer.variables
    size = data.draw(st.integers(0, min(2, len(names))))
    ends, starts = (tuple(data.draw(st.permutations(names)))[:size] for _ in range(2))
    joints = dict(zip(ends, starts, strict=True))
    whole = chained(layer, joints, count)
    try:
        least, most = least_bytes(whole).memory.total_bytes, exact(whole)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            budgeted_repeated(layer, joints, count, 0)
        return
    budget = data.draw(st.integers(max(0, least - 1), max(least, whole.memory(most.states).total_bytes)))
    if budget < least:
        with pytest.raises(BudgetError) as raised:
            budgeted_repeated(layer, joints, count, budget)
        assert raised.value.least_bytes == least
        return
    expected = budgeted(whole, budget)
    found = budgeted_repeated(layer, joints, count, budget, epsilon=epsilon)
    assert whole.cost_us(found.states) == found.total_us
    assert whole.memory(found.states) == found.memory
    assert found.memory.total_bytes <= budget
    assert found.lower_bound_us <= expected.total_us <= found.total_us <= (1 + epsilon) * found.lower_bound_us + 1e-6
