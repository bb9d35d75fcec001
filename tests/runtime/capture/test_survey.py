"""Regions over many batches: which shapes occur, how often, and what is tuned of them."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

import autotuner
from autotuner.api import survey, tuning
from autotuner.errors import InputError, TunedWarning
from autotuner.plan.request import Request
from autotuner.settings import Settings
from tests.runtime.capture.known import planned
from tests.runtime.capture.test_backend import blocks, inputs, stored

pytestmark = pytest.mark.slow


def test_shapes_are_counted_and_the_most_work_comes_first(tmp_path: Path) -> None:
    model = blocks(3)
    stored(model, inputs(2, 3), tmp_path / "known.sqlite")
    report = autotuner.regions(
        model, [inputs(2, 3), [inputs(4, 7)], {"input": inputs(2, 3)}], database=tmp_path / "known.sqlite"
    )
    assert report.batches == 3
    assert [(each.runs, each.known is not None) for each in report.regions] == [(3, False), (6, True)]
    first, *lines = str(report).splitlines()
    assert first == "3 batches, 2 regions that differ in kind, shape or mode"
    assert "70.0% of their flop       3 runs  not tuned" in lines[0]
    assert "30.0% of their flop       6 runs  tuned    " in lines[1]


def test_modes_are_told_apart(tmp_path: Path) -> None:
    model = blocks(2, p=0.5)
    found = autotuner.regions(model, [inputs(2, 3)], database=tmp_path / "known.sqlite").regions
    found += autotuner.regions(model.eval(), [inputs(2, 3)], database=tmp_path / "known.sqlite").regions
    assert len({each.model.name for each in found}) == 2


def test_many_shapes_leave_the_compiler_room_for_the_model(tmp_path: Path) -> None:
    model = blocks(2)
    autotuner.regions(model, [inputs(2, length) for length in range(2, 13)], database=tmp_path / "known.sqlite")
    stored(model, inputs(2, 3), tmp_path / "known.sqlite")
    compiled = autotuner.optimize(model, database=tmp_path / "known.sqlite", compiler="eager")
    compiled(inputs(2, 3)).sum().backward()
    assert "2 of 2 regions run tuned" in str(autotuner.summary())


def test_all_shapes_of_a_loader_are_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def tune_attended(request: Request, *_: Any, **__: Any) -> Any:
        asked.append(request)
        return planned(request.model)

    monkeypatch.setattr(tuning, "tune_attended", tune_attended)
    loader: DataLoader[Tensor] = DataLoader([inputs(2, 3)] * 2 + [inputs(2, 5)], batch_size=None)  # type: ignore[arg-type]
    found = autotuner.tune(blocks(2), batches=loader, database=tmp_path / "known.sqlite")
    assert len(found) == len(asked) == 2
    with pytest.raises(InputError, match="give one of the two"):
        autotuner.tune(blocks(2), [inputs(3)], batches=loader)  # type: ignore[call-overload]


class Reading:
    """A clock, and a measurer in the place of one of this host: reading takes 10 s, each tuning what is planned.

    `asked` has the limits of the tunings, `begun` whether the measuring process was begun when reading began.
    """

    waited_s = 0.0

    def __init__(self, takes_s: list[float], patch: pytest.MonkeyPatch) -> None:
        self.now, self.takes_s, self.asked, self.begun = 1000.0, takes_s, list[float | None](), False
        self.ended = 0
        patch.setattr(tuning, "monotonic", lambda: self.now)
        patch.setattr(tuning, "measurer_ahead", self.begin)
        patch.setattr(tuning, "tune_attended", self.tune_attended)
        read = survey.region_calls

        def slowly(*given: Any) -> Any:
            assert self.begun
            self.now += 10.0
            return read(*given)

        patch.setattr(survey, "region_calls", slowly)

    def begin(self, _device_type: str, _settings: Settings) -> "Reading":
        self.begun = True
        return self

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_error: object) -> None:
        self.ended += 1

    def tune_attended(self, request: Request, *_: Any, **__: Any) -> Any:
        self.asked.append(request.options.limits.seconds)
        self.now += self.takes_s[len(self.asked) - 1]
        return planned(request.model)


SHAPES = [inputs(2, 5), inputs(2, 4), inputs(2, 3)]


def test_a_limit_is_for_reading_and_for_all_regions_which_have_equal_parts_of_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Reading([20.0, 35.0, 35.0], monkeypatch)
    limits = autotuner.Limits(seconds=100.0)
    found = autotuner.tune(blocks(2), batches=SHAPES, database=tmp_path / "known.sqlite", limits=limits)
    assert len(found) == 3
    assert clock.asked == [30.0, 35.0, 35.0]
    assert clock.ended == 1


def test_a_region_has_half_a_minute_while_that_is_left_and_the_others_are_left_out_unless_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "known.sqlite"
    clock = Reading([33.0, 20.0], monkeypatch)
    with pytest.warns(TunedWarning, match="1 of the regions are not tuned: the limit of 55 s was reached"):
        found = autotuner.tune(blocks(2), batches=SHAPES, database=database, limits=autotuner.Limits(seconds=55.0))
    assert len(found) == 2
    assert clock.asked == [30.0, 12.0]
    stored(blocks(2), inputs(2, 3), database)
    Reading([45.0], monkeypatch)
    with pytest.warns(TunedWarning, match="1 of the regions"):
        found = autotuner.tune(blocks(2), batches=SHAPES, database=database, limits=autotuner.Limits(seconds=55.0))
    assert [dict(each.model.extents)["l"] for each in found] == [5, 3]


def test_the_first_region_is_tuned_however_long_reading_took_and_without_a_limit_none_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Reading([1.0], monkeypatch)
    autotuner.tune(blocks(2), [SHAPES[0]], database=tmp_path / "known.sqlite", limits=autotuner.Limits(seconds=5.0))
    assert clock.asked == [1.0]
    unlimited = Reading([1e6] * 3, monkeypatch)
    autotuner.tune(blocks(2), batches=SHAPES, database=tmp_path / "known.sqlite")
    assert unlimited.asked == [None] * 3


def test_waiting_for_the_device_is_no_part_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Reading([1060.0, 20.0, 10.0], monkeypatch)
    monkeypatch.setattr(Reading, "waited_s", property(lambda self: 1030.0 if len(self.asked) == 1 else 0.0))
    limits = autotuner.Limits(seconds=100.0)
    autotuner.tune(blocks(2), batches=SHAPES, database=tmp_path / "known.sqlite", limits=limits)
    assert clock.asked == [30.0, 30.0, 40.0]
