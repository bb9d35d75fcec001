"""Regions over many batches: which shapes occur, how often, and what is tuned of them."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

import autotuner
from autotuner.api import tuning
from autotuner.errors import InputError
from autotuner.plan.request import Request
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
