"""Plans that hold little between forward and backward run, and compute what the framework does."""

from dataclasses import replace

import pytest

from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.records import Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import make_plan, memory
from autotuner.runtime import check
from autotuner.solve.problem.formulate import formulate
from autotuner.space import build_space
from autotuner.tuner.steps import steps_of
from tests.runtime.plans import WITH_DROPOUT, configuration, model
from tests.solve.problem.test_formulate import CPU, costs_of
from tests.solve.problem.test_saving import with_dear_bytes

pytestmark = pytest.mark.slow

UNIT = 60.0

COMPILED = ("inductor", "inductor_threefry")
WHOLE_BYTES = {"b": 2, "l": 6, "h": 8, "n": 2, "p": 4, "f": 16}


def holding_little(of: Model, seed: int) -> Configuration:
    """Return a plan in which a byte that is held is dear; without compilers, which take seconds each."""
    kernels = {name: entry for name, entry in CPU.kernels.items() if name not in COMPILED}
    space = build_space(training_graph(of.graph()), CPU.model_copy(update={"kernels": kernels}), saving=True)
    costs = costs_of(space, seed)
    formulation = formulate(space, saving=True).priced(costs)
    known = {key: Measurement("ok", median_us=cost) for key, cost in costs.items()}
    steps = steps_of(formulation, with_dear_bytes(formulation.problem), known)
    return replace(configuration(of), steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("p, seed", [(0.0, 0), (WITH_DROPOUT, 1)])
def test_a_plan_that_holds_little_computes_what_the_framework_does(p: float, seed: int) -> None:
    of = model(p=p)
    found = holding_little(of, seed)
    assert found.recomputed
    report = check(found)
    assert report.ok, report.worst
    little, much = (memory(make_plan(each)).held_bytes for each in (found, configuration(of)))
    assert little < 0.7 * much


@pytest.mark.slow
def test_a_plan_holds_relus_result_as_signs_and_computes_what_the_framework_does() -> None:
    of = model(WHOLE_BYTES, p=WITH_DROPOUT, activation="relu")
    space = build_space(training_graph(of.graph()), CPU, saving=True)
    # Every operator costs as much as 60 bytes: to repeat dropout, for want of its result, is dearer than 24 of signs.
    # What a compiler makes, which takes seconds each, is four times as dear, but for what writes or reads signs.
    costs = {
        each.call.key: UNIT * (4 if each.candidate.kernel.startswith("inductor") else 1) for each in space.conversions
    }
    for choice in space.choices:
        is_dear = choice.candidate.kernel in COMPILED and not any(":sign" in form for form in choice.candidate.forms)
        costs[choice.call.key] = UNIT * len(choice.cover.operators) * (4 if is_dear else 1)
    formulation = formulate(space, saving=True).priced(costs)
    known = {key: Measurement("ok", median_us=cost) for key, cost in costs.items()}
    found = replace(configuration(of), steps=steps_of(formulation, with_dear_bytes(formulation.problem, us=1), known))
    held = {place for step in found.steps if step.phase == "backward" for place in step.inputs}
    assert ("activation", "blf:sign") in held
    assert ("activation", "blf") not in held
    assert [step.kernel for step in found.steps].count("inductor") == 2
    report = check(found)
    assert report.ok, report.worst
