"""Plans with kernels of backward that repeat forward operators, inside and for products that read what they make."""

import pytest
import torch

from autotuner.ir.models import Model, ModelFile, load_model
from autotuner.ir.models.schema import parse_definition
from autotuner.plan.configuration import Configuration
from autotuner.plan.step import AGAIN
from autotuner.runtime.region import TunedRegion
from autotuner.space import Choice
from autotuner.space.fusion import repeats
from tests.runtime import plans
from tests.runtime.plans import SITES, WITH_DROPOUT, model, solved
from tests.runtime.regions import assert_same, declared_ports, drawn, given, operands, reference, step

MODELS = {
    "post-norm": (model(p=WITH_DROPOUT), {f"{AGAIN}activation_dropped", f"{AGAIN}norm1"}),
    "pre-norm": (
        load_model("gpt-block").instantiate(
            extents=plans.TINY, dtype="float64", options=dict.fromkeys(SITES, WITH_DROPOUT)
        ),
        {f"{AGAIN}activation_dropped", f"{AGAIN}attention_dropped"},
    ),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small tensors repeated, too, in spaces of their own."""
    monkeypatch.setattr(repeats, "BYTES_MIN", 0)
    monkeypatch.setattr(plans, "_SPACES", {})


def repeating(of: Model) -> Configuration:
    """Return the plan that repeats as much as it can."""

    def cost(choice: Choice) -> float | None:
        if choice.candidate.kernel != "inductor":
            return None
        return 1.0 if choice.cover.remade else 2.0 if choice.cover.recomputed else 1e4

    return solved(of, 0, cost=cost, also=("inductor",))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_that_repeats_computes_what_its_graph_does_in_float64(name: str) -> None:
    of, wanted = MODELS[name]
    found = repeating(of)
    again = {n for each in found.steps for n, _ in each.outputs if n.startswith(AGAIN) and each.recomputed}
    assert wanted <= again
    region = TunedRegion(found, declared_ports(of))
    inputs, parameters = operands(of)
    outputs = region.call(inputs, parameters)
    masks = drawn(found)
    torch.autograd.backward(outputs, given(outputs))
    results = [*(y.detach() for y in outputs), *(leaf.grad for leaf in (*inputs, *parameters))]
    assert_same(results, reference(found, region, [*inputs, *parameters], masks))


def test_forward_leaves_nothing_that_backward_makes_again_anyway() -> None:
    extents = {"b": 2, "l": 6, "h": 8, "g": 1, "r": 2, "p": 4, "f": 12}
    of = load_model("llama-block").instantiate(extents=extents, dtype="float64")

    def cost(choice: Choice) -> float | None:
        inside = {"activation", "gated"} == set(choice.cover.operators) and choice.cover.outputs == ("gated",)
        again = choice.cover.recomputed == ("activation",) and not choice.cover.remade
        return 1.0 if choice.candidate.kernel == "inductor" and (inside or again) else None

    found = solved(of, 0, cost=cost, also=("inductor",))
    left = {each.operators: [name for name, _ in each.outputs] for each in found.steps}
    assert left["activation", "gated"] == ["gated"]
    assert [each for each in found.steps if each.phase == "backward" and each.recomputed == ("activation",)]
    region = TunedRegion(found, declared_ports(of))
    inputs, parameters = operands(of)
    results = step(region.call, inputs, parameters)
    assert_same(results, reference(found, region, [*inputs, *parameters], {}))


TIMES = (
    '{"calls": [["mul.Tensor", ["%0", "%1"], {}]], "inputs": [["float64", [], true], ["float64", [], true]], '
    '"output": ["float64", []], "result": "%2", "saved": [0, 1]}'
)
MODULATED = {
    "version": 1,
    "name": "modulated",
    "dtype": "float64",
    "axes": dict.fromkeys("blhf", "some"),
    "inputs": {"x": {"axes": "blh"}, "factor": {"axes": "bh"}},
    "parameters": {"weight": "fh"},
    "operators": [
        {"name": "norm", "kind": "layer_norm", "spec": "blh->blh,bl,bl", "inputs": ["x"],
         "outputs": ["norm", "mean", "deviation"], "attributes": {"epsilon": 1e-5}},
        {"name": "scaled", "kind": "pointwise", "spec": "blh,bh->blh", "inputs": ["norm", "factor"],
         "outputs": ["scaled"], "attributes": {"program": TIMES}},
        {"name": "y", "kind": "contraction", "spec": "blh,fh->blf", "inputs": ["scaled", "weight"], "outputs": ["y"]},
    ],
    "outputs": ["y"],
}  # fmt: skip
"""A norm whose scale is data, as diffusion transformers have it: its gradient is a sum of what the norm makes."""


def test_forward_does_not_leave_a_norm_that_sums_of_backward_make_again() -> None:
    of = ModelFile("test", parse_definition(MODULATED, "test")).instantiate(extents={"b": 2, "l": 6, "h": 8, "f": 4})

    def cost(choice: Choice) -> float | None:
        cover = choice.cover
        inside = set(cover.operators) == {"norm", "scaled"} and cover.outputs == ("scaled",)
        return 1.0 if choice.candidate.kernel == "inductor" and (inside or cover.recomputed == ("norm",)) else None

    found = solved(of, 0, cost=cost, also=("inductor",))
    left = {each.operators: [name for name, _ in each.outputs] for each in found.steps}
    assert left["norm", "scaled"] == ["scaled"]
    again = {name for each in found.steps if each.recomputed == ("norm",) for name in each.operators}
    assert {"grad_factor", "grad_norm"} <= again
    region = TunedRegion(found, declared_ports(of))
    inputs, parameters = operands(of)
    results = step(region.call, inputs, parameters)
    assert_same(results, reference(found, region, [*inputs, *parameters], {}))
