"""The bytes that a training step allocates, against those that its plan says."""

import gc

import pytest
import torch

from autotuner.ir.models import load_model
from autotuner.measure.devices.cpu_sampling import allocated_bytes
from autotuner.plan.memory_planner import make_plan, memory
from autotuner.runtime import TrainingStep, apply, encoder_layer, peak_bytes
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.framework import MadeUpCall
from autotuner.runtime.peers.on_gpu import captured
from autotuner.runtime.peers.training_loop import TrainingLoop
from tests.runtime.layers import CUDA
from tests.runtime.plans import MASKED, SITES, configuration, model
from tests.runtime.workspaces import workspaces

ALLOWED_SHARE = 0.05
MIB = 1 << 20
WIDE = {"b": 4, "l": 24, "h": 32, "n": 4, "p": 8, "f": 96}
GPT = load_model("gpt-block")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_layer_allocates_what_its_plan_says(p: float, seed: int) -> None:
    of = model(WIDE, dtype="float32", p=p)
    found = configuration(of, seed)
    plan = make_plan(found)
    predicted = memory(plan, workspaces(plan)).peak_bytes
    measured = peak_bytes(apply(encoder_layer(of), found), MadeUpCall.of(of))
    assert abs(predicted / measured - 1) <= ALLOWED_SHARE


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_step_without_a_module_allocates_what_its_plan_says(p: float) -> None:
    of = GPT.instantiate(extents=WIDE, dtype="float32", options=dict.fromkeys(SITES, p))
    found = configuration(of)
    plan = make_plan(found)
    graph = found.graph()
    values = {name: torch.randn(graph.shape(name)) for name in plan.parameters}
    x, grad = torch.randn(graph.shape("x")), torch.randn(graph.shape("y"))

    def steps() -> None:
        step = TrainingStep(found, values)
        for _ in range(2):
            step.forward(x)
            step.backward(grad)

    parameters = sum(buffer.size_bytes for buffer in plan.buffers if buffer.role == "parameter")
    measured = allocated_bytes(steps) - parameters
    assert abs(memory(plan, workspaces(plan)).peak_bytes / measured - 1) <= ALLOWED_SHARE


@pytest.mark.slow
def test_the_peak_of_a_layer_does_not_depend_on_what_ran_before() -> None:
    tuned, call = apply(encoder_layer(MASKED), configuration(MASKED)), MadeUpCall.of(MASKED)
    first = peak_bytes(tuned, call)
    tuned(call.x, **call.masks).sum().backward()
    assert peak_bytes(tuned, call) == first


def test_the_peak_of_the_frameworks_layer_has_its_gradients_in_it() -> None:
    of = model()
    layer, call = encoder_layer(of), MadeUpCall.of(of)
    assert peak_bytes(layer, call) > call.x.nbytes + sum(parameter.nbytes for parameter in layer.parameters())
    assert call.x.grad is None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("extents", [{"b": 8, "l": 128, "h": 256, "n": 4, "p": 64, "f": 1024}])
def test_a_captured_step_allocates_what_its_plan_says_and_what_cublas_keeps_for_each_stream(
    extents: dict[str, int],
) -> None:
    of = model(extents, dtype="bfloat16", p=0.1)
    found = configuration(of, 0, CUDA)
    plan = make_plan(found)
    predicted = memory(plan, workspaces(plan, CUDA)).peak_bytes
    torch._C._cuda_clearCublasWorkspaces()
    loop = TrainingLoop(apply(encoder_layer(of, device=CUDA), found, graphs=False), MadeUpCall.of(of, device=CUDA))
    side = captured(loop)
    assert side.peak_bytes is not None
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    scratch = before - torch.cuda.memory_allocated()
    assert abs(predicted / (side.peak_bytes - scratch) - 1) <= 2 * ALLOWED_SHARE


@pytest.mark.gpu
def test_tensors_that_are_gathered_leave_the_pieces_that_they_were_cut_from() -> None:
    runtime = device_runtime(torch.device(CUDA, torch.cuda.current_device()))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    mixed = [(torch.empty(16 * MIB, dtype=torch.uint8, device=CUDA), torch.randn(MIB, device=CUDA)) for _ in range(12)]
    small = torch.arange(5.0, device=CUDA)
    kept = [tensor for _, tensor in mixed] + [small, torch.randn(6, 4, device=CUDA).t().clone()]
    values, places = [tensor.clone() for tensor in kept], [tensor.data_ptr() for tensor in kept]
    row = torch.randn(2, 3, device=CUDA)[1]  # shares its memory
    of_row = row.data_ptr()
    del mixed
    torch.cuda.empty_cache()
    runtime.gather([*kept, row])
    for tensor, value, place in zip(kept, values, places, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == value.stride()
        assert tensor.data_ptr() != place
    assert row.data_ptr() == of_row
    values.clear()
    torch.cuda.empty_cache()
    # 12 of 4 MiB in pieces without gaps, and two small ones in 2 MiB; beside, what the row and others lie in.
    assert torch.cuda.memory_reserved() - before <= 54 * MIB
    kept.clear()
    del tensor, value, small
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 2 * MIB
