"""Gradients that two processes exchange in `training_step`: steps are those of one process with the whole batch."""

import copy
import os
import re
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import destroy_process_group
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import autotuner
from autotuner.errors import InputError, PeerLostError
from autotuner.runtime.data_parallel import together
from autotuner.runtime.gradient_exchange import GradientExchange
from autotuner.runtime.processes import Peers
from autotuner.runtime.scratch import shared_scratch
from autotuner.runtime.whole_step import WholeStep
from tests.processes import spawn
from tests.runtime.whole_steps import Recorder

pytestmark = pytest.mark.slow

RANKS, STEPS, MAX_NORM = 2, 6, 0.05
KEPT: list[WholeStep] = []


class Net(nn.Module):
    """A batch norm, whose statistics are buffers, a parameter that no loss depends on, and one that only some do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(40, 40), nn.BatchNorm1d(40, momentum=0.5)
        self.layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        self.unused, self.sometimes, self.last = nn.Linear(3, 3), nn.Linear(40, 40), nn.Linear(40, 1)

    def forward(self, x: Tensor, also: bool = True, norms: bool = True) -> Tensor:
        x = self.first(x)
        x = functional.gelu(self.layers(self.norm(x) if norms else x))
        return self.last(self.sometimes(x) if also else x)  # type: ignore[no-any-return]


def loss_of(model: Any, batch: Any) -> Tensor:
    found: Tensor = model(batch["x"], batch.get("also", True)).square().mean()
    return found


def plain_loss(model: Any, batch: Any) -> Tensor:
    """Without the batch norm, which computes other things of half a batch."""
    x = functional.gelu(model.layers(model.first(batch["x"])))
    found: Tensor = model.last(model.sometimes(x)).square().mean()
    return found


def hooked_loss(model: Any, batch: Any) -> Tensor:
    """The same of a model that has to be called itself."""
    found: Tensor = model(batch["x"], norms=False).square().mean()
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def switching_loss(model: Any, batch: Any) -> Tensor:
    """The same, with a part of the model brought to another mode within the step."""
    getattr(model, "_orig_mod", model).norm.train(batch["trains"])
    return plain_loss(model, batch)


def batch(number: int) -> dict[str, Any]:
    return {"x": torch.randn(8, 40, generator=torch.Generator().manual_seed(number))}


def own(rank: int, number: int) -> dict[str, Any]:
    return {"x": batch(number)["x"][4 * rank : 4 * rank + 4]}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def uses_all(rank: int, number: int) -> bool:
    """Say whether a process uses a layer in a step: neither in the first two, one in the third, both, none, both."""
    return number in (3, 5) or (number == 2 and rank == 0)


def stepped(model: Any, loss: Any = plain_loss, make: Any = adamw, **options: Any) -> tuple[WholeStep, Any]:
    optimizer = make(model)
    return autotuner.training_step(model, optimizer, loss, compiler="eager", **options), optimizer


def run(step: WholeStep, rank: int, micro: int = 1) -> list[float]:
    norms = []
    for number in range(STEPS):
        step(*(own(rank, 100 * part + number) for part in range(micro)))
        norms.append(-1.0 if step.gradient_norm is None else float(step.gradient_norm))
    return norms


def captured(rank: int, micro: int = 1) -> tuple[Any, str]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)  # which takes capturable on the CPU
    recorder = Recorder(model, optimizer)
    exchange = GradientExchange(model, optimizer, Peers(), recorder, max_norm=MAX_NORM)
    gives_back = list[bool]()

    def loss(given: Any) -> Tensor:
        scratch = shared_scratch()
        assert scratch is not None
        gives_back.append(scratch.is_of_one_step)
        return plain_loss(model, given)

    step = WholeStep(model, optimizer, loss, max_norm=MAX_NORM, recorder=recorder, exchange=exchange)
    norms = run(step, rank, micro)
    KEPT.append(step)
    return (norms, values(model), recorder.captures, step.replays, gives_back), str(step)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["AUTOTUNER_DATABASE"] = f"{folder}/{rank}.sqlite"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}

    model: Any = Net(seed=rank)  # the first one's values are sent
    step, _ = stepped(model, max_norm=MAX_NORM)
    found["exact"] = run(step, rank), values(model)
    found["words"] = str(step)
    model = Net()
    step, _ = stepped(DistributedDataParallel(model, find_unused_parameters=True))
    found["ddp"] = run(step, rank, micro=2), values(model)
    model = Net()
    step, optimizer = stepped(model, max_norm=MAX_NORM, shard_optimizer=True)
    found["shards"] = run(step, rank), values(model)
    found["kept"] = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.numel() > 1)
    state = step.optimizer_state()
    found["state"] = state
    again = Net()
    again.load_state_dict(model.state_dict())
    step, optimizer = stepped(again, max_norm=MAX_NORM, shard_optimizer=True)
    sent = [copy.deepcopy(state)]
    distributed.broadcast_object_list(sent, src=0)
    optimizer.load_state_dict(sent[0])
    found["resumed"] = run(step, rank), values(again)
    found["kept again"] = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.numel() > 1)
    model = Net()
    step, _ = stepped(model, max_norm=MAX_NORM, clip_per_bucket=True)
    found["per bucket"] = run(step, rank), values(model)
    found["captured"], found["captured words"] = captured(rank)
    found["captured, micro-batches"], _ = captured(rank, micro=2)
    model = Net()
    step, _ = stepped(model, max_norm=MAX_NORM, shard_optimizer=True)
    found["shards, micro-batches"] = run(step, rank, micro=2), values(model)
    model = Net()
    step, _ = stepped(model, max_norm=MAX_NORM, clip_per_bucket=True)
    found["per bucket, micro-batches"] = run(step, rank, micro=2), values(model)

    model = Net()
    step, _ = stepped(model, loss_of)
    for number in range(STEPS):
        step({**own(rank, number), "also": uses_all(rank, number)})
    found["buffers"], found["sometimes"] = values(model), [b.clone() for b in model.buffers()]

    for shards in (False, True):
        model = Net()
        step, _ = stepped(model, shard_optimizer=shards)
        for number in range(STEPS):
            thaw(model, number)
            step(own(rank, number))
        found[f"thawed {shards}"] = values(model)
        model = Net()
        step, _ = stepped(model, switching_loss, max_norm=MAX_NORM, shard_optimizer=shards)
        for number in range(STEPS):
            step({**own(rank, number), "trains": number not in (3, 5)})
        found[f"switched {shards}"] = values(model)
    found.update(left_to_torch(rank))

    model = Net()
    step, _ = stepped(model, process_group=distributed.new_group([rank], use_local_synchronization=True))
    found["alone"] = run(step, rank), values(model)
    found["errors"] = errors(rank)
    before = len(KEPT[0]._known)
    destroy_process_group()
    found["graphs"] = before, len(KEPT[0]._known)
    torch.save(found, f"{folder}/{rank}.pt")


def thaw(model: nn.Module, number: int) -> None:
    """Train the last layers alone in the first steps, then all, and the first ones alone in the last step."""
    for name, parameter in model.named_parameters():
        is_last = name.startswith(("sometimes", "last"))
        parameter.requires_grad_(is_last if number < 2 else not is_last if number == STEPS - 1 else True)


def left_to_torch(rank: int) -> dict[str, Any]:
    """Train what torch exchanges by itself: FSDP2, and DistributedDataParallel with a communication hook."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    for name in ("fsdp", "hook"):
        model = Net()
        if name == "fsdp":
            wrapped: Any = fully_shard(model, mesh=mesh)
        else:
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        step, _ = stepped(wrapped, hooked_loss)
        for number in range(STEPS):
            step(own(rank, number))
        found[name] = [getattr(value, "full_tensor", lambda value=value: value)() for value in values(model)]
        found[f"{name} refused"] = together(wrapped).refused
    return found


