"""Captured models on a GPU: as they are called, and with the whole step as one CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotuner.ir.device import CUDA
from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_autocast import autocast, check_close, widened
from tests.runtime.capture.test_models import LAYERS, MODELS, bert, llama, loss_of, padded_bert

pytestmark = pytest.mark.gpu
SHARE = 2e-5
STEPS = 4

Make = Callable[[], tuple[nn.Module, dict[str, Any]]]


def on_cuda(make: Make) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, arguments = make()
    given = {name: each.to(CUDA) if isinstance(each, Tensor) else each for name, each in arguments.items()}
    return model.to(CUDA), given


@pytest.mark.parametrize(("make", "tuned"), MODELS)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_every_layer_runs_tuned_and_computes_what_it_did(make: Make, tuned: int, compiler: str) -> None:
    model, arguments = on_cuda(make)
    loss = loss_of(arguments)
    wanted = gradients(model, loss)
    compilation = Compilation(model, compiler=compiler)
    for _ in range(STEPS):  # one by one, captured, replayed
        assert_equal(gradients(model, loss, compilation.model), wanted, SHARE)
    assert len(compilation.regions) == tuned
    assert {region.calls for region in compilation.regions} == {STEPS}


@pytest.mark.parametrize(("make", "tuned"), MODELS)
def test_layers_under_autocast_run_tuned_as_well_as_torch_computes_them(make: Make, tuned: int) -> None:
    model, arguments = on_cuda(make)
    compilation = Compilation(model)
    check_close(model, loss_of(widened(arguments)), autocast(loss_of(arguments), device_type=CUDA), compilation)
    assert len(compilation.regions) == tuned


@pytest.mark.parametrize("make", [bert, padded_bert, llama])
def test_a_whole_step_is_one_graph_that_reads_in_place(make: Make) -> None:
    model, arguments = on_cuda(make)
    loss = loss_of(arguments)
    compilation = Compilation(model, compiler="inductor", in_place=True)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(model, loss, compilation.model)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(compilation.model)
        value.backward()  # type: ignore[no-untyped-call]
    made = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert [region.bound.last.pool._in_capture for region in compilation.regions] == [[]] * LAYERS  # memory went back
    del compilation  # the graph outlives the compiled model, and memory that goes to others is none of the graph's
    torch.compiler.reset()
    gc.collect()
    others = [torch.full((2**20,), float("nan"), device=CUDA) for _ in range(64)]
    for number in range(STEPS):
        torch.manual_seed(number)
        arguments["input_ids"].copy_(torch.randint_like(arguments["input_ids"], 64))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        graph.replay()
        found = {name: each.clone() for name, each in made.items()} | {"loss": value.detach().clone()}
        twin, _ = on_cuda(make)
        twin.load_state_dict(model.state_dict())
        assert_equal(found, gradients(twin, loss), SHARE)
    assert all(bool(each.isnan().all()) for each in others)


def test_dropout_of_a_captured_step_draws_anew_at_each_replay() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.5, "gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(CUDA)
    x = torch.randn(2, 12, 32, device=CUDA)
    compilation = Compilation(model, compiler="inductor", in_place=True)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compilation.model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compilation.model(x)
        y.square().sum().backward()
    seen = []
    for _ in range(STEPS):
        graph.replay()
        seen.append(y.detach().clone())
    assert all(not torch.equal(seen[0], other) for other in seen[1:])
