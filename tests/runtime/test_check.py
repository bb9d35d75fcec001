from dataclasses import replace
from functools import partial

import pytest
import torch

from autotuner.errors import ConfigurationError, DeviceError, InputError
from autotuner.runtime import TrainingStep, check, time_peers
from autotuner.runtime.check import Kept
from tests.runtime.plans import TINY, configuration, model


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


def test_a_mask_that_keeps_too_much_is_not_plausible() -> None:
    assert Kept(0.91, 0.9, 0.02).ok
    assert not Kept(0.95, 0.9, 0.02).ok


@pytest.mark.slow
def test_a_model_that_the_framework_lacks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="h is n times p"):
        check(configuration(model(TINY | {"p": 3}), 0))


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


@pytest.mark.parametrize("seed", [-1, 10**19, 10**20])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match=rf"the seed is {seed}: give a number from 0 to 9223372036854775807"):
        check(configuration(model(), 0), seed)


def test_a_configuration_of_a_device_that_is_not_here_is_refused() -> None:
    found = configuration(model(), 0)
    elsewhere = replace(found, environment={**found.environment, "device_type": "abacus"})
    with pytest.raises(DeviceError, match="no device 'abacus' here; what is here: cpu"):
        check(elsewhere)
