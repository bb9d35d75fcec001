"""Clipping in the buckets of DDP: two processes beside one that has the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import autotuner
from autotuner.errors import InputError
from tests.processes import spawn

RANKS, STEPS, MAX_NORM = 2, 4, 0.05


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)), nn.Linear(40, 1))


def batch(number: int) -> Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(number))


def trained(model: Any, rows: slice, clip: Any, accumulates: bool) -> list[Tensor]:
    """Return the norms of each step, and the parameters behind them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if accumulates and isinstance(model, DistributedDataParallel):
            with model.no_sync():
                torch.autograd.backward(model(batch(100 + step)[rows]).square().mean())
        elif accumulates:
            torch.autograd.backward(model(batch(100 + step)[rows]).square().mean())
        torch.autograd.backward(model(batch(step)[rows]).square().mean())
        norms.append(clip().detach().clone())
        optimizer.step()
    return [*norms, *(parameter.detach().clone() for parameter in model.parameters())]


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = {}
    own = slice(4 * rank, 4 * rank + 4)
    for accumulates in (False, True):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.01, gradient_as_bucket_view=accumulates)
        clipping = autotuner.clip_in_buckets(model, MAX_NORM)
        found[f"exact {accumulates}"] = trained(model, own, clipping.clip, accumulates)
    model = DistributedDataParallel(net())
    found["one bucket"] = trained(model, own, autotuner.clip_in_buckets(model, MAX_NORM, per_bucket=True).clip, False)
    model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
    clipping = autotuner.clip_in_buckets(model, MAX_NORM, per_bucket=True)
    torch.autograd.backward(model(batch(0)[own]).square().mean())
    gradients = [parameter.grad for parameter in model.parameters()]
    found["gradients"] = [each for each in gradients if each is not None]
    clipping.clip()
    with pytest.raises(InputError, match="no gradients were exchanged since the last call of clip"):
        clipping.clip()
    with pytest.raises(InputError, match="the model takes no communication hook"):
        autotuner.clip_in_buckets(model, MAX_NORM)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (str(folder),), RANKS)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("accumulates", [False, True])
def test_steps_are_those_of_one_process_with_the_whole_batch(
    found: list[dict[str, list[Tensor]]], accumulates: bool
) -> None:
    model = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    wanted = trained(model, slice(0, 8), lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM), accumulates)
    assert all(float(norm) > 2 * MAX_NORM for norm in wanted[:2])  # so that clipping does something
    assert any(not torch.equal(one, other) for one, other in zip(before, wanted[STEPS:], strict=True))
    for rank in found:
        for mine, other in zip(rank[f"exact {accumulates}"], wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_each_bucket_is_clipped_before_the_exchange_where_that_is_asked_for(
    found: list[dict[str, list[Tensor]]],
) -> None:
    model = net()
    for step in range(STEPS):  # with one bucket, each process clips all of its own gradients
        of_ranks = []
        for rank in range(RANKS):
            model.zero_grad()
            torch.autograd.backward(model(batch(step)[4 * rank : 4 * rank + 4]).square().mean())
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            torch.testing.assert_close(found[rank]["one bucket"][step], norm)
            of_ranks.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, *gradients in zip(model.parameters(), *of_ranks, strict=True):
                parameter.sub_(sum(each for each in gradients if each is not None) / RANKS)
    for mine, other in zip(found[0]["one bucket"][STEPS:], model.parameters(), strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-4, atol=1e-6)
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in found[0]["gradients"]]))
    assert 0.3 * MAX_NORM < float(norm) <= MAX_NORM * 1.0001
    assert all(map(torch.equal, found[0]["gradients"], found[1]["gradients"]))


def test_what_is_not_in_ddp_is_refused() -> None:
    with pytest.raises(InputError, match="is for DistributedDataParallel; given: Linear"):
        autotuner.clip_in_buckets(nn.Linear(2, 2), 1.0)  # type: ignore[arg-type]
