"""Tuning state: the best so far, the bound, and the stop rule."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autotuner.checkpoint import checkpoint
from autotuner.database import Database
from autotuner.errors import InfeasibleError, InputError
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.plan.request import Request
from autotuner.settings import Limits, TuneOptions
from autotuner.tuner import Progress, TuningPolicy, state
from autotuner.tuner.state import TuningState
from tests.made_up import CPU, space_of, times
from tests.tuner import asking
from tests.tuner.asking import Asking

ALWAYS_SOLVING = TuningPolicy(solve_after_s=0.0, solve_share=float("inf"))
"""Solves after every race, as if much time had passed."""

tune = partial(asking.tune, policy=ALWAYS_SOLVING)


def progress_of(model: Model, database: Database, measurer: Asking | None = None, **asked: Any) -> list[Progress]:
    seen: list[Progress] = []
    tune(model, CPU, database, measurer or Asking(times(space_of(model).calls)), watch=seen.append, **asked)
    return seen


@pytest.mark.slow
def test_the_best_so_far_falls_and_the_bound_rises_until_they_meet(small: Model, database: Database) -> None:
    seen = [progress for progress in progress_of(small, database) if progress.stage == "measure"]
    best = [p.best_us for p in seen if p.best_us is not None]
    bounds = [p.bound_us for p in seen if p.bound_us is not None]
    assert len(best) > 3
    assert best == sorted(best, reverse=True)
    assert bounds == sorted(bounds)
    assert all(p.bound_us <= p.best_us for p in seen if p.best_us is not None and p.bound_us is not None)


@pytest.mark.slow
def test_there_is_a_plan_after_one_call_for_each_operator(small: Model, database: Database) -> None:
    operators = len(space_of(small).graph.operators)
    seen = [progress for progress in progress_of(small, database) if progress.stage == "measure"]
    assert next(p.done for p in seen if p.best_us is not None) == operators + 1


def test_when_all_is_measured_the_gap_is_proven_to_be_none(small: Model) -> None:
    space = space_of(small)
    state = TuningState(space, lambda _: None, TuneOptions(gap=0.0))
    assert not state.enough()
    state.solve(times(space.calls), now=True)
    assert state.best_us == pytest.approx(state.bound_us)
    assert state.enough()


@pytest.mark.slow
def test_a_limit_of_measurements_ends_with_a_plan_and_a_later_run_measures_the_rest(
    small: Model, database: Database
) -> None:
    known = times(space_of(small).calls)
    first, second = Asking(known), Asking(known)
    operators = len(space_of(small).graph.operators)
    partial = tune(small, CPU, database, first, limits=Limits(measurements=operators + 2))
    assert partial.counts["measured"] < partial.counts["calls"]
    assert partial.counts["unknown"] == partial.counts["calls"] - partial.counts["measured"] > 0
    whole = tune(small, CPU, database, second)
    assert sorted(first.asked + second.asked) == sorted(known)
    assert whole.certificate.predicted_us <= partial.certificate.predicted_us


def test_a_partial_answer_is_not_taken_for_a_whole_one(small: Model, database: Database) -> None:
    limits = Limits(measurements=len(space_of(small).graph.operators) + 2)
    seen = progress_of(small, database, limits=limits)
    again = progress_of(small, database, limits=limits)
    assert "measure" in {progress.stage for progress in again}
    assert again[-1].reused == seen[-1].measured


def test_a_limit_that_ends_before_there_is_a_plan_says_so(small: Model, database: Database) -> None:
    """Which takes an opening that was given up as well."""
    with pytest.raises(InfeasibleError, match=r"limits of the job were reached before there was a plan.*higher limits"):
        progress_of(small, database, limits=Limits(measurements=1), policy=replace(ALWAYS_SOLVING, opening_s=-1.0))


@pytest.mark.slow
@pytest.mark.parametrize("call_s", [0.2, 1e3])
def test_a_limit_of_seconds_holds_with_a_stated_slack_where_no_plan_can_be_had_in_time(
    small: Model, database: Database, call_s: float
) -> None:
    """A first plan may take a minute more than the limit, here half a second; a call in hand is given up then."""

    class Slow(Asking):
        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
            for call, measurement in super().measure(races):
                end = time.monotonic() + call_s
                while time.monotonic() < end:
                    checkpoint()
                    time.sleep(0.01)
                yield call, measurement

    measurer = Slow(times(space_of(small).calls))
    began = time.monotonic()
    with pytest.raises(InfeasibleError, match=r"limits of the job were reached before there was a plan.*higher limits"):
        tune(small, CPU, database, measurer, limits=Limits(seconds=0.1), policy=TuningPolicy(slack_s=0.5))
    assert time.monotonic() - began < 20.0, "the operators together would take longer, or for ever"
    kept = sum(database.statistics().statuses.values())
    assert kept == len(measurer.answered) - 1 < len(space_of(small).graph.operators)


@pytest.mark.slow
def test_a_limit_of_seconds_ends_compiling_first_and_nothing_uncompiled_is_timed(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that each compilation moves on by ten seconds."""
    now = [0.0]
    monkeypatch.setattr(state, "monotonic", lambda: now[0])

    class Compiling(Asking):
        def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
            for call in calls:
                now[0] += 10.0
                self.compiled.append(call.key)
                yield call, None

    calls = space_of(small).calls
    compiling = {key for key, call in calls.items() if KERNELS[call.candidate.kernel].compiles}
    measurer = Compiling(times(calls))
    found = tune(small, CPU, database, measurer, limits=Limits(seconds=15.0))
    assert len(compiling) == 2
    assert len(measurer.compiled) == 1
    assert set(measurer.asked) == set(calls) - compiling | set(measurer.compiled)
    assert found.counts["unknown"] == 1


