"""Sampled cells: proposals, results that races give the sampler, and its use in a tuning run."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from autotuner.checkpoint import checkpoint
from autotuner.database import Database, Filter, open_database
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, load_model
from autotuner.ir.records import Call, Candidate, Measurement, Node, Scalar, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.measure import Measurer
from autotuner.measure.child import load_modules
from autotuner.measure.roofline import NO_ROOFLINE
from autotuner.plan.configuration import Configuration
from autotuner.settings import Limits, TuneOptions
from autotuner.space import Cell, KernelEntry, Space, SpaceFile, build_space
from autotuner.tuner import Progress, Replay, TuningPolicy, cell_counts, with_known_calls
from autotuner.tuner.cell_search import STARTUP_TRIALS, CellSearch
from autotuner.tuner.ledger import Ledger
from autotuner.tuner.progress import MeasurerProtocol, Result
from autotuner.tuner.relaxation import Relaxation
from autotuner.tuner.runner import RaceRunner
from autotuner.tuner.searching import BATCH, CellSearches, begun, known_by_cell
from autotuner.tuner.state import TuningState
from tests.made_up import CPU, HERE, LINEAR, times
from tests.tuner.asking import tune
from tests.tuner.beside import CompilingBeside

PLANTED = str(Path(__file__).with_name("planted_cells.py"))
TRIALS = 40
Lists = Mapping[str, Sequence[Scalar]]


@pytest.fixture(scope="module", autouse=True)
def planted() -> Iterator[Any]:
    """The planted kernel's module; it is registered for this test module and gone after it."""
    load_modules([PLANTED])
    yield sys.modules["planted_cells"]
    del KERNELS._kernels["planted_tiled"]
    del sys.modules["planted_cells"]


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "linear.yaml"
    path.write_text(LINEAR)
    return load_model(str(path)).instantiate(extents={"b": 8, "h": 3, "f": 16})


@pytest.fixture
def file(planted: Any) -> SpaceFile:
    plain = KernelEntry(layouts="declared")
    tiled = KernelEntry(layouts="declared", params=planted.LISTS)
    kernels = {"torch_matmul": plain, "torch_bias_grad": plain, "planted_tiled": tiled}
    return SpaceFile(version=1, device_type="cpu", kernels=kernels, conversions=[])


@pytest.fixture
def space(linear: Model, file: SpaceFile) -> Space:
    return build_space(training_graph(linear.graph()), file)


def cell_of(planted: Any, lists: Lists | None = None, rows: int = 8, trials: int = TRIALS) -> Cell:
    """Return a cell of the planted kernel, on a bias of some rows."""
    matrix, vector = TensorType((rows, 16), "float32"), TensorType((16,), "float32")
    bias = Subgraph((Node("bias", "ab,b->ab", (0, 1), (2,)),), (matrix, vector, matrix), (0, 1), (2,))
    listed = tuple((name, tuple(values)) for name, values in (lists or planted.LISTS).items())
    return Cell(Call(bias, Candidate("planted_tiled", ("ab", "a", "ab"))), listed, trials)


def timed(call: Call, us: float, samples: int = 0) -> Result:
    return call, Measurement("ok", us, us, us, (us,) * samples)


def searched(search: CellSearch, cost_us: Any) -> list[float]:
    """Search to the end and return what each proposal took, in order."""
    seen: list[float] = []
    while calls := search.propose(BATCH):
        seen += [cost_us(call) for call in calls]
        search.tell([timed(call, cost_us(call)) for call in calls])
    return seen


