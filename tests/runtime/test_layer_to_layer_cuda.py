"""Steps that run layer after layer on a GPU, with layers on the host."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import autotuner
from tests.runtime.test_layer_to_layer import Net, adamw, batch, loss_of, plain_step

pytestmark = pytest.mark.gpu
WIDTH = 512


def pair(**options: Any) -> tuple[Net, Net, Any, Any]:
    """Return a model on the GPU, a copy whose layers are on the host, the first one's optimizer, the other's step."""
    torch.manual_seed(0)
    model = Net(depth=6, width=WIDTH, rate=options.pop("rate", 0.0)).cuda()
    twin = copy.deepcopy(model).cpu()
    step = autotuner.layer_to_layer(
        twin, adamw(twin, lr=1e-3), loss_of, **{"device": "cuda", "compiler": None, **options}
    )
    return model, twin, adamw(model, lr=1e-3), step


def on_gpu(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in given.items()}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("parts", [1, 3])
def test_steps_are_those_of_plain_accumulation(in_backward: bool, stash: str, parts: int) -> None:
    model, twin, optimizer, step = pair(optimizer_in_backward=in_backward, stash=stash)
    assert all(parameter.is_cpu for block in twin.blocks for parameter in block.parameters())
    assert twin.head.weight.is_cuda
    for number in range(8):
        batches = [batch(10 * number + part) for part in range(parts)]
        wanted = plain_step(model, optimizer, *map(on_gpu, batches))
        torch.testing.assert_close(step(*batches), wanted, rtol=1e-4, atol=1e-5)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.cuda(), mine, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_dropout_is_the_same_when_a_layer_runs_again(compiler: str | None) -> None:
    _, _, _, step = pair(rate=0.5, compiler=compiler)
    losses = [float(step(batch(0), batch(1))) for _ in range(20)]  # the first step compares each layer with its repeat
    assert losses[-1] < 0.8 * losses[0]


def test_what_the_device_holds_does_not_grow_with_the_number_of_layers() -> None:
    peaks = []
    for depth in (4, 16):
        torch.manual_seed(0)
        model = Net(depth=depth, width=WIDTH)
        step = autotuner.layer_to_layer(
            model, adamw(model), loss_of, device="cuda", compiler=None, stash="host", optimizer_in_backward=True
        )
        step(batch(0))
        torch.cuda.reset_peak_memory_stats()
        step(batch(0), batch(1))
        peaks.append(torch.cuda.max_memory_allocated())
        step.close()
        del model, step
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_autocast_with_rounded_links_is_autocast() -> None:
    model, twin, optimizer, step = pair(link_dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        for number in range(4):
            wanted = plain_step(model, optimizer, on_gpu(batch(number)))
            torch.testing.assert_close(step(batch(number)), wanted, rtol=1e-2, atol=1e-2)
    assert all(parameter.dtype == torch.float32 for parameter in twin.parameters())


def test_a_budget_is_kept_and_leaves_inputs_on_the_device_where_there_is_room() -> None:
    _, _, _, step = pair(memory_budget="4GiB")
    for number in range(3):
        step(batch(number))
    (needs,) = step.needs
    assert 0 < needs.least_bytes < 4 << 30
    assert needs.has_room
    assert step.stash_bytes == 0
