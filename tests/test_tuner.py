"""The walk without a device: on a small model with made-up times, and on what was recorded of an encoder layer."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from autotuner.configuration import Configuration, Measured
from autotuner.database import Database, open_database
from autotuner.errors import InfeasibleError
from autotuner.graph.autodiff import training_graph
from autotuner.kernels import KERNELS
from autotuner.kernels.canonical import canonical
from autotuner.models import Model, load_model
from autotuner.problem.formulate import formulate
from autotuner.records import Call, Environment, Measurement
from autotuner.solvers import SOLVERS
from autotuner.space import Space, SpaceFile, build_space
from autotuner.tuner import (
    STORE_AFTER_RESULTS,
    Progress,
    Replay,
    build_configuration,
    default_us,
    kernels_by_cover,
    request_key,
    save,
    tune,
    with_measured,
)
from tests.made_up import CPU, HERE, small_model, space_of, times
from tests.problem.walking import contradictions

RECORDED = Path(__file__).parent / "data" / "bert_encoder_tiny_cpu.json.gz"


@dataclass(frozen=True)
class Recorded:
    """A model with everything that was measured of it."""

    model: Model
    file: SpaceFile
    space: Space
    environment: Environment
    measurements: dict[str, Measurement]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    value = json.loads(gzip.decompress(RECORDED.read_bytes()))
    name, _, preset = value["model"].partition(":")
    model = load_model(name).instantiate(preset)
    file = CPU.model_copy(update={"kernels": {kernel: CPU.kernels[kernel] for kernel in value["kernels"]}})
    facts = value["environment"]
    environment = Environment(
        facts["device_type"], facts["device_name"], tuple(facts["facts"].items()), tuple(facts["policy"].items())
    )
    measurements = {
        key: Measurement(status, median, low, high, message="" if status == "ok" else "as recorded")
        for key, (status, median, low, high) in value["measurements"].items()
    }
    space = build_space(training_graph(model.graph()), file)
    unknown = set(space.calls) - set(measurements)
    if unknown:
        pytest.fail(
            f"{RECORDED.name} lacks {len(unknown)} of the {len(space.calls)} calls of {value['model']}: a kernel's "
            "rules, the space or the records have changed; tune it again and write the file with scripts/record_replay"
        )
    return Recorded(model, file, space, environment, measurements)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "tuning.sqlite") as opened:
        yield opened


class Asking(Replay):
    """A replay that keeps what it was asked, first and once more, and may be interrupted after some results."""

    def __init__(
        self, recorded: dict[str, Measurement], environment: Environment = HERE, stop_after: int | None = None
    ) -> None:
        super().__init__(environment, recorded)
        self.compiled: list[str] = []
        self.asked: list[str] = []
        self.confirmed: list[str] = []
        self.stop_after = stop_after

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        self.compiled += [call.key for call in calls]
        return super().prepare(calls)

    def measure(self, races: Sequence[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        keys = [call.key for race in races for call in race]
        self.confirmed += [key for key in keys if key in self.asked]
        self.asked += [key for key in keys if key not in self.confirmed]
        yield from islice(super().measure(races), self.stop_after)
        if self.stop_after is not None:
            raise KeyboardInterrupt


def without_dates(configuration: Configuration) -> dict[str, Any]:
    return {key: value for key, value in configuration.to_json().items() if key not in ("created_at", "counts")}


# On what was recorded


def test_the_walk_finds_the_exact_optimum_of_what_was_recorded(recorded: Recorded, database: Database) -> None:
    assert RECORDED.stat().st_size < 300 * 1024
    found = tune(recorded.model, recorded.file, database, Replay(recorded.environment, recorded.measurements))
    certificate, space = found.certificate, recorded.space
    costs = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    best = SOLVERS["exact"](formulate(space, costs).problem)
    assert certificate.solver == "exact"
    assert certificate.predicted_us == pytest.approx(best.total_us)
    assert certificate.predicted_us == pytest.approx(sum(step.predicted_us for step in found.steps))
    assert 0 < certificate.lower_bound_us <= certificate.predicted_us
    assert certificate.gap == pytest.approx(certificate.predicted_us / certificate.lower_bound_us - 1)
    assert certificate.baseline_us is not None
    assert certificate.baseline_us >= certificate.predicted_us
    assert certificate.default_us is not None
    assert certificate.default_us > certificate.predicted_us
    assert contradictions(space.graph, space.given, found.steps) == []
    assert found.counts["calls"] == found.counts["measured"] == len(space.calls)
    assert found.counts["reused"] == found.counts["unknown"] == 0
    assert found.bytes_moved["chosen"] < found.bytes_moved["unfused"]


def test_every_step_costs_what_was_measured_for_its_call(recorded: Recorded) -> None:
    found = build_configuration(recorded.model, recorded.space, recorded.measurements, recorded.environment, {})
    for step in found.steps:
        assert 0 <= step.bound_us <= step.predicted_us
        if not step.adjacent:  # where operands must lie in one buffer, a step's own forms do not say so
            call = step.call(recorded.space.graph)
            measured = recorded.measurements[canonical(call.subgraph, call.candidate).key]
            assert measured.median_us == step.predicted_us
    assert sum(bool(step.adjacent) for step in found.steps) < len(found.steps) / 2


def test_the_papers_strategy_gives_a_plan_too_and_none_cheaper(recorded: Recorded) -> None:
    given = recorded.model, recorded.space, recorded.measurements, recorded.environment, dict[str, int]()
    exact, baseline = build_configuration(*given), build_configuration(*given, solver="shortest_path")
    assert baseline.certificate.solver == "shortest_path"
    assert baseline.certificate.predicted_us == pytest.approx(exact.certificate.baseline_us)
    assert contradictions(recorded.space.graph, recorded.space.given, baseline.steps) == []


def test_every_fusion_is_chosen_or_rejected_by_measurement(recorded: Recorded) -> None:
    found = build_configuration(recorded.model, recorded.space, recorded.measurements, recorded.environment, {})
    chosen = {step.operators for step in found.steps if len(step.operators) > 1}
    wide = {choice.cover.operators for choice in recorded.space.choices if len(choice.cover.operators) > 1}
    assert {fusion.operators for fusion in found.fusions} == wide
    assert {fusion.operators for fusion in found.fusions if fusion.chosen} == chosen
    assert chosen
    for fusion in found.fusions:
        assert fusion.best_us is not None
        assert fusion.kernel in KERNELS
    labels = [label for label, _ in kernels_by_cover(found)]
    assert len(set(labels)) == len(labels) == len(found.steps)


# On a small model


def test_a_second_tuning_is_answered_without_measuring(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    first = tune(small, CPU, database, Asking(known))
    stages: list[Progress] = []
    silent = Asking({})
    second = tune(small, CPU, database, silent, watch=stages.append)
    assert without_dates(second) == without_dates(first)
    assert (second.counts["measured"], second.counts["reused"]) == (0, len(known))
    assert silent.asked == silent.compiled == []
    assert [progress.stage for progress in stages] == ["done"]
    solved_anew = tune(small, CPU, database, silent, again=True)
    assert silent.asked == silent.compiled == []
    assert without_dates(solved_anew) == without_dates(first)
    assert (solved_anew.counts["measured"], solved_anew.counts["reused"]) == (0, len(known))


@pytest.mark.parametrize("results", [1, STORE_AFTER_RESULTS, STORE_AFTER_RESULTS + 5])
def test_an_interrupted_tuning_keeps_its_results_and_goes_on_with_the_rest(
    small: Model, database: Database, results: int
) -> None:
    known = times(space_of(small).calls)
    interrupted = Asking(known, stop_after=results)
    with pytest.raises(KeyboardInterrupt):
        tune(small, CPU, database, interrupted)
    assert sorted(database.find(HERE.key, tuple(known))) == sorted(interrupted.asked[:results])
    assert [job.state for job in database.jobs()] == ["interrupted"]
    rest = Asking(known)
    found = tune(small, CPU, database, rest)
    assert sorted(rest.asked) == sorted(set(known) - set(interrupted.asked[:results]))
    assert (found.counts["measured"], found.counts["reused"]) == (len(known) - results, results)
    assert [job.state for job in database.jobs()] == ["finished", "interrupted"]


def test_every_missing_call_is_asked_for_once(small: Model, database: Database) -> None:
    calls = space_of(small).calls
    asking = Asking(times(calls))
    tune(small, CPU, database, asking)
    assert sorted(asking.asked) == sorted(calls)
    assert sorted(asking.compiled) == sorted(k for k, c in calls.items() if KERNELS[c.candidate.kernel].compiles)


def test_failed_candidates_do_not_end_the_job_and_are_not_chosen(small: Model, database: Database) -> None:
    calls = space_of(small).calls
    known = times(calls)
    products = [key for key, call in calls.items() if call.candidate.kernel == "torch_matmul_bias"]
    for key in products:
        known[key] = Measurement("wrong", message="output 0 differs from the reference")
    found = tune(small, CPU, database, Asking(known))
    assert found.counts["failed"] == found.counts["status_wrong"] == len(products) > 0
    assert not any(step.kernel == "torch_matmul_bias" for step in found.steps)
    rejected = next(fusion for fusion in found.fusions if fusion.operators == ("product", "biased"))
    assert (rejected.kernel, rejected.best_us, rejected.chosen) == ("", None, False)
    assert database.counts(HERE.key)["wrong"] == len(products)
    assert database.jobs()[0].state == "finished"


def test_what_failed_is_measured_once_more_when_asked(small: Model, database: Database) -> None:
    calls = space_of(small).calls
    good = times(calls)
    failing = {key for key, call in calls.items() if call.candidate.kernel == "torch_matmul_bias"}
    bad = {key: Measurement("timeout", message="no result after 30 s") for key in failing}
    tune(small, CPU, database, Asking(good | bad))
    again = Asking(good)
    found = tune(small, CPU, database, again, retry=True)
    assert set(again.asked) == failing
    assert (found.counts["failed"], found.counts["measured"]) == (0, len(failing))
    assert database.counts(HERE.key)["timeout"] == 0


def test_what_does_not_compile_is_stored_and_not_measured(small: Model, database: Database) -> None:
    class Uncompiled(Asking):
        def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
            yield from ((call, Measurement("error", message="no compiler")) for call in calls)

    calls = space_of(small).calls
    compiling = {key for key, call in calls.items() if KERNELS[call.candidate.kernel].compiles}
    asking = Uncompiled(times(calls))
    found = tune(small, CPU, database, asking)
    assert compiling
    assert set(asking.asked) == set(calls) - compiling
    assert found.counts["status_error"] == len(compiling)
    assert not any(KERNELS[step.kernel].compiles for step in found.steps)


def test_what_was_not_answered_is_counted_as_unknown(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    lost = [key for key, call in space_of(small).calls.items() if call.candidate.kernel == "torch_matmul_bias"]
    for key in lost:
        del known[key]
    found = tune(small, CPU, database, Asking(known))
    assert found.counts["unknown"] == len(lost)
    assert found.counts["measured"] == len(known)


def test_without_a_working_candidate_the_job_fails_and_its_results_stay(small: Model, database: Database) -> None:
    known = {key: Measurement("crashed", message="killed by SIGSEGV") for key in space_of(small).calls}
    with pytest.raises(InfeasibleError, match="operator 'product'"):
        tune(small, CPU, database, Asking(known))
    (job,) = database.jobs()
    assert job.state == "failed"
    assert "product" in job.message
    assert database.counts(HERE.key)["crashed"] == len(known)


def test_a_stored_answer_that_cannot_be_read_is_solved_anew(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    first = tune(small, CPU, database, Asking(known))
    database.save_configuration(
        graph_key=first.graph_key, request_key=request_key(small, CPU), environment_key=HERE.key,
        document=first.to_json() | {"schema": 0}, total_us=1.0,
    )  # fmt: skip
    silent = Asking({})
    assert without_dates(tune(small, CPU, database, silent)) == without_dates(first)
    assert silent.asked == []


def test_what_is_chosen_is_timed_once_more_and_a_lucky_timing_does_not_stay_chosen(
    small: Model, database: Database
) -> None:
    known = times(space_of(small).calls)
    first = Asking(known)
    honest = tune(small, CPU, database, first)
    slow = {key for key in known if key not in first.confirmed}

    class Lucky(Asking):
        def measure(self, races: Sequence[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
            again = set(self.asked)
            for call, measurement in super().measure(races):
                lucky = call.key in slow and call.key not in again
                yield call, replace(measurement, median_us=(measurement.median_us or 0) / 2) if lucky else measurement

    lucky = Lucky(known, replace(HERE, facts=(("threads", 3),)))
    found = tune(small, CPU, database, lucky)
    assert slow & set(lucky.confirmed), "no lucky timing was ever chosen"
    assert len(lucky.confirmed) == len(set(lucky.confirmed))
    assert database.find(lucky.environment.key, lucky.confirmed) == {key: known[key] for key in lucky.confirmed}
    assert found.certificate.predicted_us <= honest.certificate.predicted_us


def test_another_environment_is_measured_anew(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    tune(small, CPU, database, Asking(known))
    elsewhere = Asking(known, replace(HERE, facts=(("threads", 2),)))
    found = tune(small, CPU, database, elsewhere)
    assert len(elsewhere.asked) == len(known)
    assert found.environment_key != HERE.key


def test_another_request_has_another_key(small: Model) -> None:
    key = request_key(small, CPU)
    assert key == request_key(Model.from_json(small.to_json()), CPU)
    fewer = CPU.model_copy(update={"kernels": {"torch_matmul": CPU.kernels["torch_matmul"]}})
    wider = replace(small, extents={**small.extents, "b": 8})
    assert len({key, request_key(small, fewer), request_key(wider, CPU)}) == 3


def test_progress_goes_from_the_space_to_the_end(small: Model, database: Database) -> None:
    seen: list[Progress] = []
    known = times(space_of(small).calls)
    tune(small, CPU, database, Asking(known), watch=seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["space", "compile", "measure", "confirm", "solve", "done"]
    measuring = [progress for progress in seen if progress.stage == "measure"]
    assert [progress.done for progress in measuring] == list(range(len(known) + 1))
    assert {progress.total for progress in measuring} == {len(known)}


def test_an_end_to_end_timing_is_kept_with_the_answer(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    found = tune(small, CPU, database, Asking(known))
    assert found.measured is None
    timed = with_measured(found, Measured(200.0, 20.0, {"eager": 300.0}, 30))
    save(database, timed, request_key(small, CPU))
    again = tune(small, CPU, database, Asking({}))
    assert again.measured is not None
    assert again.measured.ratios == {"eager": 1.5}


def test_the_default_is_every_operator_alone_as_declared(small: Model) -> None:
    space = space_of(small)
    declared = {
        choice.call.key: 7.0 for choice in space.choices
        if len(choice.cover.operators) == 1
        and all(text == space.graph.tensors[name].axes for name, text in choice.by_tensor.items())
    }  # fmt: skip
    assert default_us(space, declared) == 7.0 * len(space.graph.operators)
    some = next(iter(declared))
    assert default_us(space, {key: cost for key, cost in declared.items() if key != some}) is None