@pytest.mark.slow
def test_a_gap_ends_the_run_as_soon_as_it_is_proven(small: Model, database: Database) -> None:
    known: Mapping[str, Measurement] = times(space_of(small).calls)
    patient, hasty = Asking(known), Asking(known)
    tune(small, CPU, database, hasty, gap=1e6)
    assert len(hasty.asked) < len(known)
    tune(small, CPU, database, patient, gap=0.0)
    assert sorted(hasty.asked + patient.asked) == sorted(known)


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"seconds": float("nan")}, {"measurements": 0}])
def test_limits_that_allow_nothing_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InputError, match="give a number above 0, or none"):
        Limits(**limits)  # type: ignore[arg-type]


def test_a_request_comes_back_from_json_as_it_was(small: Model) -> None:
    options = TuneOptions(gap=0.05, budget_bytes=1000, exhaustive=True, limits=Limits(seconds=3.5), retry=True)
    request = Request(small, device_name="a cpu", options=options)
    assert Request.from_json(request.to_json()) == request
    with pytest.raises(InputError, match="a request has the keys again, budget_bytes, device_name"):
        Request.from_json({"model": small.to_json()})
    with pytest.raises(InputError, match="gap is -1: give a share of 0 or more"):
        Request(small, options=TuneOptions(gap=-1))


class Clocked(Asking):
    """A measurer whose calls take a second each, and three to compile, by a clock of its own."""

    now_s = 0.0

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        for each in super().prepare(calls):
            self.now_s += 3.0
            yield each

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for each in super().measure(races):
            self.now_s += 1.0
            yield each