def errors(rank: int) -> list[str]:
    told = []

    def note(call: Callable[[], Any]) -> None:
        with pytest.raises(InputError) as caught:
            call()
        told.append(str(caught.value))

    note(lambda: stepped(nn.Linear(40, 40 + rank)))
    note(lambda: stepped(nn.Sequential(*(nn.Linear(40, 40) for _ in range(1 + rank)))))
    note(lambda: stepped(Net(), optimizer_in_backward=True))
    note(lambda: stepped(Net(), shard_optimizer=True, make=lambda m: torch.optim.LBFGS(m.parameters())))
    table = nn.Embedding(10, 4, sparse=True)
    step, _ = stepped(table, lambda m, b: m(b).sum(), make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    note(lambda: step(torch.arange(4)))
    layers = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))

    def thawing(model: Any, given: Tensor) -> Tensor:
        layers[0].requires_grad_(given.shape[0] > 1)
        found: Tensor = model(given).sum()
        return found

    step, _ = stepped(layers, thawing)
    step(torch.ones(1, 4))
    note(lambda: step(torch.ones(2, 4)))
    return told


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (str(folder),), RANKS)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def trained_alone(
    micro: int = 1, max_norm: float | None = None, loss: Any = plain_loss, rows: slice = slice(0, 8), steps: int = STEPS
) -> tuple[list[float], list[Tensor], torch.optim.Optimizer]:
    model = Net()
    optimizer = adamw(model)
    norms = []
    for number in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            given = {"x": batch(100 * part + number)["x"][rows]}
            torch.autograd.backward(loss(model, given) / micro)
        norms.append(-1.0 if max_norm is None else float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return norms, values(model), optimizer


def assert_equal(found: tuple[list[float], list[Tensor]], norms: list[float], wanted: list[Tensor]) -> None:
    assert found[0] == pytest.approx(norms, rel=1e-4)
    for mine, other in zip(found[1], wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["exact", "shards", "captured"])
def test_clipped_steps_are_those_of_one_process_with_the_whole_batch(found: list[dict[str, Any]], way: str) -> None:
    norms, wanted, _ = trained_alone(max_norm=MAX_NORM)
    assert all(norm > 2 * MAX_NORM for norm in norms[:2])  # so that clipping does something
    for rank in found:
        assert_equal(rank[way][:2], norms, wanted)


def test_a_model_in_ddp_is_unwrapped_and_micro_batches_are_exchanged_once(found: list[dict[str, Any]]) -> None:
    norms, wanted, _ = trained_alone(micro=2)
    for rank in found:
        assert_equal(rank["ddp"], norms, wanted)


@pytest.mark.parametrize("way", ["shards", "captured"])
def test_clipped_steps_of_micro_batches_are_those_of_one_process_with_the_whole_batches(
    found: list[dict[str, Any]], way: str
) -> None:
    norms, wanted, _ = trained_alone(micro=2, max_norm=MAX_NORM)
    for rank in found:
        assert_equal(rank[f"{way}, micro-batches"][:2], norms, wanted)


def test_processes_stay_equal_bit_by_bit(found: list[dict[str, Any]]) -> None:
    first, second = found
    for way in ("exact", "ddp", "shards", "resumed", "per bucket", "shards, micro-batches"):
        assert all(map(torch.equal, first[way][1], second[way][1])), way
    assert all(map(torch.equal, first["buffers"], second["buffers"]))
    assert all(map(torch.equal, first["sometimes"], second["sometimes"]))


def test_a_step_is_captured_and_its_replays_exchange(found: list[dict[str, Any]]) -> None:
    for rank, way in product(found, ("captured", "captured, micro-batches")):
        *_, captures, replays, gives_back = rank[way]
        assert (captures, replays) == (1, STEPS - 3)  # the third step is the first with the buckets that were chosen
        # What such a step kept would lie beside the graph's memory.
        assert all(gives_back[: 6 if "micro" in way else 3])
        assert rank["captured words"].startswith("3 of 6 steps were replayed, from 1 CUDA graphs; gradients of 2 proc")
        assert "gradients of 2 processes are averaged in 1 buckets of up to" in rank["words"]
        assert "as predicted" in rank["words"]


def test_graphs_go_before_the_process_group_does(found: list[dict[str, Any]]) -> None:
    assert [rank["graphs"] for rank in found] == [(1, 0), (1, 0)]


def test_the_state_is_shared_out_and_can_be_put_together(found: list[dict[str, Any]]) -> None:
    _, _, optimizer = trained_alone(max_norm=MAX_NORM)
    whole = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.numel() > 1)
    first, second = (rank["kept"] for rank in found)
    assert first + second == whole
    assert abs(first - second) <= 0.2 * whole
    assert [rank["kept again"] for rank in found] == [first, second]
    assert found[1]["state"] is None
    mine, other = found[0]["state"], optimizer.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for key, state in other["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(mine["state"][key][name], value, rtol=1e-3, atol=1e-6)


def test_training_goes_on_from_a_state_that_was_put_together(found: list[dict[str, Any]]) -> None:
    model = Net()
    optimizer = adamw(model)
    for number in (*range(STEPS), *range(STEPS)):
        optimizer.zero_grad()
        torch.autograd.backward(plain_loss(model, batch(number)))
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    for mine, other in zip(found[0]["resumed"][1], values(model), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("micro", [1, 2])
def test_with_clipping_before_the_exchange_the_norm_is_each_process_s_own(
    found: list[dict[str, Any]], micro: int
) -> None:
    model, way = Net(), "per bucket" if micro == 1 else "per bucket, micro-batches"
    optimizer = adamw(model)
    for number in range(STEPS):  # one bucket has all parameters of this model
        of_ranks = []
        for rank in range(RANKS):
            model.zero_grad()
            for part in range(micro):
                torch.autograd.backward(plain_loss(model, own(rank, 100 * part + number)) / micro)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
            assert found[rank][way][0][number] == pytest.approx(norm, rel=1e-4)
            of_ranks.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *of_ranks, strict=True):
            parameter.grad = None if gradients[0] is None else sum(gradients) / RANKS
        optimizer.step()
    for mine, other in zip(found[0][way][1], values(model), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_parameter_without_gradient_anywhere_keeps_none_and_elsewhere_counts_as_zeros(
    found: list[dict[str, Any]],
) -> None:
    model = Net()
    twins = [model, Net()]
    optimizer = adamw(model)
    for number in range(STEPS):
        for rank, twin in enumerate(twins):
            twin.zero_grad()
            twin.load_state_dict(model.state_dict())
            torch.autograd.backward(loss_of(twin, {**own(rank, number), "also": uses_all(rank, number)}))
        for mine, other in zip(model.parameters(), twins[1].parameters(), strict=True):
            parts = [each for each in (mine.grad, other.grad) if each is not None]
            mine.grad = torch.stack(parts).sum(0) / RANKS if parts else None
        optimizer.step()
    for mine, wanted in zip(found[1]["buffers"], values(model), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    for mine, wanted in zip(found[1]["sometimes"], model.buffers(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_frozen_and_trained_again_keeps_its_state(found: list[dict[str, Any]]) -> None:
    model = Net()
    optimizer = adamw(model)
    for number in range(STEPS):
        thaw(model, number)
        optimizer.zero_grad()
        torch.autograd.backward(plain_loss(model, batch(number)))
        optimizer.step()
    for shards in (False, True):
        for mine, wanted in zip(found[1][f"thawed {shards}"], values(model), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, found[1]["thawed False"], found[1]["thawed True"]))


@pytest.mark.parametrize("shards", [False, True])
def test_parts_that_change_their_mode_within_a_step_change_nothing(found: list[dict[str, Any]], shards: bool) -> None:
    _, wanted, _ = trained_alone(max_norm=MAX_NORM)
    for rank in found:
        for mine, other in zip(rank[f"switched {shards}"], wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_what_torch_exchanges_is_left_to_it(found: list[dict[str, Any]]) -> None:
    _, wanted, _ = trained_alone()
    for rank in found:
        for name in ("fsdp", "hook"):
            for mine, other in zip(rank[name], wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert rank["fsdp refused"] == "the parameters are sharded over several processes"
        assert rank["hook refused"] == "a communication hook of DistributedDataParallel exchanges gradients"


def test_a_group_of_one_process_exchanges_nothing(found: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        norms, wanted, _ = trained_alone(rows=slice(4 * rank, 4 * rank + 4))
        assert_equal(found[rank]["alone"], norms, wanted)


def test_what_cannot_be_exchanged_is_refused_in_a_sentence(found: list[dict[str, Any]]) -> None:
    for rank, (shape, count, in_backward, parts, sparse, thawed) in enumerate(each["errors"] for each in found):
        assert shape == (
            f"parameter 0 of the optimizer is ({40 + rank}, 40) torch.float32 in process {rank}, and another "
            "elsewhere: give all processes the same model"
        )
        assert count == "processes train other numbers of parameters, by rank [2, 4]: give all the same model"
        assert in_backward.startswith(
            "optimizer_in_backward updates a parameter before several processes have exchanged"
        )
        assert parts.startswith("shard_optimizer has each process move some parameters, and LBFGS may do more")
        assert sparse == "gradients are sparse: several processes exchange dense ones, so use sparse=False"
        assert re.fullmatch(
            r"a parameter of shape \(4.*\) was frozen when the step began: set requires_grad between steps", thawed
        )


def die(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    step, _ = stepped(Net())
    run(step, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange = step._exchange
    assert exchange is not None
    assert not exchange.peers.is_lost
    with pytest.raises(PeerLostError) as caught:
        run(step, rank)
    assert exchange.peers.is_lost  # so that nobody waits for the device at the end
    Path(f"{folder}/told").write_text(str(caught.value))


def test_where_one_process_is_killed_the_other_ends_with_a_sentence(tmp_path: Path) -> None:
    context = spawn(die, (str(tmp_path),), RANKS, join=False)
    for process in context.processes:
        process.join(240)
    assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL]
    assert (
        (tmp_path / "told")
        .read_text()
        .startswith("process 0 of 2 waits for another one, which has ended or does not answer; its own log says why.")
    )


def test_clipping_each_bucket_needs_a_norm() -> None:
    with pytest.raises(
        InputError, match="clip_per_bucket divides max_norm among buckets of gradients, and none is giv"
    ):
        stepped(Net(), clip_per_bucket=True)
