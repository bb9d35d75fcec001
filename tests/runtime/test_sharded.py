"""Tuned layers under FSDP, two processes: parameters are sharded, gathered when they are needed, and freed again."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.processes import spawn
from tests.runtime.kinds import KINDS, pair
from tests.runtime.layers import batch

pytestmark = pytest.mark.slow

RANKS = 2
STEPS = 6
SHARDED = [(1, KINDS[0]), (2, KINDS[1]), (2, KINDS[2]), (1, KINDS[3])]
"""Versions of FSDP with kinds of layers: each version with both classes, and with a plan of each kind."""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def shard(net: nn.Module, version: int, device: str) -> nn.Module:
    if version == 2:
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.device_mesh.init_device_mesh(device, (RANKS,))
        fully_shard(net[0], mesh=mesh)  # type: ignore[index]
        fully_shard(net, mesh=mesh)
        return net
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(net[0])})  # type: ignore[index]
    whole: nn.Module = FullyShardedDataParallel(
        net, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device(device)
    )
    return whole


def run_rank(rank: int, folder: str, device: str) -> None:
    """Train both of each kind on one part of each batch, and keep the outputs of every step and what was counted."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
    )  # fmt: skip
    found = {}
    for version, kind in SHARDED if device == "cpu" else SHARDED[:2]:
        layer, twin = pair(kind, device=device)
        outputs = [trained(net, version, device, rank) for net in (layer, twin)]
        found[version, kind] = (*outputs, layer.calls, dict(layer.fallbacks))
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def trained(layer: nn.Module, version: int, device: str, rank: int) -> list[Tensor]:
    last = nn.Linear(8, 8, dtype=torch.float64).to(device)
    with torch.no_grad():
        last.weight.fill_(0.25)
        last.bias.fill_(0.1)
    whole = shard(nn.Sequential(layer, last), version, device)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    outputs: list[Tensor] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        y = whole(batch(2 * number + rank).to(device))
        y.square().mean().backward()
        optimizer.step()
        outputs.append(y.detach().cpu())
    return outputs


@devices
def test_sharded_layers_train_as_the_frameworks_do_step_by_step(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    spawn(run_rank, (str(tmp_path), device), RANKS)
    for rank in range(RANKS):
        for case, (tuned, framework, calls, fallbacks) in torch.load(tmp_path / f"{rank}.pt").items():
            for number, (one, other) in enumerate(zip(tuned, framework, strict=True)):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=f"{case}, step {number}")
            assert (calls, fallbacks) == (STEPS, {}), case
