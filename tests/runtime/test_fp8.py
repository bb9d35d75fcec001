"""Products in 8-bit floats: what a plan with them computes, and that it is only run where it is allowed."""

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import autotuner
from autotuner.api.backend import COMPILED
from autotuner.errors import InputError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.numerics import CLASSES, Numerics
from autotuner.ir.records import canonical_json
from autotuner.kernels import KERNELS
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import explain_plan
from autotuner.plan.request import Request
from autotuner.runtime import check
from autotuner.runtime.check import TOLERANCES
from autotuner.settings import TuneOptions
from autotuner.space import build_space
from autotuner.tuner import build_configuration
from autotuner.tuner.tuning import request_key
from tests.made_up import CPU, HERE, UNEXPLAINED, times
from tests.runtime.plans import WITH_DROPOUT, model
from tests.runtime.test_step_budget import Layers, Leaner, batch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_garbage")]

LAYER = {"b": 4, "l": 64, "h": 64, "n": 2, "p": 32, "f": 256}
COMPILED_US, FP8_US = 5000.0, 0.01


def tuned(of: Model, numerics: Numerics) -> Configuration:
    """Return a model's plan by made-up times; products in 8-bit floats take least, and what is compiled most."""
    space = build_space(training_graph(of.graph()), CPU, numerics=numerics)
    known = times(space.calls)
    for key, call in space.calls.items():
        kernel = KERNELS[call.candidate.kernel]
        if kernel.needs == "fp8" or kernel.name.startswith("inductor"):
            us = FP8_US if kernel.needs == "fp8" else COMPILED_US
            known[key] = replace(known[key], median_us=us)
    return build_configuration(of, space, known, HERE, {}, policy=UNEXPLAINED, numerics=numerics)


@cache
def encoder() -> Configuration:
    return tuned(model(LAYER, dtype="bfloat16", p=WITH_DROPOUT), "fp8")


def test_products_with_weights_are_made_in_8_bit_floats_and_gradients_of_weights_are_not() -> None:
    found = encoder()
    graph = found.graph()
    made = {graph.producers[name].name for name in found.inexact["fp8"]}
    assert len(made) >= 8
    products = {o.name for o in graph.operators if o.kind == "contraction" and any(map(graph.is_weight, o.inputs))}
    inside = {name for step in found.steps if step.inexact for name in step.operators}
    assert products & inside == {o.name for o in graph.operators if o.kind == "contraction" and o.name in inside}
    read = Configuration.from_json(found.to_json())
    assert (read.numerics, read.inexact, read.key) == ("fp8", found.inexact, found.key)


def test_a_step_errs_by_a_few_hundredths() -> None:
    report = check(encoder())
    assert report.ok, report.worst
    assert 5e-3 < report.errors["y"] < 0.05
    assert TOLERANCES["bfloat16"] < report.worst[1] < 0.1 < CLASSES["fp8"].tolerance
    assert report.own_bounds
    assert all("the plan multiplies in 8-bit floats, where it may be off by" in each for each in report.reasons)


def test_a_plan_tells_what_it_computes_in_8_bit_floats() -> None:
    (words,) = [each for each in explain_plan(encoder()).words if "8-bit floats" in each]
    assert words.startswith(f"{encoder().inexact['fp8'][0]}, ")
    assert "are computed from operands in 8-bit floats, which was allowed" in words


def test_without_it_plans_and_their_keys_are_as_before() -> None:
    of = model(LAYER, dtype="bfloat16", p=WITH_DROPOUT)
    without = CPU.model_copy(update={"kernels": {n: e for n, e in CPU.kernels.items() if KERNELS[n].needs != "fp8"}})
    exact = Request(of, "cpu", options=TuneOptions())
    assert request_key(exact, CPU) == request_key(exact, without)
    allowed = Request(of, "cpu", options=TuneOptions(numerics="fp8"))
    assert request_key(allowed, CPU) not in (request_key(allowed, without), request_key(exact, CPU))
    assert not tuned(of, "exact").inexact
    assert not tuned(of, "8-bit").inexact


class Fp8(Leaner):
    """Knows every model, by products in 8-bit floats."""

    made: ClassVar[dict[str, Configuration]] = {}

    def _of(self, model: Model) -> Configuration:
        key = canonical_json(model.to_json())
        if key not in self.made:
            self.made[key] = tuned(model, "fp8")
        return self.made[key]


def loss_of(model: Any, x: Tensor) -> Tensor:
    return functional.mse_loss(model(x).float(), x.float().roll(1, 1))


def losses(**options: Any) -> list[float]:
    """Return the losses of some steps in bfloat16; each of what was compiled is in `COMPILED`."""
    torch._dynamo.reset()
    net = Layers().bfloat16()
    step = autotuner.training_step(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3), loss_of, compiler="eager", watch=None, **options
    )  # fmt: skip
    return [float(step(batch(number).bfloat16())) for number in range(4)]


def test_a_plan_in_8_bit_floats_runs_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Fp8())
    wanted = losses()
    (plan,) = Fp8.made.values()
    assert COMPILED[-1].tuned == frozenset()
    told = 'from operands in 8-bit floats: numerics="fp8" allows that'
    assert f"is left out: its plan computes {plan.inexact['fp8'][0]}, " in COMPILED[-1].note
    assert told in COMPILED[-1].note
    losses(numerics="8-bit")
    assert told in COMPILED[-1].note
    found = losses(numerics="fp8")
    assert COMPILED[-1].tuned
    assert found != wanted
    assert found == pytest.approx(wanted, rel=0.02)
    assert found[-1] < found[0]
    with pytest.raises(InputError, match="numerics is 'float8': write exact, 8-bit or fp8"):
        losses(numerics="float8")
