"""Twins: what other shapes and environments say of calls, and a tuning that ends by it."""

import random
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from autotuner.database import Database, open_database
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Candidate, Environment, Measurement, Node, Subgraph, TensorType
from autotuner.measure.roofline import Work
from autotuner.space import Cell, Space, build_space
from autotuner.tuner.bounds import WIDE, CheapestPlan, RivalsWanted, bounds
from autotuner.tuner.cell_search import CellSearch
from autotuner.tuner.learned import ALIKE, Costs, Traits, learned_costs
from autotuner.tuner.policy import TuningPolicy
from autotuner.tuner.races import openers
from autotuner.tuner.twins import STARTS, TRIALS, RecordedCall, Twins, distance, known_twins
from scripts.bench.plain_problem import PlainProblem
from tests.made_up import CPU, HERE
from tests.tuner import asking as tuning
from tests.tuner.asking import Asking
from tests.tuner.test_relaxation import CHOICE, A, B, C, learned


def product(rows: int, candidate: Candidate | None = None) -> Call:
    """Return a product of (rows, 8) by (8, 16)."""
    node = Node("matmul", "ab,bc->ac", (0, 1), (2,))
    tensors = tuple(TensorType(extents, "float32") for extents in ((rows, 8), (8, 16), (rows, 16)))
    return Call(Subgraph((node,), tensors, (0, 1), (2,)), candidate or Candidate("torch_matmul", ("ab", "ab", "ab")))


def test_a_twin_says_what_a_call_takes_at_its_rate_and_the_nearest_one_counts() -> None:
    twins = Twins([RecordedCall(product(1000), 100.0), RecordedCall(product(4000), 300.0)])
    other = product(1250, Candidate("torch_matmul", ("ba",) * 3))
    calls = {"near": product(1250), "large": product(3900), "other": other}
    expected = twins.expected_us(calls)
    assert expected.keys() == {"near", "large"}
    assert expected["near"] == pytest.approx(125.0, rel=0.01)
    assert expected["large"] == pytest.approx(300.0 * 3900 / 4000, rel=0.01)


def test_extents_that_differ_are_a_distance_and_equal_ones_none() -> None:
    assert distance(product(10).subgraph, product(10).subgraph) == 0.0
    assert distance(product(10).subgraph, product(20).subgraph) == pytest.approx(2 * log(2) / 3)


def test_of_a_database_those_of_this_device_count_and_no_measurement_of_the_space_itself(
    small: Model, database: Database
) -> None:
    space = build_space(training_graph(small.graph()), CPU)
    call = next(each for each in space.calls.values() if "matmul" in each.candidate.kernel)
    stranger = replace(HERE, device_name="another device")
    older = replace(HERE, facts=(*HERE.facts, ("driver", "older")))
    for environment, us in ((older, 3.0), (HERE, 1.0), (stranger, 2.0)):  # the later one would count
        database.remember(environment)
        database.store(environment.key, [(call, Measurement("ok", us, us, us))])
    assert known_twins(space, database, HERE).expected_us(space.calls)[call.key] == 3.0


def test_a_search_begins_with_the_fastest_of_a_twin_and_has_fewer_trials() -> None:
    lists = (("tile", (8, 16, 32, 64)), ("stages", (1, 2, 3, 4)))

    class Anything(Cell):
        def admits(self, params: object) -> bool:  # noqa: ARG002
            return True

    cell = Anything(product(1000), lists, 16)
    params = [(("tile", tile), ("stages", stages)) for tile in (8, 16, 32, 64) for stages in (1, 2, 3, 4)]
    took = {each: float(number) for number, each in enumerate(random.Random(0).sample(params, len(params)))}
    far = [RecordedCall(product(2000, cell.call.candidate.with_params(each)), 100.0 - us) for each, us in took.items()]
    near = [RecordedCall(product(1100, cell.call.candidate.with_params(each)), us) for each, us in took.items()]
    starts = Twins(far + near + near).starts(cell)  # of two environments, as near: no start comes twice
    assert starts == tuple(sorted(params, key=lambda each: took[each])[:STARTS])
    search = CellSearch(cell, starts=starts)
    assert [call.candidate.params for call in search.propose(STARTS)] == list(starts)
    assert search.left == TRIALS - STARTS
    assert CellSearch(cell).left == 16


