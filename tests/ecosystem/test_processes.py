"""Two processes train one model with the backend: DistributedDataParallel and FSDP2."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.ecosystem.known import OPTIONS, Tuned, remember
from tests.processes import spawn

pytestmark = pytest.mark.slow

RANKS, STEPS, WIDTH, LAYERS = 2, 3, 16, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.given = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        query, key, value = self.given(self.norm(x)).view(b, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(b, length, -1)
        return x + self.down(functional.gelu(self.up(context)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def batch(number: int) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(number))


def distribute(net: nn.Module, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in net.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def trained(net: nn.Module, called: Any, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = called(batch(2 * number + rank))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_rank(rank: int, folder: str) -> None:
    """Train in each way, compiled and not, and keep losses and how many regions ran tuned."""
    torch.set_num_threads(1)
    os.environ["AUTOTUNER_DATABASE"] = f"{folder}/known.sqlite"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = {}
    for how in ("ddp", "fsdp"):
        torch._dynamo.reset()
        tuned = Tuned()
        net = distribute(Net(), how)
        losses = trained(net, torch.compile(net, backend="autotuner", options=OPTIONS, dynamic=False), rank)
        twin = distribute(Net(), how)
        found[how] = losses, trained(twin, twin, rank), tuned.places
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_processes_that_share_a_model_train_as_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNER_SERVER", raising=False)
    torch._dynamo.reset()
    remember(tmp_path / "known.sqlite", Net(), [batch(0)])
    spawn(run_rank, (str(tmp_path),), RANKS)
    for rank in range(RANKS):
        for how, (ours, theirs, places) in torch.load(tmp_path / f"{rank}.pt").items():
            assert ours == pytest.approx(theirs, rel=1e-5), how
            assert places == LAYERS, how
