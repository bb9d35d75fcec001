"""Compiled models under hooks on saved tensors: checkpoint, save_on_cpu, and hooks that hand back copies."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from autotuner.api.backend import COMPILED
from autotuner.ir.device import CUDA
from autotuner.runtime.saved_state import LEASES
from tests.runtime.capture.known import Compilation, assert_equal, assert_is_slope, gradients
from tests.runtime.capture.test_backend import blocks, inputs, loss_on, stored
from tests.runtime.capture.test_models import LAYERS, bert, llama, loss_of

EXACT = 1e-12
STEPS = 3
COMPILERS = ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


def stages(count: int, p: float = 0.0) -> nn.Sequential:
    """Return models of equal layers with different weights, one behind the other."""
    made = [blocks(p=p).double() for _ in range(count)]
    for number, stage in enumerate(made):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return nn.Sequential(*made)


def checkpointed(called: Callable[[Tensor], Any], **given: Any) -> Callable[[Tensor], Any]:
    return lambda x: checkpoint(called, x, use_reentrant=False, **given)


def compiled_stages(model: nn.Sequential, compiler: str) -> tuple[Compilation, list[Any]]:
    """Return each stage of a model compiled by itself."""
    compilation = Compilation(model[0], compiler=compiler)
    return compilation, [torch.compile(stage, backend=compilation._compile, dynamic=False) for stage in model]


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True])
def test_a_compiled_block_runs_in_checkpoint_from_its_first_step_on(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "known.sqlite"
    monkeypatch.delenv("AUTOTUNER_SERVER", raising=False)
    monkeypatch.setenv("AUTOTUNER_DATABASE", str(path))
    block, x = blocks(), inputs(2, 3)
    if is_known:
        stored(block, x, path)
    wanted = gradients(block, loss_on(x))
    torch._dynamo.reset()
    compiled_block = torch.compile(block, backend="autotuner")
    for _ in range(STEPS):
        found = gradients(block, loss_on(x), lambda x: checkpoint(compiled_block, x, use_reentrant=False))
        assert_equal(found, wanted, 2e-6)
    assert COMPILED[-1].tuned_places == (2 if is_known else 0)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_checkpoint_repeats_a_tuned_forward(compiler: str, is_warm: bool, early_stop: bool) -> None:
    (model,) = stages(1)
    x = inputs(2, 3).double()
    wanted = gradients(model, loss_on(x))
    compilation = Compilation(model, compiler=compiler)
    if is_warm:
        assert_equal(gradients(model, loss_on(x), compilation.model), wanted, EXACT)
    for _ in range(STEPS):
        found = gradients(model, loss_on(x), checkpointed(compilation.model, early_stop=early_stop))
        assert_equal(found, wanted, EXACT)
    assert [region.calls for region in compilation.regions] == [is_warm + 2 * STEPS] * 2


HOOKS = {
    "copies": lambda: saved_tensors_hooks(torch.clone, lambda tensor: tensor),
    "wider copies": lambda: saved_tensors_hooks(lambda tensor: torch.stack([tensor, tensor]), lambda both: both[1]),
    "the CPU": save_on_cpu,
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_hooks_give_backward_other_memory(compiler: str, is_warm: bool, name: str) -> None:
    (model,) = stages(1, p=0.4)
    x = inputs(2, 3).double()
    compilation = Compilation(model, compiler=compiler)
    if is_warm:
        gradients(model, loss_on(x), compilation.model)
    for number in range(STEPS):
        found = []
        for hooks in (HOOKS[name], nullcontext):
            torch.manual_seed(number)
            with hooks():
                found.append(gradients(model, loss_on(x), compilation.model))
        assert_equal(found[0], found[1], EXACT)
    assert {region.calls for region in compilation.regions} == {is_warm + 2 * STEPS}


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_saved_tensors_wait_in_pinned_memory(compiler: str) -> None:
    model = stages(2).to(CUDA)
    x = inputs(2, 3).double().to(CUDA)
    wanted = gradients(model, loss_on(x))
    compilation = Compilation(model, compiler=compiler)
    for _ in range(STEPS + 1):  # one by one, captured, replayed
        with save_on_cpu(pin_memory=True):
            loss = loss_on(x)(compilation.model)
            assert not LEASES, "nothing is saved on the device"
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert_equal(found | {"loss": loss.detach()}, wanted, EXACT)


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_checkpoint_repeats_a_tuned_forward_on_a_gpu(compiler: str) -> None:
    model = stages(2, p=0.4).to(CUDA)
    x = inputs(2, 3).double().to(CUDA)
    compilation = Compilation(model, compiler=compiler)
    for number in range(STEPS + 1):
        found = []
        for called in (compilation.model, checkpointed(compilation.model)):
            torch.manual_seed(number)
            found.append(gradients(model, loss_on(x), called))
        assert_equal(found[1], found[0], EXACT)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_repeated_forward_draws_the_same_masks(compiler: str) -> None:
    (model,) = stages(1, p=0.4)
    x = inputs(2, 3).double()
    compilation = Compilation(model, compiler=compiler)
    found = []
    for called in (checkpointed(compilation.model), compilation.model, checkpointed(compilation.model)):
        torch.manual_seed(3)
        found.append(gradients(model, loss_on(x), called))
    assert_equal(found[0], found[1], 0.0)
    assert_equal(found[2], found[1], 0.0)
    torch.manual_seed(4)
    assert not torch.equal(gradients(model, loss_on(x), compilation.model)["loss"], found[1]["loss"])


@pytest.mark.parametrize("compiler", COMPILERS)
def test_checkpoints_of_equal_blocks_and_checkpoints_within_one(compiler: str) -> None:
    model = stages(3)
    x = inputs(2, 3).double()
    wanted = gradients(model, loss_on(x))
    compilation, compiled = compiled_stages(model, compiler)

    def each(x: Tensor) -> Tensor:
        for stage in compiled:
            x = checkpoint(stage, x, use_reentrant=False)
        return x

    for _ in range(STEPS):
        assert_equal(gradients(model, loss_on(x), each), wanted, EXACT)
        assert_equal(gradients(model, loss_on(x), checkpointed(each)), wanted, EXACT)
    assert all(region.calls for region in compilation.regions)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert, llama])
def test_layers_that_a_model_checkpoints_run_tuned(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    model, arguments = make()
    loss = loss_of(arguments)
    wanted = gradients(model, loss)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    compilation = Compilation(model, compiler="aot_eager")
    for _ in range(STEPS):
        assert_equal(gradients(model, loss, compilation.model), wanted, 2e-6)
    assert sum(graph.tuned_places for graph in compilation.compiled) == LAYERS
    assert [region.calls for region in compilation.regions] == [2 * STEPS] * LAYERS
    assert not any("checkpoint" in reason for graph in compilation.compiled for reason in graph.reasons)


class Inside(nn.Module):
    """Checkpoints each of its stages."""

    def __init__(self, stages: nn.Sequential) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_checkpoint_inside_of_a_compiled_model_draws_the_same_masks(compiler: str) -> None:
    model, x = Inside(stages(2, p=0.4)), inputs(2, 3).double()
    compilation = Compilation(model, compiler=compiler)
    assert_is_slope(lambda: loss_on(x)(compilation.model), model.get_parameter("stages.0.0.up.weight"))
    assert [region.calls for region in compilation.regions] == [2 + 2] * 4
