"""What was measured in a bad moment: said, and measured again by the next request. Made-up times."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autotuner import tuner
from autotuner.database import Database
from autotuner.errors import InfeasibleError
from autotuner.ir.models import Model
from autotuner.ir.records import NO_COMPILER, Call, Mark, Measurement
from autotuner.kernels import KERNELS
from autotuner.measure.roofline import Ladder, Roofline
from autotuner.plan.configuration import Configuration, load_configuration, save_configuration
from autotuner.plan.parts import Measured
from autotuner.plan.request import Request
from autotuner.settings import Limits, TuneOptions
from autotuner.tuner import request_key
from autotuner.tuner.doubts import outliers
from tests.made_up import CPU, HERE, space_of, times
from tests.tuner.asking import Asking, tune


def reasons(found: Configuration) -> list[str]:
    return [doubt.reason for doubt in found.doubts]


def compiling(small: Model) -> set[str]:
    return {key for key, call in space_of(small).calls.items() if KERNELS[call.candidate.kernel].compiles}


def marked(known: Mapping[str, Measurement], *marks: Mark) -> dict[str, Measurement]:
    return {key: replace(measurement, marks=marks) for key, measurement in known.items()}


class Unbuilt(Asking):
    """Nothing that compiles can be built."""

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        yield from ((call, Measurement("error", message="Python.h: no such file")) for call in calls)


def test_where_nothing_compiled_can_be_built_the_answer_is_doubtful_and_the_next_request_builds(
    small: Model, database: Database
) -> None:
    known = times(space_of(small).calls)
    first = tune(small, CPU, database, Unbuilt(known))
    assert reasons(first) == ["no_compiler"]
    assert "Python.h: no such file" in first.doubts[0].sentence
    healthy = Asking(known)
    second = tune(small, CPU, database, healthy)
    assert set(healthy.asked) == compiling(small)
    assert not second.doubts
    silent = Asking({})
    assert not tune(small, CPU, database, silent).doubts
    assert silent.asked == []


def test_an_environment_without_a_compiler_says_so_in_every_answer(small: Model, database: Database) -> None:
    bare = replace(HERE, facts=(*HERE.facts, ("compiler", NO_COMPILER)))
    known = times(space_of(small).calls)
    assert reasons(tune(small, CPU, database, Unbuilt(known, bare))) == ["no_compiler"]
    again = Unbuilt(known, bare)
    assert reasons(tune(small, CPU, database, again)) == ["no_compiler"]


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["contended", "drifted"])
def test_what_was_measured_in_a_bad_moment_is_doubtful_and_measured_again_by_the_next_request(
    small: Model, database: Database, mark: Mark
) -> None:
    known = times(space_of(small).calls)
    busy = {key: replace(m, median_us=10 * (m.median_us or 0), marks=(mark,)) for key, m in known.items()}
    first = tune(small, CPU, database, Asking(busy))
    assert reasons(first) == [mark]
    quiet = Asking(known)
    second = tune(small, CPU, database, quiet)
    assert set(quiet.asked) == set(known)
    assert not second.doubts
    assert second.certificate.predicted_us == pytest.approx(first.certificate.predicted_us / 10)
    assert database.find(HERE.key, tuple(known)) == known
    silent = Asking({})
    tune(small, CPU, database, silent)
    assert silent.asked == []


def test_what_cannot_be_measured_again_keeps_what_was_known(small: Model, database: Database) -> None:
    busy = marked(times(space_of(small).calls), "contended")
    first = tune(small, CPU, database, Asking(busy))
    crashing = {key: Measurement("crashed", message="killed by SIGSEGV") for key in busy}
    again = tune(small, CPU, database, Asking(crashing))
    assert again.certificate.predicted_us == first.certificate.predicted_us
    assert database.find(HERE.key, tuple(busy)) == busy
    assert reasons(again) == ["contended"]


def test_one_interval_that_is_wider_than_half_of_the_plan_makes_it_doubtful(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    first = tune(small, CPU, database, Asking(known))
    step = min(first.steps, key=lambda step: step.predicted_us)
    key = step.measured_call(first.graph()).key
    elsewhere = replace(HERE, facts=(("threads", 5),))
    wide = known | {key: replace(known[key], low_us=0.0, high_us=first.certificate.predicted_us)}
    found = tune(small, CPU, database, Asking(wide, elsewhere))
    assert reasons(found) == ["wide"]
    assert "95 % intervals of 1 calls of the plan leave" in found.doubts[0].sentence


def test_a_plan_of_wide_intervals_is_doubtful(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    wide = {key: replace(m, low_us=m.median_us, high_us=3 * (m.median_us or 0)) for key, m in known.items()}
    assert reasons(tune(small, CPU, database, Asking(wide))) == ["wide"]
    narrow = {key: replace(m, low_us=m.median_us, high_us=1.1 * (m.median_us or 0)) for key, m in known.items()}
    assert not tune(small, CPU, database, Asking(narrow, replace(HERE, facts=(("threads", 4),)))).doubts


def test_a_plan_that_takes_six_times_what_was_predicted_is_doubtful_and_its_calls_are_measured_again(
    small: Model, database: Database
) -> None:
    known = times(space_of(small).calls)
    found = tune(small, CPU, database, Asking(known))
    predicted_us = found.certificate.predicted_us
    assert not found.with_measured(Measured(1.09 * predicted_us, 0.0, {}, 30)).doubts
    assert found.with_measured(Measured(1.12 * predicted_us, 0.0, {}, 30)).doubts
    timed = found.with_measured(Measured(6 * predicted_us, 0.0, {}, 30))
    assert reasons(timed) == ["end_to_end"]
    assert "-83%" in timed.doubts[0].sentence
    database.configurations.save(
        request_key=request_key(Request(small), CPU), environment_key=HERE.key, family_key=small.family,
        dtype=small.dtype, extents=small.extents, complete=False, document=timed.to_json(), total_us=predicted_us,
    )  # fmt: skip
    again = Asking(known)
    tune(small, CPU, database, again)
    assert set(again.asked) == {step.measured_call(found.graph()).key for step in found.steps}


def test_a_doubtful_answer_is_stored_as_not_complete(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    found = tuner.tune(Request(small), CPU, database, Asking(marked(known, "contended")))
    assert not found.complete
    assert not database.configurations.get(found.id).complete
    match = database.configurations.best(
        family_key=small.family, dtype=small.dtype, extents=small.extents, device_type="cpu", device_name=None
    )
    assert match.status == "doubtful"
    assert match.stored is not None
    assert "while other processes used the device" in match.stored.doubts[0]
    settled = tuner.tune(Request(small), CPU, database, Asking(known))
    assert settled.complete


def with_absurd(small: Model) -> tuple[str, dict[str, Measurement]]:
    """Return times of which one has a single sample and is absurd; calls of one kernel take about as long."""
    calls = space_of(small).calls
    known = {key: Measurement("ok", 100.0, samples_us=(100.0, 101.0, 99.0)) for key in calls}
    absurd = max(calls, key=lambda key: (calls[key].candidate.kernel == "torch_matmul", key))
    return absurd, known | {absurd: Measurement("ok", 30_000.0, samples_us=(30_000.0,))}


def test_a_single_absurd_sample_of_an_earlier_version_is_measured_again(small: Model, database: Database) -> None:
    absurd, known = with_absurd(small)
    database.remember(HERE)
    database.store(HERE.key, [(call, known[key]) for key, call in space_of(small).calls.items()])
    asking = Asking({absurd: Measurement("ok", 90.0, samples_us=(90.0, 91.0, 89.0))})
    tune(small, CPU, database, asking)
    assert asking.asked[0] == absurd
    assert set(asking.asked) == {absurd}
    assert database.find(HERE.key, [absurd])[absurd].median_us == 90.0


def test_what_took_far_longer_than_its_siblings_is_sampled_again_in_the_same_tuning(
    small: Model, database: Database
) -> None:
    absurd, known = with_absurd(small)

    class Stalled(Asking):
        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
            before = set(self.asked)
            for call, measurement in super().measure(races):
                late = call.key == absurd and call.key in before
                yield call, replace(measurement, median_us=100.0, samples_us=(100.0, 100.0)) if late else measurement

    tune(small, CPU, database, Stalled(known))
    assert database.find(HERE.key, [absurd])[absurd].median_us == 100.0


def test_an_outlier_is_far_above_calls_of_the_same_kernel_for_as_much_work(small: Model) -> None:
    absurd, known = with_absurd(small)
    calls = space_of(small).calls
    assert outliers(calls, known) == {absurd}
    assert outliers(calls, known | {absurd: Measurement("ok", 300.0, samples_us=(300.0,))}) == set()


def test_all_is_measured_anew_when_asked_and_replaces_what_was_known(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    tune(small, CPU, database, Asking(known))
    halved = {key: replace(m, median_us=(m.median_us or 0) / 2) for key, m in known.items()}
    asking = Asking(halved)
    found = tune(small, CPU, database, asking, remeasure=True)
    assert set(asking.asked) == set(known)
    assert found.counts["measured"] == len(known)
    assert database.find(HERE.key, tuple(known)) == halved


def test_a_request_that_an_earlier_version_stored_is_read(small: Model) -> None:
    value = Request(small).to_json()
    del value["remeasure"]
    assert Request.from_json(value) == Request(small)


def test_a_configuration_keeps_its_doubts_and_one_of_an_earlier_version_has_none(
    small: Model, database: Database, tmp_path: Path
) -> None:
    found = tune(small, CPU, database, Asking(marked(times(space_of(small).calls), "contended")))
    path = tmp_path / "found.json"
    save_configuration(found, path)
    assert load_configuration(path).doubts == found.doubts != ()
    value = found.to_json()
    del value["doubts"]
    assert Configuration.from_json(value).doubts == ()


# A plan in any case


@pytest.mark.parametrize("limits", [Limits(seconds=1e-9), Limits(measurements=1)])
def test_there_is_a_plan_however_tight_the_limits_are(small: Model, database: Database, limits: Limits) -> None:
    known = times(space_of(small).calls)
    asking = Asking(known)
    found = tune(small, CPU, database, asking, limits=limits)
    assert len(asking.asked) == len(found.graph().operators)
    assert not any(KERNELS[step.kernel].compiles or step.is_conversion for step in found.steps)
    assert asking.compiled == []


def test_the_plan_to_open_with_is_another_one_where_a_part_of_it_fails(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    first = Asking(known)
    tune(small, CPU, database, first, limits=Limits(seconds=1e-9))
    broken = {key: Measurement("crashed", message="killed by SIGSEGV") for key in first.asked}
    elsewhere = replace(HERE, facts=(("threads", 5),))
    found = tune(small, CPU, database, Asking(known | broken, elsewhere), limits=Limits(seconds=1e-9))
    graph = found.graph()
    assert not {step.call(graph).key for step in found.steps} & broken.keys()


def test_where_no_kernel_of_an_operator_works_the_error_says_so(small: Model, database: Database) -> None:
    known = {key: Measurement("crashed", message="killed by SIGSEGV") for key in space_of(small).calls}
    with pytest.raises(InfeasibleError, match="operator 'product'"):
        tune(small, CPU, database, Asking(known), limits=Limits(seconds=1e-9))


def test_waiting_for_the_device_does_not_count_against_the_limits_and_is_told(small: Model, database: Database) -> None:
    class Waiting(Asking):
        told: Callable[[str], None]

        def hear(self, tell: Callable[[str], None]) -> None:
            self.told = tell

        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
            self.waited_s += 1e6
            self.told("waiting for the device, held by process 17")
            self.told("")
            yield from super().measure(races)

    notes: list[str] = []
    known = times(space_of(small).calls)
    found = tune(
        small, CPU, database, Waiting(known), limits=Limits(seconds=1e5), watch=lambda told: notes.append(told.note)
    )
    assert found.counts["unknown"] == found.counts["unneeded"]
    assert "waiting for the device, held by process 17" in notes
    assert notes[-1] == ""


@pytest.mark.slow
def test_what_is_doubtful_and_was_not_measured_again_for_the_limits_is_left_to_a_later_request(
    small: Model, database: Database
) -> None:
    known = times(space_of(small).calls)
    tune(small, CPU, database, Asking(marked(known, "contended")))
    short = tuner.tune(Request(small, options=TuneOptions(limits=Limits(seconds=1e-9))), CPU, database, Asking(known))
    assert not short.complete
    assert short.configuration.counts["stale"] > 0
    rest = Asking(known)
    assert tuner.tune(Request(small), CPU, database, rest).complete
    assert rest.asked


def test_what_is_doubtful_and_proven_to_make_no_difference_does_not_keep_an_answer_doubtful(
    small: Model, database: Database
) -> None:
    known = times(space_of(small).calls)
    busy = {key: replace(m, median_us=100.0 + (m.median_us or 0), marks=("contended",)) for key, m in known.items()}
    tune(small, CPU, database, Asking(busy))
    twenty = Roofline(call_us=20.0, moved=Ladder(((1.0, 20.0),)))
    slower = {key: replace(m, median_us=20.0 + (m.median_us or 0)) for key, m in known.items()}
    for name, us in twenty.to_facts().items():
        database.set_fact(HERE.key, name, us)
    asking = Asking(slower, ceilings=twenty)
    found = tuner.tune(Request(small, options=TuneOptions(gap=0.0)), CPU, database, asking)
    assert len(asking.asked) < len(known)
    assert found.configuration.doubts == ()
    assert found.complete


def test_an_interrupted_tuning_goes_on_with_what_is_missing_before_it_doubts_what_it_has(
    small: Model, database: Database
) -> None:
    busy = marked(times(space_of(small).calls), "contended")
    first = Asking(busy, stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        tune(small, CPU, database, first)
    rest = Asking(busy)
    found = tune(small, CPU, database, rest)
    assert not set(rest.asked) & set(first.answered)
    assert reasons(found) == ["contended"]