class Racing(Replay):
    """Answers races from made-up costs as a measurer does: what is far behind has one sample, the others three."""

    def __init__(self, planted: Any, failing: Mapping[str, Measurement] | None = None) -> None:
        super().__init__(HERE, {})
        self.cost_us = planted.cost_us
        self.failing = failing or {}
        self.races: list[list[Call]] = []
        self.stop_after: int | None = None

    @property
    def asked(self) -> list[Call]:
        """Calls of the searched kernel, each as often as it raced."""
        return [call for race in self.races for call in race if call.candidate.kernel == "planted_tiled"]

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        for race in races:
            self.races.append(list(race))
            costs = {call.key: self._cost_us(call) for call in race}
            for call in race:
                if self.stop_after is not None and len(self.asked) > self.stop_after:
                    raise KeyboardInterrupt
                dropped = costs[call.key] > 1.5 * min(costs.values())
                result = timed(call, costs[call.key], 1 if dropped else 3)
                yield (call, self.failing[str(call.candidate)]) if str(call.candidate) in self.failing else result

    def _cost_us(self, call: Call) -> float:
        if call.candidate.kernel.startswith("planted"):
            return float(self.cost_us(call))
        return times([call.key])[call.key].median_us or 0.0


def state_of(space: Space, limits: Limits | None = None) -> TuningState:
    return TuningState(space, lambda _: None, TuneOptions(limits=limits or Limits()))


def search_cells(space: Space, database: Database, measurer: MeasurerProtocol, state: TuningState) -> Ledger:
    """Search all cells of a space, as a run does that measures everything, and return its ledger."""
    known = known_by_cell(space, database, measurer.environment.key)
    state.space = begun(space, known, state)
    ledger = Ledger(state.space, database, measurer.environment.key, state)
    with RaceRunner(ledger, measurer) as runner:
        CellSearches(runner, measurer, known).search_all()
    return ledger


def tried_of(space: Space) -> set[str]:
    return {key for key, call in space.calls.items() if call.candidate.kernel == "planted_tiled"}


@pytest.mark.slow
def test_forty_trials_of_928_find_what_random_draws_need_more_for(planted: Any) -> None:
    reached = []
    for rows in range(2, 11):
        cell = cell_of(planted, rows=rows)  # another number of rows is another cell, with another seed
        assert len(cell.combinations) == 928
        seen = searched(CellSearch(cell), planted.cost_us)
        assert len(seen) == TRIALS
        reached.append(min(seen))
    within_us = median(reached)
    assert within_us <= 1.1 * planted.BEST_US
    as_good = sum(planted.cost_us(cell.called(params)) <= within_us for params in cell.combinations)
    expected_draws = (len(cell.combinations) + 1) / (as_good + 1)  # until the first of them, without replacement
    assert expected_draws > 2 * TRIALS


def test_a_search_proposes_nothing_twice_and_nothing_that_is_refused(planted: Any) -> None:
    lists: Lists = {"block": [256, 512, 1024, 2048], "warps": [1, 2, 4, 8], "stages": [1, 2, 3], "order": ["snake"]}
    cell = cell_of(planted, lists, trials=100)
    search = CellSearch(cell)
    searched(search, planted.cost_us)
    proposed = [call.candidate for call in search.tried.values()]
    assert len(proposed) == len(set(proposed)) == len(cell.combinations) == 39
    assert all(planted.too_many_registers(cell.call.subgraph, candidate) is None for candidate in proposed)
    assert search.propose(BATCH) == []


def test_a_search_starts_with_the_first_the_last_and_the_middle_of_each_list(planted: Any) -> None:
    first = CellSearch(cell_of(planted, dict(planted.LISTS) | {"block": [16, 32, 64, 128, 256]})).propose(3)
    assert [tuple(dict(call.candidate.params).values()) for call in first] == [
        (16, 1, 1, "rows"), (256, 8, 4, "hilbert"), (64, 4, 3, "quarters"),
    ]  # fmt: skip


def test_a_search_begins_where_the_known_ones_ended(planted: Any) -> None:
    cell = cell_of(planted)
    known = [timed(cell.called(params), 150.0 + row) for row, params in enumerate(cell.combinations[:25])]
    search = CellSearch(cell, known)
    assert (search.left, search.best) == (15, known[0])
    searched(search, planted.cost_us)
    fresh = list(search.tried.values())[25:]
    assert len(fresh) == 15
    assert not {call.key for call in fresh} & {call.key for call, _ in known}
    assert CellSearch(cell, known + [timed(call, 200.0) for call in fresh]).propose(BATCH) == []


