"""Tuning runs without a device, on a small model with made-up times."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import Database, Filter
from autotuner.errors import InfeasibleError, InputError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.numerics import Numerics
from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Measured
from autotuner.plan.request import Request, family_key
from autotuner.settings import TuneOptions
from autotuner.space import build_space
from autotuner.tuner import Progress, TuningPolicy, request_key, save, tuning
from autotuner.tuner.tuning import reads_parameters_as_declared
from tests.made_up import CPU, HERE, space_of, times
from tests.tuner.asking import Asking, tune

WITH_BIAS = ("torch_matmul_bias", "cpp_matmul_bias")
STORED_TOGETHER = TuningPolicy().store_after_results
INTERLEAVED = Path(__file__).parents[1] / "data" / "configuration_interleaved_weights.json.gz"


def without_dates(configuration: Configuration) -> dict[str, Any]:
    return {key: value for key, value in configuration.to_json().items() if key not in ("created_at", "counts")}


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


def test_a_plan_from_when_parameters_could_have_other_strides_is_told_from_one_that_reads_them_as_declared(
    small: Model, database: Database
) -> None:
    value = json.loads(gzip.decompress(INTERLEAVED.read_bytes()))
    assert not reads_parameters_as_declared(Configuration.from_json(value, INTERLEAVED.name))
    assert reads_parameters_as_declared(tune(small, CPU, database, Asking(times(space_of(small).calls))))


def test_an_answer_whose_parameters_have_other_strides_is_no_answer(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(small, CPU, database, Asking(times(space_of(small).calls)))
    monkeypatch.setattr(tuning, "reads_parameters_as_declared", lambda _: False)
    stages: list[Progress] = []
    tune(small, CPU, database, Asking({}), watch=stages.append)
    assert {"space", "solve"} <= {progress.stage for progress in stages}


@pytest.mark.parametrize("results", [1, STORED_TOGETHER, STORED_TOGETHER + 5])
def test_an_interrupted_tuning_keeps_its_results_and_goes_on_with_the_rest(
    small: Model, database: Database, results: int
) -> None:
    known = times(space_of(small).calls)
    interrupted = Asking(known, stop_after=results)
    with pytest.raises(KeyboardInterrupt):
        tune(small, CPU, database, interrupted)
    assert sorted(database.find(HERE.key, tuple(known))) == sorted(interrupted.answered)
    rest = Asking(known)
    found = tune(small, CPU, database, rest)
    assert sorted(rest.asked) == sorted(set(known) - set(interrupted.answered))
    assert (found.counts["measured"], found.counts["reused"]) == (len(known) - results, results)


def test_every_missing_call_is_asked_for_once(small: Model, database: Database) -> None:
    calls = space_of(small).calls
    asking = Asking(times(calls))
    tune(small, CPU, database, asking)
    assert sorted(asking.asked) == sorted(calls)
    assert sorted(asking.compiled) == sorted(k for k, c in calls.items() if KERNELS[c.candidate.kernel].compiles)


def test_failed_candidates_do_not_end_the_job_and_are_not_chosen(small: Model, database: Database) -> None:
    calls = space_of(small).calls
    known = times(calls)
    products = [key for key, call in calls.items() if call.candidate.kernel in WITH_BIAS]
    for key in products:
        known[key] = Measurement("wrong", message="output 0 differs from the reference")
    found = tune(small, CPU, database, Asking(known))
    assert found.counts["failed"] == found.counts["status_wrong"] == len(products) > 0
    assert not any(step.kernel in WITH_BIAS for step in found.steps)
    rejected = next(fusion for fusion in found.fusions if fusion.operators == ("product", "biased"))
    assert (rejected.kernel, rejected.best_us, rejected.chosen) == ("", None, False)
    assert database.statistics(Filter(HERE.key)).statuses["wrong"] == len(products)


@pytest.mark.slow
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
    assert database.statistics(Filter(HERE.key)).statuses["timeout"] == 0


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
    lost = [key for key, call in space_of(small).calls.items() if call.candidate.kernel in WITH_BIAS]
    for key in lost:
        del known[key]
    found = tune(small, CPU, database, Asking(known))
    assert found.counts["unknown"] == len(lost)
    assert found.counts["measured"] == len(known)


def test_without_a_working_candidate_the_run_fails_and_its_results_stay(small: Model, database: Database) -> None:
    known = {key: Measurement("crashed", message="killed by SIGSEGV") for key in space_of(small).calls}
    with pytest.raises(InfeasibleError, match="operator 'product'"):
        tune(small, CPU, database, Asking(known))
    assert database.statistics(Filter(HERE.key)).statuses["crashed"] == len(known)


def test_a_stored_answer_that_cannot_be_read_is_solved_anew(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    first = tune(small, CPU, database, Asking(known))
    database.configurations.save(
        request_key=request_key(Request(small), CPU), environment_key=HERE.key,
        family_key=small.family, dtype=small.dtype,
        extents=small.extents, complete=True, document=first.to_json() | {"schema": 0}, total_us=1.0,
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
        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
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
    key = request_key(Request(small), CPU)
    assert key == request_key(Request(Model.from_json(small.to_json())), CPU)
    fewer = CPU.model_copy(update={"kernels": {"torch_matmul": CPU.kernels["torch_matmul"]}})
    wider = replace(small, extents={**small.extents, "b": 8})
    others = [request_key(Request(small), fewer), request_key(Request(wider), CPU)]
    others += [request_key(Request(small, options=TuneOptions(numerics="8-bit")), CPU)]
    assert len({key, *others, request_key(Request(small, options=TuneOptions(budget_bytes=1000)), CPU)}) == 5
    with pytest.raises(InputError, match="numerics is '4-bit': write exact, 8-bit or fp8"):
        Request(small, options=TuneOptions(numerics="4-bit"))


def test_conversions_to_8_bits_are_measured_where_they_are_allowed_though_no_fastest_plan_has_them(
    small: Model, database: Database
) -> None:
    space = build_space(training_graph(small.graph()), CPU, numerics="8-bit")
    asking = Asking(times(space.calls))
    found = tune(small, CPU, database, asking, numerics="8-bit", gap=1e9, policy=TuningPolicy(few_calls=0))
    assert space.narrow_calls
    assert space.narrow_calls <= {*asking.asked} < space.calls.keys()
    assert not found.inexact
    exact = Asking(times(space.calls))
    assert not tune(small, CPU, database, exact).inexact
    assert space.narrow_calls.isdisjoint(exact.asked)

    def known(numerics: Numerics) -> str:
        stored = database.configurations.best(
            family_key=family_key(small.family, numerics=numerics), dtype=small.dtype, extents=small.extents,
            device_type="cpu", device_name=None,
        ).stored  # fmt: skip
        assert stored is not None
        return Configuration.from_json(json.loads(stored.text)).numerics

    assert (known("exact"), known("8-bit")) == ("exact", "8-bit")


def test_progress_goes_from_the_space_to_the_end(small: Model, database: Database) -> None:
    seen: list[Progress] = []
    known = times(space_of(small).calls)
    tune(small, CPU, database, Asking(known), watch=seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["space", "compile", "measure", "confirm", "solve", "done"]
    measuring = [progress for progress in seen if progress.stage == "measure"]
    assert [progress.done for progress in measuring] == list(range(len(known) + 1))
    assert {progress.total for progress in measuring} == {len(known)}


def test_what_is_told_at_the_end_is_the_answers_own(small: Model, database: Database) -> None:
    told: list[Progress] = []
    found = tune(small, CPU, database, Asking(times(space_of(small).calls)), watch=told.append)
    assert told[-1].stage == "done"
    assert (told[-1].best_us, told[-1].bound_us) == (found.certificate.predicted_us, found.certificate.lower_bound_us)


def test_an_end_to_end_timing_is_kept_with_the_answer(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    found = tune(small, CPU, database, Asking(known))
    assert found.measured is None
    plan_us = found.certificate.predicted_us + 20.0
    timed = found.with_measured(Measured(plan_us, 20.0, {"eager": 1.5 * plan_us}, 30))
    save(database, timed, request_key(Request(small), CPU))
    again = tune(small, CPU, database, Asking({}))
    assert again.measured is not None
    assert again.measured.ratios == {"eager": 1.5}
