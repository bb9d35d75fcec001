"""Activations that are saved in 8 bits: what a plan with them computes, and that it is only run where it is allowed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch

from autotuner.api.backend import COMPILED, _allowed
from autotuner.errors import ConfigurationError, InputError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.formats import FORMATS
from autotuner.ir.models import Model
from autotuner.ir.numerics import CLASSES, Numerics
from autotuner.ir.records import canonical_json
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import explain_plan
from autotuner.plan.summary import needs
from autotuner.runtime import check
from autotuner.runtime.check import TOLERANCES
from autotuner.space import build_space
from autotuner.tuner import build_configuration
from tests.made_up import HERE, UNEXPLAINED, times
from tests.runtime.capture.known import FEW
from tests.runtime.plans import WITH_DROPOUT, model
from tests.runtime.test_step_budget import Layers, Leaner, needs_of, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_garbage")]

LAYER = {"b": 4, "l": 64, "h": 64, "n": 2, "p": 32, "f": 256}
LEANER = 0.8
"""Of the fastest plan's peak: a budget within which exact plans are slower."""


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.tuner.peak_search.CALLS", (4, 4))  # not the best plans, any that fit


def tuned(of: Model, numerics: Numerics, budget_bytes: int | None = None) -> Configuration:
    """Return a model's plan by made-up times; conversions to 8 bits and back take least."""
    space = build_space(training_graph(of.graph()), FEW, saving=budget_bytes is not None, numerics=numerics)
    return build_configuration(
        of, space, times(space.calls), HERE, {}, policy=UNEXPLAINED, budget_bytes=budget_bytes, numerics=numerics
    )


@cache
def under(share: float, dtype: str = "float64") -> Configuration:
    """Return the plan of an encoder layer with dropout under a budget, with 8 bits allowed."""
    of = model(LAYER, dtype=dtype, p=WITH_DROPOUT)
    memory = tuned(of, "exact").memory
    assert memory is not None
    return tuned(of, "8-bit", int(share * memory.peak_bytes))


def test_within_a_budget_8_bits_are_taken_where_exact_plans_are_slower() -> None:
    found = under(LEANER)
    assert found.memory is not None
    assert found.memory.budget_bytes is not None
    exact = tuned(found.model, "exact", found.memory.budget_bytes)
    assert found.certificate.predicted_us < exact.certificate.predicted_us
    assert found.inexact.keys() == {"8-bit"}
    assert found.memory.peak_bytes <= found.memory.budget_bytes
    graph = found.graph()
    for step in found.steps:
        for name, form in step.outputs:
            if form.endswith(":int8"):
                assert step.is_conversion
                assert graph.producers[name].phase == "forward"
    read = Configuration.from_json(found.to_json())
    assert (read.numerics, read.inexact, read.key) == ("8-bit", found.inexact, found.key)


def test_outputs_are_exact_and_gradients_off_by_less_than_a_hundredth() -> None:
    found = under(LEANER)
    report = check(found)
    assert report.ok, report.worst
    assert report.errors["y"] < TOLERANCES["float64"]
    beyond = {name: error for name, error in report.errors.items() if error > TOLERANCES["float64"]}
    assert {"x", "linear1.weight"} <= beyond.keys() == report.own_bounds.keys()
    assert max(beyond.values()) < 1e-2 < CLASSES["8-bit"].tolerance
    assert all("the plan saves activations in 8 bits" in reason for reason in report.reasons)


def test_a_plan_tells_what_it_saves_in_8_bits() -> None:
    found = under(LEANER)
    saved = ", ".join(found.inexact["8-bit"])
    (words,) = [each for each in explain_plan(found).words if "8 bits" in each]
    assert words.startswith(f"Forward saves {saved} in 8 bits, which was allowed")
    (held,) = [need.words for need in needs(found) if need.name == "held for backward"]
    assert held == f"what forward leaves, as planned; {len(found.inexact['8-bit'])} activations in 8 bits"


