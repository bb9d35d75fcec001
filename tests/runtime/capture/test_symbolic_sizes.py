"""Models compiled with torch's default for `dynamic`: shapes that are known run tuned, whatever comes between."""

import gc
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotuner
from autotuner.api import backend
from autotuner.api.shapes import SHAPES
from autotuner.errors import TunedWarning
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.runtime.region_operator import _REGIONS
from tests.runtime.capture.known import Known, assert_equal, gradients, planned
from tests.runtime.capture.test_backend import blocks, inputs, loss_on, stored
from tests.runtime.capture.test_models import llama, loss_of

KNOWN, OTHER = (2, 3), (4, 5)
EXACT = 1e-12


class KnownLength(Known):
    """Knows models of one length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:  # noqa: ARG002
        return [planned(model) if model.extents.get("l") == self._length else None for model in models]


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    gc.collect()  # regions of other tests, which are not counted then
    monkeypatch.delenv("AUTOTUNER_SERVER", raising=False)


def tuned_calls() -> int:
    return sum(getattr(region, "calls", 0) for region in _REGIONS.values())


def check_step(model: nn.Module, compiled: Any, shape: tuple[int, int], tuned: int, tolerance: float = EXACT) -> None:
    """Check a training step on a shape, and how many regions of it ran tuned."""
    x = inputs(*shape).to(next(model.parameters()).dtype)
    wanted = gradients(model, loss_on(x))
    before = tuned_calls()
    assert_equal(gradients(model, loss_on(x), compiled), wanted, tolerance)
    assert tuned_calls() - before == tuned


@pytest.mark.slow
def test_a_tuned_shape_stays_tuned_behind_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNER_DATABASE", str(tmp_path / "known.sqlite"))
    model = blocks()
    stored(model, inputs(*KNOWN), tmp_path / "known.sqlite")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="autotuner")
    for shape, tuned in ((KNOWN, 2), (OTHER, 0), (KNOWN, 2), (KNOWN, 2), (OTHER, 0)):
        check_step(model, compiled, shape, tuned, 2e-6)
    said = str(autotuner.summary(model))
    assert said.count("2 of 2 regions run tuned") == 2
    assert "sizes are symbols in it; a shape that is known has a graph of its own" in said


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_each_shape_that_is_known_runs_tuned(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_knowledge", lambda _: KnownLength(3))
    model = blocks().double()
    compiled = torch.compile(model, backend="autotuner", options={"compiler": compiler})
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunedWarning)
        for shape in (KNOWN, OTHER, KNOWN, (5, 3), (5, 4), (5, 3), KNOWN):
            check_step(model, compiled, shape, 2 if shape[1] == 3 else 0)


@pytest.mark.slow
def test_shapes_beyond_a_number_of_them_run_untuned_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_knowledge", lambda _: KnownLength(3))
    model = blocks().double()
    compiled = torch.compile(model, backend="autotuner", options={"compiler": "eager"})
    for length in (4, *range(5, 5 + SHAPES)):
        check_step(model, compiled, (2, length), 0)
    with pytest.warns(TunedWarning, match="more than 8 shapes: those that come later run untuned.*dynamic=False"):
        check_step(model, compiled, KNOWN, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunedWarning)
        check_step(model, compiled, (2, 40), 0)


@pytest.mark.slow
def test_a_model_of_tokens_stays_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_knowledge", lambda _: Known())
    torch.manual_seed(0)
    model, arguments = llama()
    model = model.double()
    compiled = torch.compile(model, backend="autotuner", options={"compiler": "aot_eager"})
    for length in (12, 8, 12, 8):
        given = {name: each[:, :length] if torch.is_tensor(each) else each for name, each in arguments.items()}
        wanted, before = gradients(model, loss_of(given)), tuned_calls()
        assert_equal(gradients(model, loss_of(given), compiled), wanted, 1e-10)
        assert tuned_calls() - before == 2
