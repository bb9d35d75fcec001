"""What users put around a tuned layer on a CUDA device: checkpointing, hooks, torch.compile, another framework."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotuner.plan.memory_planner import make_plan, memory
from autotuner.runtime import apply, check, encoder_layer, peak_bytes
from autotuner.runtime.framework import MadeUpCall
from tests.runtime.bert_layers import KEEPS, additive, bert_layer
from tests.runtime.layers import CUDA, assert_equal, gradients, on_cuda, tuned, x_on
from tests.runtime.plans import MASKED, WITH_DROPOUT, configuration, model, solved
from tests.runtime.workspaces import workspaces

pytestmark = pytest.mark.gpu
graphs = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "plain"])
STEPS = 5
ALLOWED_SHARE = 0.05


@graphs
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_draws_the_same_masks_again(graphs: bool, reentrant: bool) -> None:
    layer, _ = on_cuda(model(p=WITH_DROPOUT), graphs=graphs)
    for seed in range(STEPS):
        found = []
        for checkpointed in (False, True):
            torch.manual_seed(seed)
            layer.zero_grad()
            x = x_on(seed).requires_grad_()
            y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            y.square().sum().backward()
            found.append([x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@graphs
def test_hooks_on_gradients_see_what_the_framework_gives(graphs: bool) -> None:
    layer, twin = on_cuda(graphs=graphs)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    for number, module in enumerate((layer, twin)):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p, number=number: seen[number].append(p.grad.clone())
            )
    for step in range(STEPS):
        for module in (layer, twin):
            module.zero_grad()
            module(x_on(step)).square().sum().backward()
    by_shape = [sorted((tuple(g.shape), float(g.abs().sum())) for g in seen[n]) for n in range(2)]
    assert len(by_shape[0]) == STEPS * len([*layer.parameters()])
    for (shape, one), (other_shape, other) in zip(*by_shape, strict=True):
        assert shape == other_shape
        assert one == pytest.approx(other, rel=1e-9)


@graphs
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inside_a_compiled_model_it_runs_tuned(graphs: bool, backend: str) -> None:
    layer, twin = on_cuda(graphs=graphs)
    last = nn.Linear(8, 8, dtype=torch.float64, device=CUDA)
    compiled: Any = torch.compile(nn.Sequential(layer, last), backend=backend, fullgraph=True)
    whole = nn.Sequential(twin, copy.deepcopy(last))
    for step in range(STEPS):
        found, wanted = gradients(compiled, x_on(step)), gradients(whole, x_on(step))
        assert_equal({name.removeprefix("_orig_mod."): value for name, value in found.items()}, wanted, 1e-10)
    assert (layer.calls, dict(layer.fallbacks)) == (STEPS, {})


def test_inside_a_model_that_is_compiled_for_graphs_it_runs_tuned() -> None:
    layer, twin = on_cuda()
    compiled = torch.compile(nn.Sequential(layer), mode="reduce-overhead", fullgraph=True)
    for step in range(STEPS):
        x, twins = (x_on(step).requires_grad_() for _ in range(2))
        compiled(x).square().sum().backward()
        twin(twins).square().sum().backward()
        assert x.grad is not None
        assert twins.grad is not None
        torch.testing.assert_close(x.grad, twins.grad, rtol=1e-10, atol=1e-10)
    assert layer.calls == STEPS


@graphs
@pytest.mark.parametrize("mask", [None, additive(KEEPS)], ids=["no mask", "a mask"])
def test_a_layer_of_the_other_framework_equals_it(graphs: bool, mask: Tensor | None) -> None:
    layer = bert_layer(hidden_act="gelu_new").to(CUDA)
    twin = copy.deepcopy(layer)
    made = tuned(layer, configuration(MASKED, 0, CUDA), graphs)
    arguments = {} if mask is None else {"attention_mask": mask.to(CUDA)}
    for step in range(STEPS):
        assert_equal(gradients(made, x_on(step), **arguments), gradients(twin, x_on(step), **arguments), 1e-10)
    assert (made.calls, dict(made.fallbacks)) == (STEPS, {})


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_layer_allocates_what_its_plan_says(p: float) -> None:
    of = model({"b": 4, "l": 128, "h": 256, "n": 4, "p": 64, "f": 1024}, dtype="float32", p=p)
    found = configuration(of, 0, CUDA)
    plan = make_plan(found)
    predicted = memory(plan, workspaces(plan, CUDA)).peak_bytes
    measured = peak_bytes(apply(encoder_layer(of, device=CUDA), found), MadeUpCall.of(of, device=CUDA))
    assert abs(predicted / measured - 1) <= ALLOWED_SHARE


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("cuda_efficient_attention", "float32"), ("cuda_flash_attention", "bfloat16"), ("cudnn_attention", "float16")],
)
def test_a_plan_with_attention_of_a_library_equals_the_framework_and_its_replays_the_calls_one_by_one(
    kernel: str, dtype: str, p: float
) -> None:
    of = model({"b": 2, "l": 64, "h": 64, "n": 2, "p": 32, "f": 128}, dtype=dtype, p=p)
    found = solved(
        of, 0, also=(kernel,), device_type=CUDA,
        cost=lambda choice: 1e-3 if choice.candidate.kernel.startswith(kernel) else None,
    )  # fmt: skip
    assert {kernel, f"{kernel}_grad"} <= {step.kernel for step in found.steps}
    report = check(found)
    assert report.ok, report
    runs = []
    for graphs in (True, False):
        layer, call = apply(encoder_layer(of, device=CUDA), found, graphs=graphs), MadeUpCall.of(of, device=CUDA)
        torch.manual_seed(0)
        for _ in range(STEPS):
            call.x.grad = None
            layer(call.x).backward(call.grad_y)
        assert call.x.grad is not None
        runs.append({"x": call.x.grad})
    assert_equal(runs[0], runs[1], 1e-2)
