"""A tuned layer inside DistributedDataParallel: two processes, half of the batch each."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from autotuner.plan.configuration import load_configuration, save_configuration
from autotuner.runtime import encoder_layer
from tests.processes import spawn
from tests.runtime.layers import batch, tuned
from tests.runtime.plans import configuration, model

pytestmark = pytest.mark.slow

RANKS = 2
STEPS = 4


def run_rank(rank: int, folder: str, device_type: str) -> None:
    """Train on one part of each batch, and keep what came of it."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    net = nn.Sequential(
        encoder_layer(model(), 0, device_type), nn.Linear(8, 8, dtype=torch.float64, device=device_type)
    )
    with torch.no_grad():
        net.get_parameter("1.weight").fill_(0.25)
    twin, late = copy.deepcopy(net), copy.deepcopy(net)
    plan = load_configuration(f"{folder}/found.json")
    net[0] = layer = tuned(net[0], plan)
    found = {"tuned": trained(net, rank, device_type), "framework": trained(twin, rank, device_type)}
    found["tuned after two steps"] = trained(late, rank, device_type, lambda: late.__setitem__(0, tuned(late[0], plan)))
    torch.save({**found, "calls": layer.calls, "fallbacks": dict(layer.fallbacks)}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def trained(net: nn.Module, rank: int, device_type: str, after_two: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Return parameters after some steps, each of one micro-batch without and one with an exchange of gradients."""
    whole: Any = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    for step in range(STEPS):
        if step == 2:
            after_two()
        optimizer.zero_grad()
        with whole.no_sync():
            torch.autograd.backward(whole(batch(10 * step + rank).to(device_type)).square().mean())
        torch.autograd.backward(whole(batch(10 * step + 5 + rank).to(device_type)).square().mean())
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_processes_that_share_gradients_train_as_the_framework_does(device_type: str, tmp_path: Path) -> None:
    save_configuration(configuration(model(), 0, device_type), tmp_path / "found.json")
    spawn(run_rank, (str(tmp_path), device_type), RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    for name in ("tuned", "tuned after two steps"):
        for one, other, twin in zip(first[name], second[name], first["framework"], strict=True):
            assert torch.equal(one, other), "all processes have the same parameters"
            torch.testing.assert_close(one, twin, rtol=1e-8, atol=1e-8)
    assert (first["calls"], first["fallbacks"]) == (2 * STEPS, {})
