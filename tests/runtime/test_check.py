import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from autotuner.errors import ConfigurationError, DeviceError, InputError
from autotuner.ir.records import Call
from autotuner.kernels import KERNELS
from autotuner.kernels.torch.contraction import Run
from autotuner.runtime import ReadyPeers, TrainingStep, check, ready_peers, time_peers
from autotuner.runtime.check import TOLERANCES, Kept, compare
from autotuner.runtime.peers import ready
from tests.runtime.capture.known import planned
from tests.runtime.capture.test_experts import Sorted
from tests.runtime.made_up_device import OTHER, MadeUpDevice, a_type_with_graphs
from tests.runtime.plans import TINY, WIDER, configuration, in_bfloat16, model
from tests.runtime.test_applied import MODULES, configurations, inputs

FEW_TOKENS = {"b": 4, "l": 5, "h": 16, "n": 4, "p": 4, "f": 64}


def test_a_wrong_plan_does_not_pass() -> None:
    found = configuration(model(), 0)
    number = next(i for i, step in enumerate(found.steps) if step.kernel == "torch_gelu_erf")
    wrong = replace(found.steps[number], kernel="torch_relu")
    report = check(replace(found, steps=(*found.steps[:number], wrong, *found.steps[number + 1 :])))
    assert not report.ok
    assert report.worst[1] > report.tolerance


@pytest.mark.slow
def test_float32_is_within_its_tolerance() -> None:
    report = check(configuration(model(dtype="float32"), 0))
    assert report.ok, report.worst
    assert report.worst[1] > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_layer_with_relu_may_err_as_much_as_the_frameworks_own_in_bfloat16(p: float) -> None:
    report = check(in_bfloat16("relu", p=p))
    beyond = {name for name, error in report.errors.items() if error > report.tolerance}
    assert "linear1.weight" in beyond
    assert report.ok, report.reasons
    assert {*report.own_bounds} == beyond
    assert all(report.own_bounds[name].own.largest > report.tolerance / 2 for name in beyond)
    (reason,) = (reason for reason in report.reasons if reason.startswith("linear1.weight "))
    assert "where 4.0e-02 is allowed; the framework's own layer in this type is off by" in reason
    assert report.allowed["linear1.weight"] == 2 * report.own_bounds["linear1.weight"].own.largest
    assert report.allowed["y"] == TOLERANCES["bfloat16"]


@pytest.mark.slow
def test_what_the_framework_does_with_other_values_is_allowed_where_few_elements_are_near_zero() -> None:
    step = compare(in_bfloat16("relu", extents=FEW_TOKENS))
    first = step.own_errors(0, step.wanted)["linear1.weight"]
    report = step.report()
    assert report.errors["linear1.weight"] > max(report.tolerance, 2 * first.largest)
    assert report.ok, report.reasons