def test_a_further_class_is_a_declaration_that_plans_and_the_backend_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    found = under(LEANER)
    saved = found.inexact["8-bit"]
    told = {"does": "saves {} in 4 bits", "explanation": "Forward saves {} in 4 bits.", "held": "{} in 4 bits"}
    monkeypatch.setitem(CLASSES, "4-bit", replace(CLASSES["8-bit"], name="4-bit", **told))  # type: ignore[arg-type, misc]
    monkeypatch.setitem(FORMATS, "int8", replace(FORMATS["int8"], numerics="4-bit"))  # type: ignore[arg-type]
    assert found.inexact == {"4-bit": saved}
    assert f"Forward saves {', '.join(saved)} in 4 bits." in explain_plan(found).words
    (held,) = [need.words for need in needs(found) if need.name == "held for backward"]
    assert held == f"what forward leaves, as planned; {len(saved)} activations in 4 bits"
    assert _allowed(found, "4-bit")[0] is found  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match='in 4 bits: numerics="4-bit" allows that'):
        _allowed(found, "8-bit")


def test_without_a_budget_the_plan_is_exact_and_leaner_ones_beside_it_need_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotuner.tuner.solving.LEAN_BYTES", 1)
    of = model(LAYER, p=WITH_DROPOUT)
    exact, allowed = tuned(of, "exact"), tuned(of, "8-bit")
    assert allowed.key == exact.key
    assert not any(plan.inexact for plan in exact.plans)
    assert [bool(plan.inexact) for plan in allowed.plans[:1]] == [False]
    narrow = [plan for plan in allowed.plans if plan.inexact]
    assert narrow
    leanest, wide = narrow[-1].memory, exact.plans[-1].memory
    assert leanest is not None
    assert wide is not None
    assert leanest.held_bytes < wide.held_bytes
    assert "in 8 bits" in " ".join(explain_plan(allowed).words)
    assert "numerics" not in exact.to_json()


class Narrow(Leaner):
    """Knows every model, with plans beside the fastest one that save activations in 8 bits."""

    made: ClassVar[dict[str, Configuration]] = {}

    def _of(self, model: Model) -> Configuration:
        key = canonical_json(model.to_json())
        if key not in self.made:
            self.made[key] = tuned(model, "8-bit")
        return self.made[key]


@pytest.fixture
def known_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Narrow())
    monkeypatch.setattr("autotuner.tuner.solving.LEAN_BYTES", 1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("known_regions")
def test_a_step_saves_in_8_bits_where_its_budget_needs_that_and_it_is_allowed() -> None:
    wanted, _ = trained(Layers(), None)
    losses, step = trained(Layers(), "1GiB", numerics="8-bit")
    assert losses == pytest.approx(wanted, rel=1e-4)
    most = needs_of(step)
    assert most.narrow == 0
    found = {}
    for share in (0.5, 0.3):
        budget = int(most.least_bytes + share * (most.measured_bytes - most.least_bytes))
        exact, step = trained(Layers(), budget)
        assert exact == pytest.approx(wanted, rel=1e-8)
        assert needs_of(step).narrow == 0
        losses, step = trained(Layers(), budget, numerics="8-bit")
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert needs_of(step).measured_bytes <= budget
        found[needs_of(step).narrow] = needs_of(step)
    assert max(found) > 0
    assert f", {max(found)} save activations in 8 bits, +" in str(found[max(found)])


@pytest.mark.usefixtures("known_regions")
def test_a_plan_in_8_bits_that_is_given_runs_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    trained(Layers(), None, steps=1)
    (plan,) = Narrow.made.values()
    narrow = next(each for each in plan.plans if each.inexact)
    monkeypatch.setattr(Narrow, "_of", lambda *_: narrow)
    trained(Layers(), None, steps=1)
    saved = ", ".join(narrow.inexact["8-bit"])
    assert COMPILED[-1].tuned == frozenset()
    assert f'is left out: its plan saves {saved} in 8 bits: numerics="8-bit" allows that' in COMPILED[-1].note
    trained(Layers(), None, steps=1, numerics="8-bit")
    assert COMPILED[-1].tuned
    with pytest.raises(InputError, match="numerics is '8 bits': write exact, 8-bit or fp8"):
        trained(Layers(), None, numerics="8 bits")
