"""What was measured for each step's work: best, worst, default, failed and unknown."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotuner.errors import ConfigurationError
from autotuner.ir.models import Model, load_model
from autotuner.ir.records import Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.report import Failure, StepComparison, compare, tally
from autotuner.space import Space
from autotuner.tuner import build_configuration
from tests.made_up import HERE, LINEAR, space_of, times
from tests.tuner.conftest import Recorded


@pytest.fixture(scope="module")
def space(small: Model) -> Space:
    return space_of(small)


@pytest.fixture(scope="module")
def found(small: Model, space: Space) -> Configuration:
    return build_configuration(small, space, times(space.calls), HERE, {})


def keys_of(space: Space, row: StepComparison) -> set[str]:
    """Return the calls that compute what a row's step computes."""
    return {choice.call.key for choice in space.choices if set(choice.cover.operators) == set(row.operators)}


def rows_of_steps(rows: tuple[StepComparison, ...]) -> Iterator[StepComparison]:
    yield from (row for row in rows if row.operators)


def test_rows_stand_in_the_order_of_the_steps(space: Space, found: Configuration) -> None:
    rows = compare(space, times(space.calls), found)
    assert [(row.operators, row.chosen_us) for row in rows] == [(s.operators, s.predicted_us) for s in found.steps]


def test_best_and_worst_are_those_of_the_same_operators(space: Space, found: Configuration) -> None:
    known = times(space.calls)
    for row in rows_of_steps(compare(space, known, found)):
        own = [known[key].median_us or 0.0 for key in keys_of(space, row)]
        assert row.best is not None
        assert row.worst is not None
        assert (row.best.us, row.worst.us) == (min(own), max(own))
        assert (row.candidates, row.measured, row.unknown, row.failures) == (len(own), len(own), 0, ())


@pytest.mark.slow
def test_on_what_was_recorded_the_best_is_the_steps_bound_and_defaults_add_up(
    recorded: Recorded, encoder: Configuration
) -> None:
    rows = compare(recorded.space, recorded.measurements, encoder)
    for row, step in zip(rows, encoder.steps, strict=True):
        assert row.best is not None
        assert row.worst is not None
        assert row.best.us <= row.chosen_us <= row.worst.us
        if step.operators:
            assert row.best.us == step.bound_us
            assert row.default_us is not None
        else:
            assert row.default_us is None
            assert {name for name, _ in row.best.forms} == {step.inputs[0][0]}
    defaults = sum(row.default_us or 0.0 for row in rows)
    assert defaults == pytest.approx(encoder.certificate.default_us)
    assert any(not row.operators for row in rows), "the recorded configuration converts nothing"


def test_what_was_never_measured_is_unknown_and_neither_best_nor_worst(space: Space, found: Configuration) -> None:
    known = times(space.calls)
    before = {row.label: row for row in compare(space, known, found)}
    row = max(before.values(), key=lambda row: row.candidates)
    assert row.candidates > 2
    assert row.best is not None
    assert row.worst is not None
    ends = {key for key in keys_of(space, row) if known[key].median_us in (row.best.us, row.worst.us)}
    after = next(
        r for r in compare(space, {k: m for k, m in known.items() if k not in ends}, found) if r.label == row.label
    )
    assert (after.unknown, after.candidates) == (len(ends), row.candidates)
    assert after.best is not None
    assert after.worst is not None
    assert row.best.us < after.best.us <= after.worst.us < row.worst.us


def test_without_any_measurement_everything_is_unknown(space: Space, found: Configuration) -> None:
    for row in compare(space, {}, found):
        assert (row.best, row.worst, row.default_us, row.measured) == (None, None, None, 0)
        assert row.unknown == row.candidates > 0
    assert tally(space, {}) == {"unknown": len(space.calls)}


def test_failures_are_told_apart_by_status_and_sentence(space: Space, found: Configuration) -> None:
    known = times(space.calls)
    row = max(compare(space, known, found), key=lambda row: row.candidates)
    first, second, third, *_ = sorted(keys_of(space, row), key=lambda key: space.calls[key].candidate.kernel)
    known[first] = known[second] = Measurement("wrong", message="output 0 differs")
    known[third] = Measurement("timeout", message="no result after 30 s")
    after = next(r for r in compare(space, known, found) if r.label == row.label)
    assert after.failed == {"wrong": 2, "timeout": 1}
    kernel = space.calls[third].candidate.kernel
    assert Failure(kernel, "timeout", "no result after 30 s", 1) in after.failures
    assert (after.measured, after.unknown) == (row.measured - 3, 0)
    counts = {"ok": len(space.calls) - 3, "wrong": 2, "timeout": 1, "unknown": 0}
    assert tally(space, known) == counts


def test_the_default_is_not_known_where_one_of_the_operators_has_no_time_as_declared(
    space: Space, found: Configuration
) -> None:
    known = times(space.calls)
    alone = {choice.call.key for choice in space.choices if choice.cover.operators == ("product",)}
    rows = compare(space, {key: m for key, m in known.items() if key not in alone}, found)
    assert {row.default_us is None for row in rows if "product" in row.operators} == {True}
    assert {row.default_us is None for row in rows_of_steps(rows) if "product" not in row.operators} == {False}


def test_a_space_of_another_graph_is_refused(found: Configuration, tmp_path: Path) -> None:
    (tmp_path / "linear.yaml").write_text(LINEAR)
    other = space_of(load_model(str(tmp_path / "linear.yaml")).instantiate(None, {"b": 6, "h": 8, "f": 12}))
    with pytest.raises(ConfigurationError, match="build the space from the configuration's own graph"):
        compare(other, {}, found)