def test_calls_with_twins_are_expected_to_take_what_these_say_by_those_that_are_measured() -> None:
    traits = {str(number): Traits("one", Work(100.0, {})) for number in range(11)}
    optimistic, said = dict.fromkeys(traits, 1.0), dict.fromkeys(traits, 10.0)
    few = learned_costs(traits, optimistic, {"0": 12.0}, said)
    assert (few.likely_us["10"], few.median_us["10"]) == (10.0 * ALIKE, 10.0)
    took = {str(number): 8.0 + number for number in range(9)}  # 0.8 to 1.6 of what was said
    found = learned_costs(traits, optimistic, took, said)
    assert [found.likely_us["10"], found.median_us["10"]] == pytest.approx([8.0, 12.0])


def test_rivals_are_calls_of_plans_that_are_expected_to_be_better_and_nothing_is_to_be_proven() -> None:
    solve = PlainProblem(CHOICE).solve
    far = bounds(solve, {A: 10.0}, {B: 1.0, C: 1.0}, learned({B: 5.0, C: 9.8}), rivals=RivalsWanted(0.005))
    assert far.wanted == (B,)
    near = bounds(
        solve, {A: 10.0}, {B: 1.0, C: 1.0}, learned({B: 9.9 / (1 + WIDE / 2), C: 9.8}), rivals=RivalsWanted(0.005)
    )
    assert set(near.wanted) == {B, C}
    none = bounds(solve, {A: 10.0}, {B: 1.0, C: 1.0}, learned({B: 9.98, C: 12.0}), rivals=RivalsWanted(0.005))
    assert none.wanted == ()


class Solving(PlainProblem):
    """A plain problem that keeps the costs at which it was solved."""

    def __init__(self) -> None:
        super().__init__(CHOICE)
        self.costs: list[Costs] = []

    def solve(self, costs_us: Costs) -> CheapestPlan:
        self.costs.append(costs_us)
        return super().solve(costs_us)


def test_where_rivals_are_wanted_the_bound_is_proven_first_and_where_no_better_plan_is_expected() -> None:
    one, left = {A: 10.0}, {B: 1.0, C: 1.0}
    first = bounds(Solving().solve, one, left, learned({B: 9.0, C: 9.0}), rivals=RivalsWanted(0.005))
    assert (first.is_proven, first.bound_us, first.estimated_us) == (True, 1.0, 9.0)
    problem = Solving()
    later = bounds(problem.solve, one, left, learned({B: 9.0, C: 9.0}), rivals=RivalsWanted(0.005, 1.0))
    assert (later.is_proven, later.proven_gap, later.bound_us, later.wanted) == (False, None, 1.0, first.wanted)
    assert len(problem.costs) == 2  # the plan that is expected to be best, and the best one
    problem = Solving()
    over = bounds(problem.solve, {A: 10.0, B: 8.0}, {C: 1.0}, learned({C: 9.0}), rivals=RivalsWanted(0.005, 0.5))
    assert (over.is_proven, over.best_us, over.bound_us, over.estimated_us, over.wanted) == (True, 8.0, 1.0, 8.0, ())
    assert len(problem.costs) == 2  # the plan that is expected to be best is measured throughout
    last = bounds(Solving().solve, one, left, learned({B: 9.8, C: 9.9}), rivals=RivalsWanted(0.005, 1.0, is_last=True))
    assert last.wanted == ()


OLDER = Environment(HERE.device_type, HERE.device_name, (*HERE.facts, ("driver", "older")), HERE.policy)
POLICY = TuningPolicy(few_calls=0)


def made_up(space: Space, seed: int = 1) -> dict[str, Measurement]:
    drawn = random.Random(seed)
    return {key: Measurement("ok", us, us, us) for key in space.calls for us in (drawn.uniform(20.0, 120.0),)}


def disturbed(times: dict[str, Measurement], by: float, seed: int = 2) -> dict[str, Measurement]:
    drawn = random.Random(seed)
    return {
        key: replace(each, median_us=(each.median_us or 0.0) * drawn.lognormvariate(0.0, by), low_us=None, high_us=None)
        for key, each in times.items()
    }


