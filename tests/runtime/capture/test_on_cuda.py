"""Captured models on a GPU: as they are called, and with the whole step as one CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu
from torch.utils.checkpoint import checkpoint

from autotuner.ir.device import CUDA
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.whole_step import WholeStep
from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_autocast import autocast, check_close, widened
from tests.runtime.capture.test_models import LAYERS, MODELS, bert, llama, loss_of, padded_bert
from tests.runtime.test_given_back import alive

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


class Adding(nn.Module):
    """Adds its biases where its dropout keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        nn.init.zeros_(self.down.weight)
        nn.init.uniform_(self.down.bias, 0.5, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.down(gelu(self.up(self.norm(x)))), 0.4)


class Drawing(nn.Module):
    """Checkpointed layers, the first thing that runs in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(3))

    @property
    def biases(self) -> list[nn.Parameter]:
        return [each for name, each in self.named_parameters() if name.endswith("down.bias")]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.filterwarnings("error:a tuned module runs without CUDA graphs")
def test_checkpointed_layers_draw_the_same_masks_again_where_they_are_replayed(compiler: str) -> None:
    model, x = Drawing().to(CUDA), torch.randn(2, 24, 16, device=CUDA)
    compilation = Compilation(model, compiler=compiler)
    added = []
    for _ in range(2 * STEPS):
        model.zero_grad()
        y = compilation.model(x)
        y.sum().backward()
        added.append((y - x).detach().sum((0, 1)))
        repeated = sum(each.detach() * (0 if each.grad is None else each.grad) for each in model.biases)
        torch.testing.assert_close(repeated, added[-1], rtol=1e-4, atol=1e-3)
    assert [region.calls for region in compilation.regions] == [2 * 2 * STEPS] * 3
    assert len({tuple(each.tolist()) for each in added}) == len(added)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_checkpointed_layers_of_a_captured_step_draw_the_same_masks_again(micro_batches: int) -> None:
    model = Drawing().to(CUDA)
    for name, each in model.named_parameters():
        each.requires_grad_(name.endswith("down.bias"))
    optimizer = torch.optim.SGD(model.biases, lr=0.01)
    compilation = Compilation(model, compiler="inductor", in_place=True)

    def loss(batch: Any) -> Tensor:
        found: Tensor = compilation.model(batch["x"]).sum()
        return found

    step = WholeStep(model, optimizer, loss, recorder=device_runtime(torch.device(CUDA, 0)))
    losses, before_all = [], len(alive())
    for number in range(2 * STEPS):
        batches = [{"x": torch.zeros(2, 24, 16, device=CUDA)} for _ in range(micro_batches)]
        before = [each.detach().clone() for each in model.biases]
        if number == STEPS + 1:
            compilation.model(batches[0]["x"])  # forward alone, between two replays
        losses.append(float(step(*batches)))
        if number < 2:  # before the capture
            assert len(alive()) == before_all
        gradients = [(old - new.detach()) / 0.01 for old, new in zip(before, model.biases, strict=True)]
        repeated = sum(float((old * each).sum()) for old, each in zip(before, gradients, strict=True))
        assert losses[-1] == pytest.approx(repeated, rel=1e-3)
    assert step.replays == 2 * STEPS - 2, step.note
    assert len(set(losses)) == len(losses)