def test_every_other_proposal_is_a_step_from_the_fastest_so_far(planted: Any) -> None:
    search = CellSearch(cell_of(planted))
    beside = []
    while calls := search.propose(1):
        if search.best is not None and len(search.tried) > STARTUP_TRIALS:
            pairs = zip(calls[0].candidate.params, search.best[0].candidate.params, strict=True)
            moved = [(name, one, other) for (name, one), (_, other) in pairs if one != other]
            lists = planted.LISTS
            steps = [abs(lists[n].index(x) - lists[n].index(y)) if n != "order" else 1 for n, x, y in moved]
            beside.append(sum(steps) == 1)
        search.tell([timed(call, planted.cost_us(call), 3) for call in calls])
    assert all(beside[::2])
    assert not all(beside[1::2])


def test_equal_searches_propose_the_same(planted: Any) -> None:
    one, other = CellSearch(cell_of(planted)), CellSearch(cell_of(planted))
    searched(one, planted.cost_us)
    searched(other, planted.cost_us)
    assert list(one.tried) == list(other.tried)


def test_what_a_race_drops_is_told_as_pruned_and_what_fails_as_failed(planted: Any) -> None:
    search = CellSearch(cell_of(planted))
    fast, slow, behind, wrong = search.propose(4)
    results = [timed(fast, 100.0, 5), timed(slow, 190.0, 3), timed(behind, 300.0, 1)]
    search.tell([*results, (wrong, Measurement("wrong", message="planted"))])
    told = {trial.number: (trial.state.name, trial.value, trial.intermediate_values) for trial in search.study.trials}
    assert [told[number] for number in sorted(told)][:3] == [
        ("COMPLETE", 100.0, {}), ("COMPLETE", 190.0, {}), ("PRUNED", 300.0, {1: 300.0}),
    ]  # fmt: skip
    assert [state for state, *_ in told.values()][3:] == ["FAIL"]
    assert search.best == results[0]


def test_what_the_database_knows_is_told_alike(planted: Any) -> None:
    cell = cell_of(planted)
    calls = [cell.called(params) for params in cell.combinations[:3]]
    known = [timed(calls[0], 100.0, 5), timed(calls[1], 300.0, 2), (calls[2], Measurement("error", message="planted"))]
    trials = CellSearch(cell, known).study.trials
    assert [(trial.state.name, trial.intermediate_values) for trial in trials] == [
        ("COMPLETE", {}), ("PRUNED", {2: 300.0}), ("FAIL", {}),
    ]  # fmt: skip


def test_the_fastest_of_the_latest_race_is_the_incumbent(planted: Any) -> None:
    search = CellSearch(cell_of(planted))
    lucky, other = search.propose(2)
    search.tell([timed(lucky, 90.0), timed(other, 100.0)])
    (third,) = search.propose(1)
    search.tell([timed(lucky, 120.0), timed(third, 110.0)])
    assert search.best == timed(third, 110.0)
    (fourth,) = search.propose(1)
    search.tell([(third, Measurement("crashed", message="planted")), timed(fourth, 130.0)])
    assert search.best == timed(third, 110.0)


def test_numbers_in_order_are_ordered_and_all_else_is_not(planted: Any) -> None:
    lists: Lists = {"block": [16, 64, 2048], "warps": [8, 4, 2], "stages": [1, 4, 2], "order": ["rows", "tiles"]}
    search = CellSearch(cell_of(planted, lists))
    (call,) = search.propose(1)
    (trial,) = search.study.trials
    assert {name: type(one).__name__ for name, one in trial.distributions.items()} == {
        "block": "IntDistribution", "warps": "IntDistribution", "stages": "CategoricalDistribution",
        "order": "CategoricalDistribution",
    }  # fmt: skip
    assert dict(call.candidate.params) == {"block": 16, "warps": 8, "stages": 1, "order": "rows"}


