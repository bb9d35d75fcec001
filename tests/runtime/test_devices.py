"""The seam between the runtime and a device: configurations on a made-up device, through capture and replay."""

import gc

import pytest
import torch

from autotuner.errors import ConfigurationError
from autotuner.ir.device import has_graphs
from autotuner.kernels import registry
from autotuner.runtime import check
from autotuner.runtime.devices import RUNTIMES, CpuRuntime, CudaRuntime, device_runtime
from autotuner.runtime.devices.cuda import without_collection
from autotuner.runtime.framework import encoder_layer
from autotuner.runtime.region import TunedRegion
from tests.runtime.layers import assert_equal, batch, gradients, tuned, tuned_layer
from tests.runtime.made_up_device import MadeUpDevice, instead_of_the_cpu
from tests.runtime.plans import WITH_DROPOUT, configuration, model
from tests.runtime.regions import assert_same, shared, shared_model, shared_operands, shared_ports, step
from tests.runtime.test_overlap import everything_beside

STEPS = 4


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    return instead_of_the_cpu(monkeypatch)


def test_the_cpu_and_types_that_nobody_knows_run_calls_one_by_one() -> None:
    for name in ("cpu", "meta"):
        runtime = device_runtime(torch.device(name))
        assert isinstance(runtime, CpuRuntime)
        assert (runtime.device.type, runtime.vendor, runtime.has_graphs) == (name, name, False)


def test_a_device_and_its_type_tell_the_same_of_graphs() -> None:
    assert {"cpu": CpuRuntime, "nvidia": CudaRuntime, "amd": CudaRuntime} == RUNTIMES
    assert CpuRuntime.has_graphs == has_graphs("cpu")
    assert CudaRuntime.has_graphs == has_graphs("cuda")


@pytest.mark.slow
def test_forward_and_backward_of_a_layer_are_captured_once_and_replayed(made_up: MadeUpDevice) -> None:
    layer, twin = tuned_layer()
    for number in range(STEPS):
        assert_equal(gradients(layer, batch(number)), gradients(twin, batch(number)))
    assert (made_up.captures, made_up.replays) == (2, 2 * (STEPS - 1))
    assert sum(layer.fallbacks.values()) == 0


def test_replays_draw_the_masks_that_calls_one_by_one_draw(made_up: MadeUpDevice) -> None:
    of = model(p=WITH_DROPOUT)
    layers = [tuned(encoder_layer(of), configuration(of), graphs) for graphs in (True, False)]
    found = []
    for layer in layers:
        torch.manual_seed(3)
        found.append([gradients(layer, batch(number)) for number in range(STEPS)])
    for one, other in zip(*found, strict=True):
        assert_equal(one, other, 0.0)
    assert made_up.captures == 2


def test_branches_of_a_plan_are_captured_over_streams(made_up: MadeUpDevice) -> None:
    of = model()
    layer = tuned(encoder_layer(of), everything_beside(configuration(of)))
    twin = encoder_layer(of)
    for number in range(STEPS):
        assert_equal(gradients(layer, batch(number)), gradients(twin, batch(number)))
    assert "stream 1 joins lane 1" in made_up.log
    assert any(line.startswith("lane 1 waits for") for line in made_up.log)


@pytest.mark.slow
def test_a_layer_on_another_stream_waits_and_has_graphs_of_its_own(made_up: MadeUpDevice) -> None:
    layer, twin = tuned_layer()
    for made_up.now in (1, 1, 2, 2, 1):
        assert_equal(gradients(layer, batch(made_up.now)), gradients(twin, batch(made_up.now)))
    assert made_up.captures == 4
    assert [line.split(",")[0] for line in made_up.log if "waits" in line] == [
        "stream 2 waits for stream 1", "stream 1 waits for stream 2",
    ]  # fmt: skip


def test_a_layer_that_cannot_be_captured_runs_call_by_call(made_up: MadeUpDevice) -> None:
    layer, twin = tuned_layer()
    made_up.fails = True
    gradients(layer, batch())
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        found = gradients(layer, batch(1))
    assert_equal(found, gradients(twin, batch(1)))
    assert made_up.captures == 0


def test_a_region_is_captured_and_replayed(made_up: MadeUpDevice) -> None:
    region = TunedRegion(configuration(shared_model()), shared_ports())
    _, parameters = shared_operands()
    for number in range(STEPS):
        inputs, _ = shared_operands(number)
        assert_same(step(region.call, inputs, parameters), step(shared, inputs, parameters))
    assert (made_up.captures, made_up.replays) == (2, 2 * (STEPS - 1))


def test_a_configuration_with_kernels_of_another_vendor_is_refused(
    made_up: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_NVIDIA_ALONE", ("autotuner.kernels.torch.",))
    layer, _ = tuned_layer()
    with pytest.raises(
        ConfigurationError, match=rf"needs a device of NVIDIA, and this one's vendor is '{made_up.vendor}'"
    ):
        layer(batch())


@pytest.mark.slow
def test_check_compares_a_replay(made_up: MadeUpDevice) -> None:
    assert check(configuration(model(p=WITH_DROPOUT))).ok
    assert made_up.captures == 2
    assert made_up.replays == 4


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_something_is_captured(is_on: bool) -> None:
    before, found = gc.isenabled(), []

    def capture() -> None:
        with without_collection():
            found.append(gc.isenabled())
            raise RuntimeError("in a capture")

    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="in a capture"):
            capture()
        assert [*found, gc.isenabled()] == [False, is_on]
    finally:
        (gc.enable if before else gc.disable)()
