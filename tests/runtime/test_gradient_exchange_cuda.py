"""Gradients that processes exchange inside of a CUDA graph."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import autotuner
from autotuner.runtime.devices import CudaRuntime
from autotuner.runtime.gradient_exchange import GradientExchange
from autotuner.runtime.one_pass_updates import OnePassUpdates
from autotuner.runtime.parameter_gather import PARTS
from autotuner.runtime.processes import Peers
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.whole_step import WholeStep
from tests.runtime.test_whole_step_cuda import encoder, sequences, squared, tuned

pytestmark = pytest.mark.gpu

RANKS, STEPS, MAX_NORM, WIDTH = 2, 8, 0.05, 512
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "shards": {"shard_optimizer": True},
    "shards, unclipped": {"shard_optimizer": True, "max_norm": None},
    "shards, per bucket": {"shard_optimizer": True, "clip_per_bucket": True},
    "shards, plain": {"shard_optimizer": True, "capture": False},
    "per bucket": {"clip_per_bucket": True},
    "plain": {"capture": False},
    "micro-batches": {"micro": 2},
    "micro-batches, shards": {"micro": 2, "shard_optimizer": True},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5)).cuda()


def loss_of(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def batch(number: int, rows: slice, length: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(length, WIDTH, generator=generator), torch.randint(0, 5, (length,), generator=generator)
    return {"x": x[rows].cuda(), "y": y[rows].cuda()}


def noting(events: list[str], told: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        events.append(told)
        return own(*given, **named)

    return noted


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def alone(max_norm: float | None, micro: int = 1) -> list[Tensor]:
    model = net()
    optimizer = adamw(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            torch.autograd.backward(loss_of(model, batch(number + 100 * part, slice(0, 16))) / micro)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("shards", [False, True])
def test_one_process_s_exchange_is_captured_and_changes_nothing(tmp_path: Path, *, shards: bool) -> None:
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = net()
        optimizer = adamw(model)
        runtime = CudaRuntime(torch.device("cuda"))
        exchange = GradientExchange(model, optimizer, Peers(), runtime, max_norm=MAX_NORM, shards=shards)
        step = WholeStep(
            model,
            optimizer,
            lambda given: loss_of(model, given),
            max_norm=MAX_NORM,
            recorder=runtime,
            exchange=exchange,
        )
        for number in range(STEPS):
            step(batch(number, slice(0, 16)))
        before = 2 if shards else 3  # where the state is shared out, the first buckets stay
        assert (step.replays, step.plain) == (STEPS - before, before), str(step)
        for mine, other in zip(values(model), alone(MAX_NORM), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    finally:
        distributed.destroy_process_group()  # which would wait for ever for the graph, were it not closed before


def test_regions_write_gradients_to_buckets_inside_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    copied: list[int] = []
    copy, runtime = torch._foreach_copy_, CudaRuntime(torch.device("cuda"))

    def noted(targets: list[Tensor], sources: list[Tensor]) -> None:
        if runtime.is_capturing():
            copied.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    try:
        regions: list[TunedRegion] = []
        model = encoder().train().cuda()
        twin = deepcopy(model)
        optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin))
        step = WholeStep(
            model, optimizer, tuned(regions, partial(squared, model)), recorder=runtime,
            exchange=GradientExchange(model, optimizer, Peers(), runtime),
        )  # fmt: skip
        given = sequences(2 * STEPS)
        for first, second in zip(given[::2], given[1::2], strict=True):
            step(first, second)
            other.zero_grad()
            for each in (first, second):
                torch.autograd.backward(squared(twin, {key: value.cuda() for key, value in each.items()}) / 2)
            other.step()
        assert (step.replays, step.plain, len(regions)) == (STEPS - 3, 3, 2), str(step)
        for mine, wanted in zip(values(model), values(twin), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
        assert sum(copied) <= 4  # query, key and value of two layers are parts of a weight, and of a bias
    finally:
        distributed.destroy_process_group()


def run_rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    rows = slice(8 * rank, 8 * rank + 8)
    events: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(Peers, "broadcast", noting(events, "sent", Peers.broadcast))
    patch.setattr(OnePassUpdates, "step", noting(events, "updated", OnePassUpdates.step))
    for name, given in WAYS.items():
        torch._dynamo.reset()
        events.clear()
        options = {"max_norm": MAX_NORM} | given
        micro = options.pop("micro", 1)
        model = net()
        optimizer = adamw(model)
        step = autotuner.training_step(model, optimizer, loss_of, database=f"{folder}/{rank}.sqlite", **options)
        for number in range(STEPS):
            step(*(batch(number + 100 * part, rows) for part in range(micro)))
        read = values(model)  # at once, behind the current stream alone
        kept = sum(each.numel() for own in optimizer.state.values() for each in own.values() if each.numel() > 1)
        found[name] = read, step.replays, kept, str(step), list(events)
    patch.undo()
    for name, graphs in (("shapes", 8), ("mixed", 1)):
        torch._dynamo.reset()
        model = net()
        optimizer = adamw(model)
        step = autotuner.training_step(
            model, optimizer, loss_of, max_norm=MAX_NORM, max_graphs=graphs, database=f"{folder}/{rank}.sqlite"
        )
        for number in range(3 * STEPS):  # of other shapes in other steps, so one replays while another does not
            length = 16 if number % 3 or rank else 24
            step(batch(number, slice(0, length), length))
        found[name] = values(model), step.replays, 0, str(step)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_capture_steps_that_are_those_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    spawn(run_rank, (str(tmp_path),), RANKS)  # type: ignore[no-untyped-call]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS))
    for name, options in WAYS.items():
        assert all(map(torch.equal, first[name][0], second[name][0])), name
        shards = "shard_optimizer" in options
        before = STEPS if "capture" in options else 2 if shards else 3  # of the state's owners, the first buckets stay
        assert first[name][1] == STEPS - before, first[name][3]
        if "clip_per_bucket" not in options:
            wanted = alone(options.get("max_norm", MAX_NORM), options.get("micro", 1))
            for mine, other in zip(first[name][0], wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=name)
        if shards and "capture" not in options:
            updates = [number for number, event in enumerate(first[name][4]) if event == "updated"]
            assert 2 <= len(updates) <= PARTS
            assert "sent" in first[name][4][updates[0] : updates[1]]
    assert first["shards"][2] + second["shards"][2] == first["exact"][2]
    for name in ("shapes", "mixed"):  # torch's own step would round otherwise than a replayed one
        assert all(map(torch.equal, first[name][0], second[name][0])), name
    assert (first["shapes"][1], second["shapes"][1]) == (3 * STEPS - 4, 3 * STEPS - 4), first["shapes"][3]
    assert 0 < first["mixed"][1] <= second["mixed"][1] - STEPS // 2, (first["mixed"][3], second["mixed"][3])
