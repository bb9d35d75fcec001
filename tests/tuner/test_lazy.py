"""Lazy measuring: its answer is that of measuring everything, with fewer measurements."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from autotuner.database import Database, open_database
from autotuner.errors import MeasureError
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.measure.roofline import NO_ROOFLINE, Ladder, Roofline
from autotuner.settings import Limits
from autotuner.solve import exact
from autotuner.solve.problem.formulate import formulate
from autotuner.tuner import Progress, Replay, TuningPolicy
from autotuner.tuner.races import openers
from tests.made_up import CPU, HERE, space_of, times
from tests.tuner import asking as tuning
from tests.tuner.asking import Asking
from tests.tuner.conftest import Recorded

TWENTY = Roofline(20.0, Ladder(((1.0, 20.0),)))
"""Every call takes 20 us at least: with times of 1 to 100 us a fifth of them show otherwise."""


LAZY = TuningPolicy(few_calls=0, solutions=0)
PATIENT = TuningPolicy(few_calls=0, solutions=float("inf"))
"""Solving always pays, and never."""

tune = partial(tuning.tune, policy=LAZY)


def slower(model: Model) -> dict[str, Measurement]:
    """Return times of 20 to 119 us: none below the ceilings."""
    found = times(space_of(model).calls)
    return {key: replace(m, median_us=19.0 + (m.median_us or 0.0)) for key, m in found.items()}


@pytest.mark.slow
def test_less_is_measured_and_the_answer_is_that_of_measuring_everything(small: Model, tmp_path: Path) -> None:
    known = slower(small)
    lazy, patient = Asking(known, ceilings=TWENTY), Asking(known, ceilings=TWENTY)
    with open_database(tmp_path / "lazy.sqlite") as database:
        found = tune(small, CPU, database, lazy)
    with open_database(tmp_path / "everything.sqlite") as database:
        whole = tune(small, CPU, database, patient, exhaustive=True)
    assert sorted(patient.asked) == sorted(known)
    assert len(lazy.asked) < len(known)
    assert len(lazy.asked) == len(set(lazy.asked))
    assert found.certificate.predicted_us == whole.certificate.predicted_us
    assert found.certificate.proven_gap == whole.certificate.proven_gap == 0.0
    assert found.counts["unknown"] == found.counts["unneeded"] == len(known) - len(lazy.asked)
    assert (whole.counts["unknown"], whole.counts["unneeded"]) == (0, 0)


@pytest.mark.slow
def test_on_recorded_times_a_tenth_is_proven_with_12_of_20_calls(recorded: Recorded, database: Database) -> None:
    seen: list[Progress] = []
    replay = Replay(recorded.environment, recorded.measurements, recorded.ceilings)
    found = tune(recorded.model, recorded.file, database, replay, gap=0.1, watch=seen.append)
    costs = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    best_us = exact(formulate(recorded.space).priced(costs).problem).total_us
    certificate = found.certificate
    assert found.counts["measured"] < found.counts["calls"] * 12 / 20
    assert certificate.lower_bound_us <= best_us
    assert best_us * (1 - 1e-12) <= certificate.predicted_us < 1.02 * best_us
    assert certificate.estimated_gap is not None
    assert certificate.proven_gap is not None
    assert 0 <= certificate.estimated_gap < certificate.proven_gap <= 0.1
    gaps = [progress.gap or 0.0 for progress in seen if progress.gap is not None and progress.stage == "measure"]
    assert gaps == sorted(gaps, reverse=True)
    assert len(set(gaps)) > 5


def test_a_complete_answer_is_not_measured_on(small: Model, database: Database) -> None:
    tune(small, CPU, database, Asking(slower(small), ceilings=TWENTY))
    silent = Asking({}, ceilings=TWENTY)
    again = tune(small, CPU, database, silent)
    assert silent.asked == silent.confirmed == []
    assert again.counts["measured"] == 0


@pytest.mark.slow
def test_everything_is_measured_after_a_lazy_run_where_that_is_asked_for(small: Model, database: Database) -> None:
    known = slower(small)
    lazy, rest = Asking(known, ceilings=TWENTY), Asking(known, ceilings=TWENTY)
    tune(small, CPU, database, lazy)
    tune(small, CPU, database, rest, exhaustive=True)
    assert sorted(lazy.asked + rest.asked) == sorted(known)


@pytest.mark.slow
def test_a_gap_ends_the_loop_earlier_and_a_later_job_goes_on(small: Model, database: Database) -> None:
    known = slower(small)
    hasty, patient = Asking(known, ceilings=TWENTY), Asking(known, ceilings=TWENTY)
    first = tune(small, CPU, database, hasty, gap=1.0)
    assert 0 < (first.certificate.proven_gap or 0.0) <= 1.0
    assert first.counts["unneeded"] == 0 < first.counts["unknown"]
    second = tune(small, CPU, database, patient)
    assert patient.asked
    assert second.certificate.proven_gap == 0.0
    assert second.certificate.predicted_us <= first.certificate.predicted_us


@pytest.mark.slow
def test_an_estimated_gap_ends_the_loop_without_a_proof(recorded: Recorded, database: Database) -> None:
    replay = Replay(recorded.environment, recorded.measurements, recorded.ceilings)
    found = tune(recorded.model, recorded.file, database, replay, estimated_gap=0.1)
    assert found.counts["measured"] < found.counts["calls"] / 3
    assert found.certificate.estimated_gap is not None
    assert found.certificate.estimated_gap <= 0.1 < (found.certificate.proven_gap or 0.0)


@pytest.mark.slow
def test_ceilings_are_measured_once_per_environment(small: Model, database: Database) -> None:
    class Counting(Asking):
        times = 0

        def ceilings(self, dtypes: Collection[str]) -> Roofline:
            assert list(dtypes) == ["float32"]
            self.times += 1
            return replace(TWENTY, products={"float32": Ladder(((1e12, 1.0),))})

    known = slower(small)
    first, second = Counting(known), Counting(known)
    tune(small, CPU, database, first, limits=Limits(measurements=3 + len(space_of(small).graph.operators)))
    tune(small, CPU, database, second)
    assert (first.times, second.times) == (1, 0)
    assert Roofline.from_facts(database.facts(HERE.key)).call_us == 20.0


@pytest.mark.parametrize(
    ("left", "alone_s", "look_s", "pays"),
    [(1000, 0.15, 0.8, False), (1000, 3.0, 0.8, True), (10, 3.0, 0.8, False), (1000, 0.0, 0.0, False)],
)
def test_looking_pays_where_there_are_many_calls_or_slow_ones(
    left: int, alone_s: float, look_s: float, pays: bool
) -> None:
    assert TuningPolicy().lazy_pays(left, alone_s, look_s) == pays


@pytest.mark.parametrize(("policy", "ceilings"), [(PATIENT, TWENTY), (TuningPolicy(few_calls=10_000), NO_ROOFLINE)])
def test_where_looking_does_not_pay_everything_is_measured_and_of_many_calls_ceilings_at_the_end(
    small: Model, database: Database, policy: TuningPolicy, ceilings: Roofline
) -> None:
    asking, seen = Asking(slower(small), ceilings=TWENTY), list[Progress]()
    tune(small, CPU, database, asking, watch=seen.append, policy=policy)
    assert sorted(asking.asked) == sorted(space_of(small).calls)
    assert Roofline.from_facts(database.facts(HERE.key)) == ceilings
    stages = [progress.stage for progress in seen]
    last = max(place for place, stage in enumerate(stages) if stage == "measure")
    assert "ceilings" not in stages[:last]
    assert ("ceilings" in stages) == (ceilings != NO_ROOFLINE)


def test_an_answer_for_which_everything_was_measured_needs_no_ceilings(small: Model, database: Database) -> None:
    class Lost(Asking):
        def ceilings(self, dtypes: Collection[str]) -> Roofline:
            raise MeasureError(f"lost at {dtypes}")

    with pytest.warns(UserWarning, match=r"ceilings were not measured: lost at \['float32'\]"):
        found = tune(small, CPU, database, Lost(slower(small)), exhaustive=True)
    assert found.counts["unknown"] == 0


def test_a_run_that_stopped_at_its_limits_measures_no_ceilings_at_its_end(small: Model, database: Database) -> None:
    limits = Limits(measurements=3 + len(space_of(small).graph.operators))
    tune(small, CPU, database, Asking(slower(small), ceilings=TWENTY), exhaustive=True, limits=limits)
    assert Roofline.from_facts(database.facts(HERE.key)) == NO_ROOFLINE


def test_a_call_that_is_faster_than_its_ceiling_lowers_it(small: Model, database: Database) -> None:
    """A fifth of these times lie below 20 us, so the ceilings are wrong; no bound stays above the best."""
    found = tune(small, CPU, database, Asking(times(space_of(small).calls), ceilings=TWENTY))
    assert found.certificate.lower_bound_us <= found.certificate.predicted_us
    assert found.certificate.proven_gap == 0.0


@pytest.mark.slow
def test_what_could_matter_is_compiled_once_and_nothing_where_a_look_is_enough(
    small: Model, database: Database
) -> None:
    compiling = {key for key, call in space_of(small).calls.items() if KERNELS[call.candidate.kernel].compiles}
    hasty, patient = Asking(slower(small), ceilings=TWENTY), Asking(slower(small), ceilings=TWENTY)
    tune(small, CPU, database, hasty, gap=100.0)
    tune(small, CPU, database, patient)
    assert set(hasty.compiled) == compiling & set(hasty.asked) < compiling
    assert compiling & set(patient.asked) <= set(patient.compiled) <= compiling
    assert len(patient.compiled) == len(set(patient.compiled))


@pytest.mark.slow
def test_what_is_chosen_is_confirmed_and_the_run_goes_on_where_that_made_it_slower(
    small: Model, database: Database
) -> None:
    known = slower(small)

    class Lucky(Asking):
        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
            before = set(self.asked)
            for call, measurement in super().measure(races):
                first = call.key not in before
                yield call, replace(measurement, median_us=20.0) if first else measurement

    lucky = Lucky(known, ceilings=TWENTY)
    found = tune(small, CPU, database, lucky)
    assert len(lucky.confirmed) == len(set(lucky.confirmed)) > 0
    chosen = {step.measured_call(found.graph()).key for step in found.steps}
    assert chosen <= set(lucky.confirmed)
    assert found.certificate.predicted_us > 20.0 * len(found.steps), "a lucky first timing of 20 us is not believed"


def test_where_there_is_a_plan_operators_that_are_inside_of_others_there_need_no_call_of_their_own(
    small: Model,
) -> None:
    space = space_of(small)
    first = [race[0] for race in openers(space, set(space.calls))]
    operators = {
        choice.call.key: choice.cover.operators for choice in space.choices if len(choice.cover.operators) == 1
    }
    without = next(call for call in first if call.subgraph.kinds != ("contraction",))
    working = {call.key for call in first} - {without.key}
    left = set(space.calls) - working
    again = [race[0].key for race in openers(space, left, working)]
    assert without.key in {race[0].key for race in openers(space, left)}
    assert without.key not in again
    assert operators[without.key] not in {operators[key] for key in again}
    products = {call.key for call in first if call.subgraph.kinds == ("contraction",)}
    assert products <= {race[0].key for race in openers(space, set(space.calls), working - products)}


def test_what_another_run_stores_meanwhile_is_not_measured(small: Model, tmp_path: Path) -> None:
    known = slower(small)
    with open_database(tmp_path / "shared.sqlite") as database:
        database.remember(HERE)
        first = [race[0] for race in openers(space_of(small), set(known))]
        theirs = first[-1]
        asking = Asking(known, ceilings=TWENTY)

        def watch(progress: Progress) -> None:
            if progress.stage == "measure" and progress.done == 1:
                database.store(HERE.key, [(theirs, known[theirs.key])])

        found = tune(small, CPU, database, asking, watch=watch)
        assert theirs.key not in asking.asked
        assert found.counts["reused"] == 1
        assert found.certificate.proven_gap == 0.0


def test_an_interrupted_run_keeps_its_results(small: Model, database: Database) -> None:
    known = slower(small)
    interrupted = Asking(known, stop_after=5, ceilings=TWENTY)
    with pytest.raises(KeyboardInterrupt):
        tune(small, CPU, database, interrupted)
    assert sorted(database.find(HERE.key, tuple(known))) == sorted(interrupted.answered)
    rest = Asking(known, ceilings=TWENTY)
    found = tune(small, CPU, database, rest)
    assert not set(rest.asked) & set(interrupted.answered)
    assert found.counts["reused"] == 5


@pytest.mark.slow
def test_a_run_that_goes_on_measures_as_the_interrupted_one_would_have(small: Model, database: Database) -> None:
    """Whatever it would decide now, and also where another model has left ceilings."""
    known = slower(small)
    stopped = Asking(known, stop_after=1 + len(space_of(small).graph.operators), ceilings=TWENTY)
    with pytest.raises(KeyboardInterrupt):
        tune(small, CPU, database, stopped, policy=PATIENT)
    for name, us in TWENTY.to_facts().items():
        database.set_fact(HERE.key, name, us)
    found = tune(small, CPU, database, Asking(known, ceilings=TWENTY))
    assert found.counts["unknown"] == 0


def test_the_first_batch_is_chosen_with_ceilings(small: Model, database: Database) -> None:
    seen: list[Progress] = []
    tune(small, CPU, database, Asking(slower(small), ceilings=TWENTY), watch=seen.append)
    alone = len(space_of(small).graph.operators)
    bound_us = next(p.bound_us for p in seen if p.stage == "measure" and p.done > alone)
    assert bound_us is not None
    assert bound_us > 0, "without ceilings, what is not measured may cost nothing"
