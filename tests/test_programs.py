"""A model file with an expression and a program between products, tuned and trained on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autotuner
from autotuner.database import open_database
from autotuner.errors import ModelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, load_model
from autotuner.space import build_space, load_space
from autotuner.tuner import TuningPolicy
from tests.kernels.calls import faults
from tests.made_up import times, without_compilers
from tests.programs import expression, written
from tests.tuner.asking import Asking, tune

pytestmark = pytest.mark.slow

EXTENTS = {"b": 2, "l": 6, "h": 8, "f": 12}
CAPPED = [("div.Tensor", ["%0", 5.0]), ("tanh.default", ["%3"]), ("mul.Tensor", ["%4", 5.0]),
          ("add.Tensor", ["%1", 1.0]), ("mul.Tensor", ["%5", "%6"]), ("add.Tensor", ["%7", "%2"])]  # fmt: skip
MIXED = [("roll.default", ["%0", [1], [1]]), ("cumsum.default", ["%1", 1]), ("split.Tensor", ["%2", 6, 2]),
         ("getitem", ["%3", 0]), ("getitem", ["%3", 1]), ("silu.default", ["%4"]),
         ("mul.Tensor", ["%6", "%5"])]  # fmt: skip


def model(folder: Path, dtype: str) -> Model:
    """Return a model of a gated feed-forward whose activation, cap, scale and shift no kind knows."""
    shape = [EXTENTS[axis] for axis in "bl"]
    capped = expression(CAPPED, dtype, dtype, dtype)
    mixed = written(MIXED, [[dtype, [*shape, 12], True]], [dtype, [*shape, 6]])
    definition = {
        "version": 1, "name": "capped", "dtype": dtype, "outputs": ["y"],
        "axes": {"b": "batch", "l": "position", "h": "hidden", "f": "wide", "g": "gated"},
        "presets": {"tiny": EXTENTS | {"g": 6}},
        "inputs": {"x": {"axes": "blh"}},
        "parameters": {"up": "fh", "scale": "f", "shift": "f", "down": "hg"},
        "operators": [
            {"name": "wide", "kind": "contraction", "spec": "blh,fh->blf", "inputs": ["x", "up"], "outputs": ["wide"]},
            {"name": "capped", "kind": "pointwise", "spec": "blf,f,f->blf", "inputs": ["wide", "scale", "shift"],
             "outputs": ["capped"], "attributes": {"program": capped}},
            {"name": "mixed", "kind": "program", "spec": "blf->blg", "inputs": ["capped"], "outputs": ["mixed"],
             "attributes": {"program": mixed}},
            {"name": "y", "kind": "contraction", "spec": "blg,hg->blh", "inputs": ["mixed", "down"], "outputs": ["y"]},
        ],
    }  # fmt: skip
    path = folder / "capped.yaml"
    path.write_text(json.dumps(definition))
    return load_model(str(path)).instantiate("tiny")


def eager(x: Tensor, known: dict[str, Tensor]) -> Tensor:
    wide = torch.tanh(x @ known["up"].T / 5.0) * 5.0 * (1 + known["scale"]) + known["shift"]
    first, second = wide.roll(1, 1).cumsum(1).tensor_split(2, 2)
    gated: Tensor = torch.nn.functional.silu(first) * second @ known["down"].T
    return gated


def test_a_model_with_programs_is_tuned_and_trains_as_float64_does(tmp_path: Path) -> None:
    """With made-up times; every candidate is verified, and the training step runs for real."""
    of, file = model(tmp_path, "float32"), load_space(without_compilers(tmp_path))
    calls = build_space(training_graph(of.graph()), file).calls
    assert faults(list(calls.values())) == {}
    with open_database(tmp_path / "tuned.sqlite") as database:
        found = tune(of, file, database, Asking(times(calls)), policy=TuningPolicy(explaining_s=0.1))
    kernels = {operator: step.kernel for step in found.steps for operator in step.operators}
    assert {"capped", "mixed"} <= kernels.keys()
    module: Any = autotuner.module(found)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float32)
    before = autotuner.summary().calls
    y = module(x.requires_grad_())
    torch.autograd.backward([y.square().sum()])
    assert autotuner.summary().calls == before + 1
    wide = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    x_wide = x.detach().double().requires_grad_()
    expected = eager(x_wide, wide)
    torch.autograd.backward([expected.square().sum()])
    assert x.grad is not None
    assert x_wide.grad is not None
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"y": (y, expected), "x": (x.grad, x_wide.grad)}
    pairs |= {name: (p.grad, wide[name].grad) for name, p in module.named_parameters()}
    assert len(pairs) == 6
    for name, (made, wanted) in pairs.items():
        assert made is not None
        assert wanted is not None
        torch.testing.assert_close(made.detach().double(), wanted.detach(), rtol=1e-4, atol=1e-3, msg=name)


def test_extents_that_do_not_fit_a_program_are_refused(tmp_path: Path) -> None:
    model(tmp_path, "float32")
    said = "operator 'mixed': 'capped' has 288 elements along 'blf'; its program wants 144, as"
    with pytest.raises(ModelError, match=said):
        load_model(str(tmp_path / "capped.yaml")).instantiate("tiny", extents={"b": 4})