@pytest.mark.slow
def test_a_layer_without_relu_takes_no_step_of_the_framework_beside_the_reference() -> None:
    report = check(in_bfloat16("gelu_erf"))
    assert report.ok
    assert not report.own_bounds
    assert not report.reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator, wrong",
    [("grad_linear1_weight", {"linear1.weight"}), ("grad_linear1_biased", {"linear1.weight", "linear1.bias"})],
)
def test_a_kernel_whose_gradients_are_off_by_a_tenth_is_wrong_beside_relu_too(
    monkeypatch: pytest.MonkeyPatch, operator: str, wrong: set[str]
) -> None:
    found = in_bfloat16("relu")
    (step,) = (step for step in found.steps if operator in step.operators)
    path, _, name = KERNELS[step.kernel].runs.partition(":")
    builder = getattr(importlib.import_module(path), name)

    def off_by_a_tenth(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
        run = builder(call, inputs, outputs)
        shapes = [tuple(made.shape) for made in outputs]
        if "relu_grad" not in call.subgraph.kinds and (WIDER["f"], WIDER["h"]) not in shapes:
            return run  # type: ignore[no-any-return]

        def run_off() -> None:
            run()
            for made in outputs:
                made.mul_(1.1)

        return run_off

    monkeypatch.setattr(f"{path}.{name}", off_by_a_tenth)
    report = check(found)
    assert not report.ok
    assert wrong <= {name for name in report.errors if not report.allows(name)}


def test_a_mask_that_keeps_too_much_is_not_plausible() -> None:
    assert Kept(0.91, 0.9, 0.02).ok
    assert not Kept(0.95, 0.9, 0.02).ok


@pytest.mark.slow
def test_a_model_that_the_framework_lacks_is_compared_with_its_graph() -> None:
    report = check(configuration(model(TINY | {"p": 3}, p=0.3), 0))
    assert report.ok, report.worst
    assert len(report.masks) == 4
    assert report.worst[1] > 1e-17


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LLaMA layer", "own GPT block"])
@pytest.mark.parametrize("low", [False, True])
def test_regions_of_other_modules_are_compared_with_their_graphs(name: str, low: bool) -> None:
    module, arguments = MODULES[name]()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        (found,) = configurations(module, inputs(), **arguments)
    report = check(found)
    assert report.ok, report.reasons
    assert report.tolerance == TOLERANCES["bfloat16" if low else "float32"]
    if low:
        return
    number = next(i for i, step in enumerate(found.steps) if step.kernel == "torch_multiply" or "gelu" in step.kernel)
    wrong = replace(found.steps[number], kernel="torch_add" if name == "LLaMA layer" else "torch_relu")
    assert not check(replace(found, steps=(*found.steps[:number], wrong, *found.steps[number + 1 :]))).ok


@pytest.mark.slow
def test_a_region_that_chooses_is_refused() -> None:
    (region,) = region_calls(nn.Sequential(Sorted(), Sorted()), [(torch.randn(2, 6, 16),)]).models.values()
    found = planned(region)
    with pytest.raises(ConfigurationError, match=r"makes choices, such as .*: float64 decides near ties in other ways"):
        check(found)


@pytest.mark.slow
def test_a_training_step_runs_without_a_framework_module() -> None:
    found = configuration(model(TINY | {"p": 3}), 0)
    graph = found.graph()
    draw = torch.Generator().manual_seed(0)
    named = [name for name, tensor in graph.tensors.items() if tensor.role == "parameter"]
    values = {name: torch.randn(graph.shape(name), generator=draw, dtype=torch.float64) for name in named}
    step = TrainingStep(found, values)
    x, grad = (torch.randn(2, 6, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    y, gradients = step.forward(x), step.backward(grad)
    assert set(gradients) == {"grad_x", *(f"grad_{name}" for name in named)}
    shift, name = 1e-6, "query_weight"
    with torch.no_grad():
        step.parameters[name][0, 0, 0] += shift
    slope = float(((step.forward(x) - y) * grad).sum()) / shift
    assert float(gradients[f"grad_{name}"][0, 0, 0]) == pytest.approx(slope, rel=1e-4)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ConfigurationError, match="query_weight"):
        TrainingStep(configuration(model(), 0), {})


@pytest.mark.slow
def test_peers_are_timed_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    threads = torch.get_num_threads()
    found = time_peers(configuration(model(dtype="float32"), 0), samples=3, threads=1)
    assert torch.get_num_threads() == threads
    assert found.samples == 3
    assert found.plan_us > 0
    assert set(found.ratios) == {"eager", "torch.compile"}


@pytest.mark.slow
def test_peers_that_are_ready_are_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def compiled(layer: nn.Module) -> nn.Module:
        built.append(layer)
        return layer

    monkeypatch.setattr(torch, "compile", compiled)
    peers = ready_peers(model(dtype="float32"), "cpu", threads=1)
    found = time_peers(configuration(model(dtype="float32"), 0), samples=2, threads=1, ready=peers)
    assert set(found.ratios) == {"eager", "torch.compile"}
    assert len(built) == 1


def test_peers_are_not_built_early_on_a_device_with_little_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = [400]

    class Filled(MadeUpDevice):
        def free_bytes(self) -> tuple[int, int]:
            return free_bytes[0], 1000

    def peers(_: object, device_type: str) -> dict[str, object]:
        assert device_type == OTHER
        free_bytes[0] -= 350
        return {}

    a_type_with_graphs(monkeypatch, Filled)
    monkeypatch.setattr(ready, "peers_on_gpu", peers)
    assert ready_peers(model(), OTHER) is None
    assert free_bytes == [400]
    free_bytes[0] = 650
    assert ready_peers(model(), OTHER) is None  # too little is left
    free_bytes[0] = 950
    assert ready_peers(model(), OTHER) == ReadyPeers(on_gpu={})


@pytest.mark.parametrize("seed", [-1, 10**19, 10**20])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match=rf"the seed is {seed}: give a number from 0 to 9223372036854775807"):
        check(configuration(model(), 0), seed)


def test_a_configuration_of_a_device_that_is_not_here_is_refused() -> None:
    found = configuration(model(), 0)
    elsewhere = replace(found, environment={**found.environment, "device_type": "abacus"})
    with pytest.raises(DeviceError, match="no device 'abacus' here; what is here: cpu"):
        check(elsewhere)