def test_the_space_holds_what_was_tried_and_the_rest_stays_unknown(
    planted: Any, space: Space, database: Database
) -> None:
    database.remember(HERE)
    racing = Racing(planted)
    state = state_of(space)
    found = search_cells(space, database, racing, state)
    assert len(tried_of(found.space)) == len(found.fresh) == state.measured == TRIALS
    assert found.fresh == set(database.find(HERE.key, tuple(found.space.calls)))
    assert state.space is found.space
    assert cell_counts(found.space, found.fresh) == {
        "cells_enumerated": 4, "cells_sampled": 1, "sampled_combinations": 928, "sampled_tried": TRIALS,
    }  # fmt: skip
    assert all(cell.admits(call.candidate.params) for cell in space.cells for call in racing.asked)


def test_proposals_race_against_the_best_so_far(planted: Any, space: Space, database: Database) -> None:
    database.remember(HERE)
    racing = Racing(planted)
    search_cells(space, database, racing, state_of(space))
    assert [len(race) for race in racing.races] == [BATCH] + [1 + BATCH] * (TRIALS // BATCH - 1)
    best = racing.races[0][0]
    for earlier, later in zip(racing.races, racing.races[1:], strict=False):
        best = min([best, *earlier], key=lambda call: (planted.cost_us(call), call.candidate.params))
        assert later[0] == best
    asked = Counter(call.key for call in racing.asked)
    assert sum(asked.values()) - len(asked) == TRIALS // BATCH - 1


def test_a_second_search_measures_nothing_and_finds_the_same_space(
    planted: Any, space: Space, database: Database
) -> None:
    database.remember(HERE)
    first = search_cells(space, database, Racing(planted), state_of(space))
    silent, state = Racing(planted), state_of(space)
    again = search_cells(space, database, silent, state)
    assert (silent.races, again.fresh, state.reused) == ([], set(), TRIALS)
    assert tried_of(again.space) == tried_of(first.space)
    assert tried_of(with_known_calls(space, database, HERE.key)) == tried_of(first.space)


def test_what_another_environment_knows_does_not_count(planted: Any, space: Space, database: Database) -> None:
    database.remember(HERE)
    search_cells(space, database, Racing(planted), state_of(space))
    elsewhere = Racing(planted)
    elsewhere.environment = replace(HERE, facts=(("threads", 2),))
    database.remember(elsewhere.environment)
    assert len(search_cells(space, database, elsewhere, state_of(space)).fresh) == TRIALS


def test_values_that_are_listed_no_more_are_not_in_the_space(
    planted: Any, linear: Model, file: SpaceFile, space: Space, database: Database
) -> None:
    database.remember(HERE)
    search_cells(space, database, Racing(planted), state_of(space))
    file.kernels["planted_tiled"].params = dict(planted.LISTS) | {"stages": [1, 2, 4]}
    fewer = with_known_calls(build_space(training_graph(linear.graph()), file), database, HERE.key)
    stages = {dict(call.candidate.params).get("stages") for call in fewer.calls.values()} - {None}
    assert stages == {1, 2, 4}


def test_an_interrupted_search_keeps_its_results_and_goes_on(planted: Any, space: Space, database: Database) -> None:
    database.remember(HERE)
    broken = Racing(planted)
    broken.stop_after = 11
    with pytest.raises(KeyboardInterrupt):
        search_cells(space, database, broken, state_of(space))
    kept = {row.call.key for row in database.measurements(Filter(HERE.key))}
    assert len(kept) == 2 * BATCH
    rest = search_cells(space, database, Racing(planted), state_of(space))
    assert len(rest.fresh) == TRIALS - len(kept)
    assert not rest.fresh & kept
    assert len(tried_of(rest.space)) == TRIALS


def test_what_fails_counts_as_tried_and_stays_out_of_later_races(
    planted: Any, space: Space, database: Database
) -> None:
    database.remember(HERE)
    (cell,) = space.cells
    wrong = cell.called(cell.starts[0])
    racing = Racing(planted, {str(wrong.candidate): Measurement("wrong", message="planted")})
    state = state_of(space)
    found = search_cells(space, database, racing, state)
    assert (state.measured, state.failed) == (TRIALS, 1)
    assert [call.key for call in racing.asked].count(wrong.key) == 1
    assert wrong.key in found.fresh
    silent = Racing(planted)
    search_cells(space, database, silent, state_of(space))
    assert silent.races == []


@pytest.mark.parametrize(("failing", "tried"), [(0, BATCH), (BATCH, 2 * BATCH), (2 * BATCH, 2 * BATCH)])
def test_where_none_of_the_first_trials_works_there_are_as_many_again(
    planted: Any, space: Space, database: Database, failing: int, tried: int
) -> None:
    class Failing(Racing):
        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
            for call, measurement in super().measure(races):
                yield (call, Measurement("error", message="planted") if len(self.asked) <= failing else measurement)

    database.remember(HERE)
    measurer, state = Failing(planted), state_of(space)
    ledger = Ledger(space, database, HERE.key, state)
    with RaceRunner(ledger, measurer) as runner:
        CellSearches(runner, measurer, {}).search([space.cells[0].key])
    assert len(ledger.fresh) == tried
    assert state.failed == failing


def test_what_another_run_has_stored_by_then_is_not_measured_and_counts_as_tried(
    planted: Any, space: Space, database: Database
) -> None:
    database.remember(HERE)
    (cell,) = space.cells
    theirs = cell.called(cell.starts[0])
    state = state_of(space)

    def watch(_: Progress) -> None:
        database.store(HERE.key, [(theirs, Measurement("ok", 1e6))])

    state.watch = watch
    racing = Racing(planted)
    found = search_cells(space, database, racing, state)
    assert theirs.key not in {call.key for call in racing.asked}
    assert theirs.key in found.space.calls
    assert len(found.fresh) == TRIALS - 1


def test_limits_leave_half_to_the_rest_of_the_run(planted: Any, space: Space, database: Database) -> None:
    database.remember(HERE)
    found = search_cells(space, database, Racing(planted), state_of(space, Limits(measurements=16)))
    assert len(found.fresh) == 8


def test_proposals_that_compile_are_compiled_first_and_what_does_not_is_not_timed(
    planted: Any, space: Space, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = replace(KERNELS["planted_tiled"], compiles=True)
    monkeypatch.setitem(KERNELS._kernels, "planted_tiled", compiling)
    database.remember(HERE)

    class Compiling(Racing):
        def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
            for call in calls:
                failed = dict(call.candidate.params)["order"] == "hilbert"
                yield call, Measurement("error", message="no such instruction") if failed else None

    racing = Compiling(planted)
    found = search_cells(space, database, racing, state_of(space))
    orders = Counter(dict(call.candidate.params)["order"] for call in racing.asked)
    statuses = Counter(m.status for m in database.find(HERE.key, tuple(found.space.calls)).values())
    assert orders["hilbert"] == 0
    assert statuses["error"] > 0
    assert statuses.total() == TRIALS


def compiling_twice(planted: Any, monkeypatch: pytest.MonkeyPatch) -> SpaceFile:
    """Return a search space of two kernels that compile, of which the planted one is searched with 40 trials."""
    compiling = replace(KERNELS["planted_tiled"], compiles=True)
    monkeypatch.setitem(KERNELS._kernels, "planted_tiled", compiling)
    monkeypatch.setitem(KERNELS._kernels, "planted_late", replace(compiling, name="planted_late"))
    searched = KernelEntry(layouts="declared", params=planted.LISTS)
    return SpaceFile(
        version=1, device_type="cpu", conversions=[],
        kernels={**CPU.kernels, "planted_tiled": searched, "planted_late": searched},
    )  # fmt: skip


class TwoKernels(Racing):
    """One kernel that always takes a few times as long as the other."""

    def __init__(self, planted: Any, factor: float) -> None:
        super().__init__(planted)
        self.factor = factor
        self.compiled: list[list[Call]] = []

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        self.compiled.append(list(calls))
        yield from ((call, None) for call in calls)

    def _cost_us(self, call: Call) -> float:
        late = call.candidate.kernel == "planted_late"
        return super()._cost_us(call) * (self.factor if late else 1.0)


def test_cells_whose_kernel_compiles_take_turns_and_a_round_is_compiled_at_once(
    planted: Any, linear: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = build_space(training_graph(linear.graph()), compiling_twice(planted, monkeypatch))
    assert len(space.cells) == 2
    database.remember(HERE)
    racing = TwoKernels(planted, 1.0)
    found = search_cells(space, database, racing, state_of(space))
    assert len(found.fresh) == 2 * TRIALS
    assert [len(calls) for calls in racing.compiled] == [2 * BATCH] * (TRIALS // BATCH)
    assert all({call.candidate.kernel for call in race} < {"planted_tiled", "planted_late"} for race in racing.races)
    assert len(racing.races) == 2 * TRIALS // BATCH


@pytest.mark.parametrize(("factor", "tried"), [(1.1, TRIALS), (5.0, 8)])
def test_a_cell_far_behind_another_of_the_same_computation_is_searched_no_further(
    factor: float, tried: int, planted: Any, linear: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = build_space(training_graph(linear.graph()), compiling_twice(planted, monkeypatch))
    database.remember(HERE)
    stages: list[Progress] = []
    racing = TwoKernels(planted, factor)
    state = TuningState(space, stages.append, TuneOptions())
    found = search_cells(space, database, racing, state)
    by_kernel = Counter(call.candidate.kernel for key, call in found.space.calls.items() if key in found.fresh)
    assert by_kernel["planted_tiled"] == TRIALS
    assert by_kernel["planted_late"] == tried
    assert stages[-1].done == stages[-1].total == TRIALS + tried
    everything = search_cells(space, database, racing, TuningState(space, stages.append, TuneOptions(exhaustive=True)))
    assert len(everything.fresh) == TRIALS - tried


@pytest.mark.parametrize(("factor", "far"), [(2.5, "planted_late"), (0.4, "planted_tiled")])
def test_with_a_limit_a_cell_is_searched_as_far_as_it_could_be_of_a_better_plan(
    factor: float, far: str, planted: Any, linear: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of each is measured, and a few more of the one that takes 2.5 times as long as the other."""
    file = compiling_twice(planted, monkeypatch)
    kept = ("torch_matmul", "torch_bias_grad", "planted_tiled", "planted_late")
    file = file.model_copy(update={"kernels": {name: file.kernels[name] for name in kept}})
    racing = TwoKernels(planted, factor)
    found = tune(linear, file, database, racing, limits=Limits(seconds=3600.0), policy=TuningPolicy(few_calls=0))
    rows = database.measurements(Filter(HERE.key), limit=1000)
    by_kernel = Counter(row.call.candidate.kernel for row in rows)
    tried = by_kernel.pop(far)
    assert tried <= 1 + BATCH
    assert TRIALS in by_kernel.values()
    assert found.counts["sampled_tried"] == TRIALS + tried
    assert found.counts["unneeded"] == found.counts["unknown"]


def test_a_cell_whose_only_start_is_an_operator_s_first_call_is_searched(
    planted: Any, linear: Model, database: Database
) -> None:
    """Of the first, last and middle values, the kernel admits the first ones alone."""
    plain, lists = KernelEntry(layouts="declared"), {**planted.LISTS, "block": [16, 2048, 1024]}
    kernels = {
        "torch_matmul": plain,
        "torch_bias_grad": plain,
        "planted_tiled": KernelEntry(layouts="declared", params=lists),
    }
    file = SpaceFile(version=1, device_type="cpu", kernels=kernels, conversions=[])
    assert len(build_space(training_graph(linear.graph()), file).cells[0].starts) == 1
    policy = TuningPolicy(few_calls=0)
    found = tune(linear, file, database, Racing(planted), gap=0.0, policy=policy)
    assert found.counts["sampled_tried"] == TRIALS


def test_what_a_search_may_find_is_estimated_and_no_part_of_what_is_proven(planted: Any, space: Space) -> None:
    (cell,) = space.cells
    known = {key: racing_us(planted, call) for key, call in space.calls.items()}
    relaxation = Relaxation(space)
    alone = relaxation.bounds(known, NO_ROOFLINE, 0.0)
    best_us = min(planted.cost_us(call) for call in space.calls.values() if call.candidate.kernel == "planted_tiled")
    found = relaxation.bounds(known, NO_ROOFLINE, 0.0, searched_us={cell.key: (0.7 * best_us, 0.9 * best_us)})
    assert alone is not None
    assert found is not None
    assert (alone.wanted, found.wanted) == ((), (cell.key,))
    assert found.bound_us == alone.bound_us == found.best_us
    assert found.estimated_us == pytest.approx(alone.bound_us - 0.3 * best_us)


def test_a_gap_is_not_reached_while_searches_may_find_more(planted: Any, space: Space) -> None:
    (cell,) = space.cells
    state = TuningState(space, lambda _: None, TuneOptions(gap=0.01))
    known = {key: racing_us(planted, call) for key, call in space.calls.items()}
    state.searched_us = lambda: {cell.key: (1.0, 1.0)}
    state.solve(known, now=True)
    assert state.bounds is not None
    assert state.bounds.proven_gap == 0
    assert not state.enough()
    state.searched_us = dict
    state.solve(known, now=True)
    assert state.enough()


def racing_us(planted: Any, call: Call) -> Measurement:
    return timed(call, Racing(planted)._cost_us(call))[1]


class Beside(CompilingBeside, TwoKernels):
    """Two searched kernels that are compiled while others are timed."""


def test_other_calls_are_timed_while_proposals_are_compiled(
    planted: Any, linear: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = build_space(training_graph(linear.graph()), compiling_twice(planted, monkeypatch))
    other = next(call for call in space.calls.values() if call.candidate.kernel == "torch_matmul")
    database.remember(HERE)
    measurer = Beside(planted, 1.0)
    ledger = Ledger(space, database, HERE.key, state_of(space))
    with RaceRunner(ledger, measurer) as runner:
        CellSearches(runner, measurer, {}).search([space.cells[0].key], iter([([], [other])]))
    first, *heats = measurer.races
    assert first == [other]
    assert [len(heat) for heat in heats] == [BATCH]
    assert ledger.fresh == {call.key for race in measurer.races for call in race}


def test_proposals_that_are_not_compiled_when_the_time_for_that_is_over_are_not_timed(
    planted: Any, linear: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = build_space(training_graph(linear.graph()), compiling_twice(planted, monkeypatch))
    tiled, late = space.cells
    other = next(call for key, call in space.calls.items() if call.candidate.kernel == late.kernel)
    database.remember(HERE)
    measurer, state = Beside(planted, 1.0), state_of(space)
    ledger = Ledger(space, database, HERE.key, state)
    with RaceRunner(ledger, measurer) as runner:
        runner.compile([other])
        monkeypatch.setattr(state, "is_over", lambda stage: stage == "compile_beside")
        CellSearches(runner, measurer, {}).search([tiled.key], runner.needed(runner.ripe([[other]])))
    assert [race for race in measurer.races if race] == []  # the measurer would refuse what is not compiled
    assert measurer.waiting == []


def test_cells_race_as_their_proposals_are_compiled_and_try_what_rounds_try(
    planted: Any, linear: Model, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = build_space(training_graph(linear.graph()), compiling_twice(planted, monkeypatch))
    database.remember(HERE)
    racing = Beside(planted, 1.0)
    found = search_cells(space, database, racing, state_of(space))
    assert len(found.fresh) == 2 * TRIALS
    assert Counter(racing.order) == Counter(found.fresh), "each is compiled once"
    with open_database(tmp_path / "rounds.sqlite") as other:
        other.remember(HERE)
        assert search_cells(space, other, TwoKernels(planted, 1.0), state_of(space)).fresh == found.fresh


def test_a_cell_that_does_not_compile_is_searched_while_others_are_compiled(
    planted: Any, linear: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = compiling_twice(planted, monkeypatch)
    monkeypatch.setitem(KERNELS._kernels, "planted_late", replace(KERNELS["planted_late"], compiles=False))
    space = build_space(training_graph(linear.graph()), file)
    database.remember(HERE)
    racing = Beside(planted, 1.0)
    search_cells(space, database, racing, state_of(space))
    kernels = "".join(race[-1].candidate.kernel.removeprefix("planted_")[0] for race in racing.races)
    assert Counter(kernels) == {"t": TRIALS // BATCH, "l": TRIALS // BATCH}
    assert kernels[0] == "l", "the other one's proposals are still to be compiled"
    assert "tl" in kernels, "neither waits for the end of the other"


def test_a_run_chooses_what_the_search_found_and_says_what_was_sampled(
    planted: Any, linear: Model, file: SpaceFile, database: Database
) -> None:
    stages: list[Progress] = []
    first = Racing(planted)
    found = tune(linear, file, database, first, watch=stages.append)
    best = min(planted.cost_us(call) for call in first.asked)
    (step,) = (step for step in found.steps if step.kernel == "planted_tiled")
    assert step.predicted_us == best <= 1.3 * planted.BEST_US
    assert (found.counts["cells_enumerated"], found.counts["cells_sampled"]) == (4, 1)
    assert (found.counts["sampled_combinations"], found.counts["sampled_tried"]) == (928, TRIALS)
    assert (found.counts["measured"], found.counts["reused"]) == (TRIALS + 4, 0)
    searching = [progress.done for progress in stages if progress.stage == "search"]
    assert searching == list(range(0, TRIALS + 1, BATCH))
    assert (stages[-1].measured, stages[-1].reused) == (TRIALS + 4, 0)
    silent = Racing(planted)
    again = tune(linear, file, database, silent, again=True)
    assert silent.races == []
    assert (again.counts["measured"], again.counts["reused"]) == (0, TRIALS + 4)
    assert again.steps == found.steps


def test_the_incumbent_of_a_search_is_confirmed_as_all_that_is_new(
    planted: Any, linear: Model, file: SpaceFile, database: Database
) -> None:
    racing = Racing(planted)
    found: Configuration = tune(linear, file, database, racing)
    (step,) = (step for step in found.steps if step.kernel == "planted_tiled")
    alone = [race[0].candidate.params for race in racing.races if len(race) == 1]
    assert step.params in alone


@pytest.mark.slow
def test_a_measured_search_finds_a_good_combination_and_prunes_losers(
    planted: Any, linear: Model, file: SpaceFile, database: Database, tmp_path: Path
) -> None:
    modules = ["autotuner.kernels.rules", PLANTED]
    with Measurer(threads=1, rotate_bytes=0, cache_dir=tmp_path, modules=modules) as measurer:
        found = tune(linear, file, database, measurer)
        rows = database.measurements(Filter(measurer.environment.key, kernel="planted_tiled"))
    assert found.counts["sampled_tried"] == len(rows) == TRIALS
    assert {row.measurement.status for row in rows} == {"ok"}
    (step,) = (step for step in found.steps if step.kernel == "planted_tiled")
    chosen_us = next(planted.cost_us(row.call) for row in rows if row.call.candidate.params == step.params)
    typical_us = median(planted.cost_us(row.call) for row in rows)
    assert chosen_us < typical_us
    assert (
        min(len(row.measurement.samples_us) for row in rows) < 3 <= max(len(row.measurement.samples_us) for row in rows)
    )


@pytest.mark.slow
def test_nothing_that_plans_or_serves_imports_the_sampler() -> None:
    packages = "autotuner.tuner, autotuner.server.http, autotuner.solve, autotuner.space"
    code = f"import sys, {packages}; sys.exit(any(name.split('.')[0] == 'optuna' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_sampler_says_nothing(planted: Any, capfd: pytest.CaptureFixture[str]) -> None:
    searched(CellSearch(cell_of(planted, trials=8)), planted.cost_us)
    assert capfd.readouterr() == ("", "")


def test_a_search_ends_at_its_share_of_the_seconds(linear: Model, file: SpaceFile, database: Database) -> None:
    class Endless(Replay):
        """Races for ever, and asks whether to go on."""

        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:  # noqa: ARG002
            while True:
                checkpoint()
                time.sleep(0.01)
                yield from ()

    space = build_space(training_graph(linear.graph()), file)
    assert space.cells
    database.remember(HERE)
    state = TuningState(space, lambda _: None, TuneOptions(limits=Limits(seconds=1.0)))
    searched = search_cells(space, database, Endless(HERE, {}), state)
    assert searched.fresh == frozenset()
    assert state.is_over("search")