def remember(database: Database, space: Space, times: dict[str, Measurement], environment: Environment = OLDER) -> None:
    database.remember(environment)
    database.store(environment.key, [(space.calls[key], each) for key, each in times.items()])


@pytest.mark.parametrize("by", [0.0, 0.05])
def test_a_model_that_was_tuned_under_an_older_driver_is_checked_against_few_rivals(
    tmp_path: Path, small: Model, by: float
) -> None:
    """Every call of the older environment takes about as long in this one: few are measured, and the plan is good."""
    space = build_space(training_graph(small.graph()), CPU)
    took = made_up(space)
    with open_database(tmp_path / "before.sqlite") as database:
        remember(database, space, disturbed(took, by))
        asked = Asking(took)
        found = tuning.tune(small, CPU, database, asked, policy=POLICY)
        again = Asking(took)
        assert tuning.tune(small, CPU, database, again, policy=POLICY).certificate == found.certificate
        assert again.asked == []  # it counts as complete
        assert (found.certificate.proven_gap or 0.0) > 0
        proven = tuning.tune(small, CPU, database, Asking(took), policy=POLICY, gap=0.0)
        assert proven.certificate.proven_gap == 0
        best_so_far = tuning.tune(small, CPU, database, Asking({}), policy=POLICY)
        assert best_so_far.certificate.predicted_us == proven.certificate.predicted_us
    with open_database(tmp_path / "whole.sqlite") as database:
        best = tuning.tune(small, CPU, database, Asking(took), policy=POLICY, exhaustive=True)
    assert proven.certificate.predicted_us == best.certificate.predicted_us
    assert len(set(asked.asked)) < len(took) / 2
    assert found.counts["unproven"] == found.counts["unneeded"] == found.counts["unknown"] > 0
    assert found.certificate.predicted_us <= 1.03 * best.certificate.predicted_us


def test_measuring_anew_measures_everything_whatever_twins_say(small: Model, database: Database) -> None:
    space = build_space(training_graph(small.graph()), CPU)
    took = made_up(space)
    remember(database, space, took)
    tuning.tune(small, CPU, database, Asking(took), policy=POLICY, exhaustive=True)
    slower = {key: replace(each, median_us=2.0 * (each.median_us or 0.0)) for key, each in took.items()}
    anew = Asking(slower)
    found = tuning.tune(small, CPU, database, anew, policy=POLICY, remeasure=True)
    assert set(anew.asked) == set(took)
    assert found.counts["stale"] == 0


def test_rivals_that_were_not_measured_leave_an_answer_incomplete(small: Model, database: Database) -> None:
    """A fleet may lose calls: without them nobody knows that nothing is better."""
    space = build_space(training_graph(small.graph()), CPU)
    took = made_up(space)
    remember(database, space, took)
    alone = {race[0].key for race in openers(space, set(took))}
    fast = sorted(took.keys() - alone, key=lambda key: took[key].median_us or 0.0)[:10]
    lost = Asking({key: each for key, each in took.items() if key not in fast})
    found = tuning.tune(small, CPU, database, lost, policy=POLICY)
    assert found.counts["unneeded"] == 0
    assert set(fast) & set(lost.asked)


def test_drifted_calls_are_timed_again_where_twins_end_a_tuning(small: Model, database: Database) -> None:
    space = build_space(training_graph(small.graph()), CPU)
    took = made_up(space)
    remember(database, space, took)
    drifting = Asking({key: replace(each, marks=("drifted",)) for key, each in took.items()})
    found = tuning.tune(small, CPU, database, drifting, policy=POLICY)
    assert found.counts["unproven"] > 0
    assert set(drifting.confirmed) == set(drifting.asked)


def test_what_twins_have_ended_says_enough_of_the_next_shapes(small: Model, database: Database) -> None:
    """Each of a chain of environments has measured a part; the first one all."""
    space = build_space(training_graph(small.graph()), CPU)
    took = made_up(space)
    remember(database, space, took)
    for number in range(4):
        environment = replace(HERE, facts=(*HERE.facts, ("driver", f"{number}")))
        asked = Asking(disturbed(took, 0.02, number), environment)
        found = tuning.tune(small, CPU, database, asked, policy=POLICY)
        assert found.counts["unproven"] > 0, number
        assert len(set(asked.asked)) < len(took) / 2