def clocked(small: Model, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """Return a measurer of all calls of a model, whose clock is that of the tuning state too."""
    measurer = Clocked(times(space_of(small).calls))
    monkeypatch.setattr(state, "monotonic", lambda: measurer.now_s)
    return measurer


@pytest.mark.slow
def test_the_time_left_is_that_of_all_stages_whose_calls_are_known(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer = clocked(small, monkeypatch)
    told: list[tuple[float, Progress]] = []
    tune(small, CPU, database, measurer, watch=lambda progress: told.append((measurer.now_s, progress)))
    ended_s = next(at_s for at_s, progress in told if progress.stage == "solve")
    operators = len(space_of(small).graph.operators)
    measuring = [(at_s, p) for at_s, p in told if p.stage == "measure" and p.done]
    assert len(measuring) == len(space_of(small).calls)
    for at_s, progress in measuring:
        assert progress.eta_s == pytest.approx(progress.total - progress.done)
        assert progress.eta_s is not None
        assert progress.left_s == pytest.approx(progress.eta_s + operators)
        assert progress.left_s is not None
        assert 0 <= progress.left_s - (ended_s - at_s) < operators, "fewer calls are chosen than there are operators"
    confirming = [(at_s, p) for at_s, p in told if p.stage == "confirm"]
    assert [p.left_s for _, p in confirming[1:]] == [p.eta_s for _, p in confirming[1:]]
    assert {p.left_s for _, p in told if p.stage == "compile"} == {None}, "nothing says yet how long calls take"


@pytest.mark.slow
def test_the_time_left_is_no_more_than_the_limit(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer = clocked(small, monkeypatch)
    seen: list[Progress] = []
    limits = Limits(seconds=40.0)
    assert len(space_of(small).calls) > 40
    tune(small, CPU, database, measurer, watch=seen.append, limits=limits, exhaustive=True)
    told = [progress for progress in seen if progress.stage == "measure" and progress.left_s is not None]
    assert told
    assert all(progress.left_s <= 40.0 - progress.spent_s for progress in told if progress.left_s)


@pytest.mark.slow
def test_the_time_left_is_not_told_where_each_solution_may_end_the_run(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends at a gap, and one that asks after each solution what matters yet."""
    measurer = clocked(small, monkeypatch)
    seen: list[Progress] = []
    tune(small, CPU, database, measurer, watch=seen.append, estimated_gap=0.0, exhaustive=False)
    measuring = [progress for progress in seen if progress.stage == "measure"]
    assert any(progress.eta_s for progress in measuring)
    assert all(progress.left_s is None for progress in measuring)


@pytest.mark.slow
def test_the_costliest_calls_are_those_of_the_best_plan_so_far(small: Model, database: Database) -> None:
    seen: list[Progress] = []
    found = tune(small, CPU, database, Asking(times(space_of(small).calls)), watch=seen.append)
    for progress in seen:
        assert bool(progress.costliest) == (progress.best_us is not None)
        took = [call.predicted_us for call in progress.costliest]
        assert (len(took), took) == (min(len(took), 5), sorted(took, reverse=True))
        assert sum(took) <= (progress.best_us or 0.0) + 1e-6
        assert all(
            call.share == pytest.approx(call.predicted_us / (progress.best_us or 1.0)) for call in progress.costliest
        )
    steps = sorted(found.steps, key=lambda step: -step.predicted_us)
    assert seen[-1].stage == "done"
    assert [(call.operators, call.kernel, call.outputs, call.predicted_us) for call in seen[-1].costliest] == [
        (step.operators, step.kernel, step.outputs, step.predicted_us) for step in steps[:5]
    ]


def test_what_kernels_refuse_is_counted_among_what_failed(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    spare = sorted(known)[::9]
    known |= {key: Measurement("refused", message="too long a row") for key in spare[::2]}
    known |= {key: Measurement("crashed", message="signal 11") for key in spare[1::2]}
    last = progress_of(small, database, Asking(known))[-1]
    asked = len(spare[::2]), len(spare)
    assert (last.refused, last.failed) == asked
    assert 0 < last.refused < last.failed


def test_the_time_left_of_a_stage_is_no_more_than_the_limit(small: Model) -> None:
    seen: list[Progress] = []
    told = TuningState(space_of(small), seen.append, TuneOptions(limits=Limits(seconds=5.0)))
    told.tell(Progress("measure", 0, 10**9))
    told.tell(Progress("measure", 1, 10**9))
    assert seen[-1].eta_s is not None
    assert seen[-1].eta_s <= 5.0
