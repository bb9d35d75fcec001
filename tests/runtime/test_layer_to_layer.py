"""Steps that run layer after layer, beside plain accumulation."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autotuner
from autotuner.errors import BudgetError, InputError
from autotuner.runtime.devices import CpuRuntime
from autotuner.runtime.devices.cpu import DirectLink
from autotuner.runtime.layer_to_layer.call import AutocastState
from autotuner.runtime.layer_to_layer.rounded_adam import RoundedAdam
from autotuner.runtime.layer_to_layer.step import LayerToLayerStep
from autotuner.runtime.layer_to_layer.times import LayerTimes


class Block(nn.Module):
    """A layer with a normalisation, two products, and a side input that is added."""

    def __init__(self, width: int, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.rate = rate

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        read = self.norm(x) if side is None else self.norm(x) + side
        hidden = functional.dropout(functional.gelu(self.grow(read)), self.rate, self.training)
        found: Tensor = x + self.shrink(hidden)
        return found


class Net(nn.Module):
    """An embedding, layers, and a head; the embedding's part `side` goes to all layers."""

    def __init__(self, depth: int = 4, width: int = 8, rate: float = 0.0, sides: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.side = nn.Linear(width, width) if sides else None
        self.blocks = nn.ModuleList(Block(width, rate) for _ in range(depth))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        side = None if self.side is None else self.side(x)
        for block in self.blocks:
            x = block(x, side)
        found: Tensor = self.head(x)
        return found


def of(model: nn.Module, place: int) -> Block:
    block = model.get_submodule(f"blocks.{place}")
    assert isinstance(block, Block)
    return block


def loss_of(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 11, (3, 5), generator=generator) for name in ("tokens", "labels")}


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.02, "fused": True, **options})


Make = Callable[[nn.Module], torch.optim.Optimizer]


def weighted(model: nn.Module) -> torch.optim.AdamW:
    """AdamW of two groups, of which one decays."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02, fused=True)


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Have a method note the arguments of its calls."""
    calls: list[Any] = []
    method = getattr(owner, name)

    def noting(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    monkeypatch.setattr(owner, name, noting)
    return calls


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *batches: Any,
    loss: Any = loss_of,
    max_norm: float | None = None,
) -> Tensor:
    total: Tensor | None = None
    for each in batches:
        found = loss(model, each) / len(batches) if len(batches) > 1 else loss(model, each)
        found.backward()
        total = found.detach() if total is None else total + found.detach()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    assert total is not None
    return total


def pair(model: nn.Module, make: Make = adamw, loss: Any = loss_of, **options: Any) -> tuple[Any, LayerToLayerStep]:
    """Return a plain step, and one layer to layer of a copy; `step.model` is that copy."""
    twin = copy.deepcopy(model)
    own = make(model)
    step = autotuner.layer_to_layer(twin, make(twin), loss, compiler=None, **options)

    def plain(*batches: Any, max_norm: float | None = None) -> Tensor:
        return plain_step(model, own, *batches, loss=loss, max_norm=max_norm)

    return plain, step


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for (name, mine), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("sides", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_steps_are_those_of_plain_accumulation_bit_by_bit(in_backward: bool, sides: bool, parts: int) -> None:
    torch.manual_seed(0)
    model = Net(sides=sides)
    twin = copy.deepcopy(model)
    own = adamw(model)
    step = autotuner.layer_to_layer(twin, adamw(twin), loss_of, compiler=None, optimizer_in_backward=in_backward)
    for number in range(4):
        batches = [batch(10 * number + part) for part in range(parts)]
        assert torch.equal(step(*batches), plain_step(model, own, *batches))
        assert_equal(model, twin)
        assert all(parameter.grad is None for parameter in twin.parameters())


class LateLink(DirectLink):
    """Copies as late as they may be: when they are waited for. Until then, nothing sensible is in their targets."""

    def down(self, target: Tensor, source: Tensor, first: bool = False) -> Any:  # noqa: ARG002
        target.fill_(255)
        return self._queued(target, source)

    def up(self, target: Tensor, source: Tensor) -> Any:
        target.fill_(255)
        return self._queued(target, source)

    def wait(self, ticket: Any) -> None:
        ticket()

    def wait_on_host(self, ticket: Any) -> None:
        ticket()

    def seconds(self, ticket: Any) -> float:
        ticket()
        return 1.0

    def _queued(self, target: Tensor, source: Tensor) -> Any:
        done: list[bool] = []

        def copy_once() -> None:
            if not done:
                done.append(True)
                target.copy_(source)

        return copy_once


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_whatever_is_read_was_waited_for(monkeypatch: pytest.MonkeyPatch, in_backward: bool, stash: str) -> None:
    monkeypatch.setattr(CpuRuntime, "link", lambda _: LateLink())
    torch.manual_seed(0)
    plain, step = pair(Net(depth=6, sides=True), optimizer_in_backward=in_backward, stash=stash)
    for number in range(4):
        batches = [batch(10 * number + part) for part in range(2)]
        assert torch.equal(step(*batches), plain(*batches))


def test_dropout_is_the_same_when_a_layer_runs_again() -> None:
    torch.manual_seed(0)
    plain, step = pair(Net(rate=0.5))
    for number in range(3):
        torch.manual_seed(number)
        expected = plain(batch(number))
        after = torch.get_rng_state()
        torch.manual_seed(number)
        assert torch.equal(step(batch(number)), expected)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("sides", [False, True])
def test_the_norm_of_all_gradients_is_that_of_torch(sides: bool) -> None:
    torch.manual_seed(0)
    model = Net(sides=sides)
    twin = copy.deepcopy(model)
    own = adamw(model)
    step = autotuner.layer_to_layer(twin, adamw(twin), loss_of, compiler=None, max_norm=0.1)
    for number in range(3):
        torch.autograd.backward(loss_of(model, batch(number)))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        own.step()
        own.zero_grad()
        step(batch(number))
        assert step.gradient_norm is not None
        assert torch.equal(step.gradient_norm, norm)
        assert_equal(model, twin)


def test_norms_of_each_layer_are_cut_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    own = adamw(model)
    step = autotuner.layer_to_layer(
        twin, adamw(twin), loss_of, compiler=None, max_norm=0.1, clipping="layer", optimizer_in_backward=True
    )
    for number in range(3):
        torch.autograd.backward(loss_of(model, batch(number)))
        of_layers = [list(block.parameters()) for block in model.blocks]
        rest = [*model.embedding.parameters(), *model.head.parameters()]
        for part in (*of_layers, rest):
            torch.nn.utils.clip_grad_norm_(part, 0.1)
        own.step()
        own.zero_grad()
        step(batch(number))
        assert_equal(model, twin)


def test_a_gradient_that_is_not_finite_skips_the_whole_step() -> None:
    torch.manual_seed(0)
    model = Net()
    factor = torch.ones(())

    def loss(model: Any, given: Any) -> Tensor:
        return loss_of(model, given) * factor

    optimizer = adamw(model)
    step = autotuner.layer_to_layer(model, optimizer, loss, compiler=None)
    step(batch(0))
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    factor.fill_(torch.inf)
    step(batch(1))
    assert step.skipped == 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name])
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())
    factor.fill_(1.0)
    step(batch(2))
    assert step.skipped == 1
    assert all(int(state["step"]) == 2 for state in optimizer.state.values())


@pytest.mark.parametrize("make", [
    pytest.param(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), id="SGD"),
    pytest.param(lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01), id="Adafactor"),
    pytest.param(
        lambda m: torch.optim.AdamW(
            [
                {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=0.01,
        ),
        id="AdamW of two groups",
    ),
])  # fmt: skip
def test_any_optimizer_of_torch_with_its_schedule(make: Make) -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    mine, other = make(model), make(twin)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (step + 1)) for each in (mine, other)]
    step = autotuner.layer_to_layer(twin, other, loss_of, compiler=None)
    for number in range(3):
        plain_step(model, mine, batch(number))
        step(batch(number))
        for schedule in schedules:
            schedule.step()
        assert_equal(model, twin)


def test_a_saved_step_goes_on_where_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(rate=0.5)
    optimizer = adamw(model)
    step = autotuner.layer_to_layer(model, optimizer, loss_of, compiler=None)
    for number in range(2):
        step(batch(number))
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "drawn": torch.get_rng_state()},
        tmp_path / "saved.pt",
    )
    expected = [step(batch(number)) for number in range(2, 5)]

    for loads_first in (True, False):
        saved = torch.load(tmp_path / "saved.pt")
        assert list(saved["model"]) == list(Net().state_dict())
        other = Net(rate=0.5)
        its = adamw(other)
        if loads_first:
            other.load_state_dict(saved["model"])
            its.load_state_dict(saved["optimizer"])
        again = autotuner.layer_to_layer(other, its, loss_of, compiler=None)
        if not loads_first:
            other.load_state_dict(saved["model"])
            its.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["drawn"])
        assert [again(batch(number)) for number in range(2, 5)] == expected


def test_the_model_is_evaluated_between_steps_and_after_the_last_one() -> None:
    torch.manual_seed(0)
    model = Net(rate=0.5)
    twin = copy.deepcopy(model)
    own = adamw(model)
    step = autotuner.layer_to_layer(twin, adamw(twin), loss_of, compiler=None)
    for number in range(2):
        for each in (model, twin):
            each.eval()
        with torch.no_grad():
            assert torch.equal(twin(batch(9)["tokens"]), model(batch(9)["tokens"]))
        with torch.inference_mode():
            assert torch.equal(twin(batch(9)["tokens"]), model(batch(9)["tokens"]))
        for each in (model, twin):
            each.train()
        torch.manual_seed(number)
        expected = plain_step(model, own, batch(number))
        torch.manual_seed(number)
        assert torch.equal(step(batch(number)), expected)
    with pytest.raises(
        InputError, match=r"^blocks\.0 is on the host, and gradients are computed in step\(batch\) alone"
    ):
        twin(batch(0)["tokens"])
    step.close()
    torch.autograd.backward(loss_of(twin, batch(0)))
    assert of(twin, 0).grow.weight.grad is not None


def test_what_is_written_to_parameters_between_steps_counts() -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    own = adamw(model)
    step = autotuner.layer_to_layer(twin, adamw(twin), loss_of, compiler=None)
    step(batch(0))
    plain_step(model, own, batch(0))
    with torch.no_grad():
        for each in (model, twin):
            of(each, 1).grow.weight.mul_(2.0)
            of(each, 2).grow.weight.data = of(each, 2).grow.weight.data * 3.0
    assert torch.equal(step(batch(1)), plain_step(model, own, batch(1)))
    assert_equal(model, twin)


def test_parameters_that_are_frozen_stay_and_do_not_come_back() -> None:
    torch.manual_seed(0)
    model = Net()
    for block in (model.blocks[0], model.blocks[2]):
        block.requires_grad_(False)
    model.embedding.requires_grad_(False)
    model.blocks[1].grow.requires_grad_(False)
    twin = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    own = torch.optim.AdamW(trained, lr=0.02, fused=True)
    step = autotuner.layer_to_layer(
        twin, torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.02, fused=True), loss_of,
        compiler=None,
    )  # fmt: skip
    for number in range(3):
        assert torch.equal(step(batch(number)), plain_step(model, own, batch(number)))
    assert_equal(model, twin)


def test_weights_and_gradients_travel_once_for_all_micro_batches() -> None:
    model = Net(depth=6, width=64)
    of_layers = sum(p.numel() for block in model.blocks for p in block.parameters())
    matrices = sum(p.numel() for block in model.blocks for p in block.parameters() if p.dim() > 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None, link_dtype=torch.bfloat16)
        step(batch(0))
        before = step.bytes_down, step.bytes_up
        step(*(batch(number) for number in range(8)))
    down, up = step.bytes_down - before[0], step.bytes_up - before[1]
    # The last two layers are still there when backward begins. Vectors travel as they are, in multiples of 256 bytes.
    assert up == pytest.approx(2 * matrices + 4 * (of_layers - matrices), rel=0.02)
    assert down == pytest.approx((2 - 2 / 6) * up, rel=1e-6)


def test_weights_are_not_kept_in_the_type_of_a_layer_s_own_autocast() -> None:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)

    def layer() -> float:
        with AutocastState.now("cpu").again(), torch.autocast("cpu", dtype=torch.bfloat16):
            return float(functional.linear(x, weight)[0, 0].detach())

    with torch.autocast("cpu", enabled=False):  # torch keeps what is cast until this is left
        before = layer()
        weight.data.fill_(2)
        assert (before, layer(), torch.is_autocast_cache_enabled()) == (2, 4, True)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("make", [adamw, weighted])
def test_matrices_that_are_rounded_on_the_way_are_those_of_autocast(
    monkeypatch: pytest.MonkeyPatch, make: Make, max_norm: float | None
) -> None:
    calls = counted(monkeypatch, RoundedAdam, "update")
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    own, other = make(model), make(twin)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (own, other)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = autotuner.layer_to_layer(
            twin, other, loss_of, compiler=None, link_dtype=torch.bfloat16, max_norm=max_norm
        )
        for number in range(5):
            mine, plain = step(batch(number)), plain_step(model, own, batch(number), max_norm=max_norm)
            assert mine.item() == pytest.approx(plain.item(), rel=1e-5 if number < 2 else 2e-3)
            for schedule in schedules:
                schedule.step()
    assert len(calls) == 4 * 2 * 4  # the first step makes the optimizer's state; matrices of four layers in all others
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)
        assert two.dtype == torch.float32
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.state[one]["step"] == other.state[two]["step"] == 5


def test_one_update_from_a_rounded_gradient_is_that_of_torch() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(33, 7))
    twin = nn.Parameter(weight.detach().clone())
    optimizers = [torch.optim.AdamW([each], lr=0.03, weight_decay=0.2, fused=True) for each in (weight, twin)]
    adam = RoundedAdam(optimizers[1])
    adam.prepare([twin], torch.bfloat16)
    assert not adam.groups([twin])  # it has no state yet
    for number in range(4):
        gradient = torch.randn(33, 7).bfloat16()
        weight.grad = gradient.float() * 0.5
        optimizers[0].step()
        if number == 0:
            twin.grad = gradient.float() * 0.5
            optimizers[1].step()
            continue
        rounded = torch.empty(33, 7, dtype=torch.bfloat16)
        adam.update(twin, adam.groups([twin])[id(twin)], gradient, rounded, 0.5)
        assert torch.equal(rounded, twin.detach().bfloat16())
    torch.testing.assert_close(twin, weight, rtol=1e-6, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(optimizers[1].state[twin][name], optimizers[0].state[weight][name])


def test_without_a_compiler_updates_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr("autotuner.runtime.layer_to_layer.rounded_adam.compiled_for", without)
    calls = counted(monkeypatch, RoundedAdam, "update")
    model = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None, link_dtype=torch.bfloat16)
        first = float(step(batch(0)))
        assert float(step(batch(0))) < first
        step(batch(0))
    assert not calls


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}])
def test_updates_that_the_loop_does_not_know_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    calls = counted(monkeypatch, RoundedAdam, "update")
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    own = adamw(model, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = autotuner.layer_to_layer(twin, adamw(twin, **options), loss_of, compiler=None, link_dtype=torch.bfloat16)
        for number in range(3):
            assert torch.equal(step(batch(number)), plain_step(model, own, batch(number)))
    assert_equal(model, twin)
    assert not calls


def test_the_weights_of_two_layers_are_all_that_the_device_has() -> None:
    width, depth = 256, 8
    model = Net(depth=depth, width=width)
    layer_bytes = sum(p.nbytes for p in model.blocks[0].parameters())
    step = autotuner.layer_to_layer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, compiler=None)
    assert step.slot_bytes == pytest.approx(2 * layer_bytes, rel=0.01)


def test_inputs_of_layers_that_are_kept_on_the_host_are_those_between_the_first_and_the_last() -> None:
    torch.manual_seed(0)
    plain, step = pair(Net(depth=6, rate=0.5), stash="host")
    for number in range(3):
        torch.manual_seed(number)
        expected = plain(batch(number))
        torch.manual_seed(number)
        assert torch.equal(step(batch(number)), expected)
    # 3 * 5 tokens of 8 numbers are 480 bytes, in multiples of 256.
    assert step.stash_bytes == 4 * 512


class ScriptedMeter:
    """Says that a step needed so many bytes."""

    counts_all, others_bytes = True, 100

    def __init__(self, needed_bytes: int) -> None:
        self._needed_bytes = needed_bytes

    def lap(self) -> None: ...

    def stop(self) -> tuple[list[int], int]:
        return [1, self._needed_bytes, 2], self._needed_bytes - 50


@pytest.mark.parametrize("budget, on_host", [(12_300, False), (12_200, True)])
def test_inputs_of_layers_are_on_the_device_where_a_budget_leaves_room(
    monkeypatch: pytest.MonkeyPatch, budget: int, on_host: bool
) -> None:
    """10,050 bytes with them on the host, and four of them of 512 bytes; a 64th of the budget stays free."""
    monkeypatch.setattr(CpuRuntime, "has_own_memory", True)
    monkeypatch.setattr(CpuRuntime, "meter", lambda _: ScriptedMeter(10_000))
    torch.manual_seed(0)
    plain, step = pair(Net(depth=6), memory_budget=budget)
    assert torch.equal(step(batch(0)), plain(batch(0)))
    assert step.stash_bytes == 4 * 512
    (needs,) = step.needs
    assert (needs.least_bytes, needs.inputs_bytes) == (10_050, 4 * 512)
    assert torch.equal(step(batch(1)), plain(batch(1)))
    assert step.stash_bytes == (4 * 512 if on_host else 0)
    assert f"2.00 KiB of inputs of layers kept on the {'host' if on_host else 'device'}" in str(step)
    step(batch(0), batch(1))  # another shape
    assert (len(step.needs), step.stash_bytes) == (2, 8 * 512)


def test_a_budget_below_what_a_step_needs_says_how_much_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "has_own_memory", True)
    monkeypatch.setattr(CpuRuntime, "meter", lambda _: ScriptedMeter(10_000))
    model = Net()
    step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None, memory_budget=5_000)
    with pytest.raises(
        BudgetError, match=r"^a step of this shape needs 9\.82 KiB on the device, .* the budget is 4\.88 KiB"
    ):
        step(batch(0))


def times(**given: Any) -> LayerTimes:
    zero: dict[str, Any] = dict.fromkeys(
        ("down_forward", "down_backward", "up_forward", "up_backward", "host", "measured"), 0.0
    )
    return LayerTimes(**{"forward": 1.0, "backward": 3.0, **zero, **given}, overlaps=False)


def test_a_step_is_bound_by_what_takes_longest_beside_the_rest() -> None:
    assert (times().predicted, times().bound) == (4.0, "computing")
    assert (times(down_forward=2.0, down_backward=2.0).predicted) == 5.0
    assert times(down_forward=4.0, down_backward=2.0).bound == "the link"
    after = times(host=5.0, measured=10.0)
    assert (after.predicted, after.bound) == (9.0, "updates on the host")
    assert str(after).endswith("updates 5 s; 9 s where all that can overlaps, bound by updates on the host")
    beside = LayerTimes(1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 5.0, 10.0, overlaps=True)
    assert (beside.predicted, beside.bound) == (6.0, "updates on the host")
    # Forward of one micro-batch takes 0.5 s beside copies of 2, backward 1.5 s beside updates of 5.
    slow = LayerTimes(1.0, 3.0, 2.0, 2.0, 0.0, 0.0, 5.0, 10.0, overlaps=True, micro_batches=2)
    assert slow.enough == 4
    assert str(slow).endswith("; 4 micro-batches hide the rest")
    assert times().enough == 1


def test_a_device_that_waits_for_calls_asks_for_larger_micro_batches() -> None:
    # What the layers take is then what the host takes to call them: a micro-batch takes as long as a larger one.
    waits = times(waiting=0.75)
    assert (waits.predicted, waits.bound) == (4.0, "the host's calls of layers")
    assert str(waits).endswith("bound by the host's calls of layers; larger micro-batches need fewer calls")
    assert times(waiting=0.25).bound == "computing"
    assert times(waiting=0.75, down_forward=9.0).bound == "the link"
    assert times(waiting=0.75, host=9.0, micro_batches=2).enough == 2


@pytest.mark.parametrize("count", [1, 3])
def test_a_device_waits_where_it_has_come_to_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    asked: list[float] = []
    answers = iter([True, False] * 4)

    def has_passed(_: CpuRuntime, mark: float) -> bool:
        asked.append(mark)
        return next(answers)

    monkeypatch.setattr(CpuRuntime, "has_passed", has_passed)
    model = Net()
    step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None)
    began = perf_counter()
    step(*map(batch, range(count)))
    assert step.times is not None
    assert step.times.waiting == 0.5
    assert len(asked) == 8  # four layers, forward and backward
    assert asked == sorted(asked)
    assert asked[0] > began


def test_a_step_says_what_it_took() -> None:
    model = Net()
    step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None, stash="host")
    assert str(step).startswith("4 layers on the host, ")
    assert " took " not in str(step)
    step(batch(0), batch(1))
    assert step.times is not None
    of = step.times
    assert min(of.forward, of.backward, of.down_forward, of.down_backward, of.up_forward, of.up_backward, of.host) > 0
    assert of.forward + of.backward < of.measured
    assert "; a step took " in str(step)


def refusals() -> list[Any]:
    tied = Net()
    of(tied, 1).grow.weight = of(tied, 0).grow.weight
    twice = Net()
    twice.forward = lambda tokens: twice.head(of(twice, 0)(of(twice, 0)(twice.embedding(tokens))))  # type: ignore[method-assign]
    unused = Net()
    unused.forward = lambda tokens: unused.head(unused.embedding(tokens))  # type: ignore[method-assign]
    with torch.device("meta"):
        empty = Net()
    hooked = Net()
    of(hooked, 0).grow.weight.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    return [
        pytest.param(nn.Linear(2, 2), r"^Linear has no list of layers: an nn\.ModuleList", id="no layers"),
        pytest.param(
            tied, r"grow\.weight is a parameter of blocks\.0 and blocks\.1: .* parameters of its own", id="tied"
        ),
        pytest.param(empty, r"^embedding\.weight has no values yet: .* parameters that are plain tensors", id="meta"),
        pytest.param(twice, r"^blocks\.0 runs twice in one forward", id="twice"),
        pytest.param(unused, r"^none of blocks\.0, blocks\.1, blocks\.2, blocks\.3 ran", id="unused"),
        pytest.param(hooked, r"^a parameter of blocks\.0 has a hook on its gradient", id="hook"),
    ]


@pytest.mark.parametrize("model, words", refusals())
def test_models_that_cannot_run_layer_to_layer_say_why(model: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=words):
        autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None)(batch(0))


class Counting(Block):
    """A layer that computes something else each time."""

    calls = 0

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x, side) * self.calls


class Normalising(Block):
    """A layer with running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        found: Tensor = self.batch_norm(super().forward(x, side))
        return found


def test_a_model_that_checkpoints_its_layers_is_told_that_they_run_again_anyway() -> None:
    model = Net()

    def forward(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        found: Tensor = model.head(x)
        return found

    model.forward = forward  # type: ignore[method-assign]
    step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None)
    with pytest.raises(
        InputError, match=r"^blocks\.0 runs without gradients within a training step, as in a reentrant"
    ):
        step(batch(0))


@pytest.mark.parametrize("kind, words", [
    (Counting, r"^blocks\.\d computes other values when it runs again, .* apart of at most"),
    (Normalising, r"^blocks\.0 writes to its buffers, as batch normalisation does, and"),
])  # fmt: skip
def test_layers_that_are_not_the_same_twice_are_refused_and_nothing_is_updated(kind: Any, words: str) -> None:
    model = Net()
    model.blocks = nn.ModuleList(kind(8) for _ in range(3))
    step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None, optimizer_in_backward=True)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(InputError, match=words):
        step(batch(0))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize("options, words", [
    ({"link_dtype": torch.int8}, r"^link_dtype=torch\.int8: give torch\.bfloat16, or None for no rounding"),
    ({"stash": "disk"}, r"^stash='disk': give 'device' or 'host'"),
    ({"memory_budget": "1GiB", "stash": "host"}, r"^memory_budget says where the inputs of layers are kept, and"),
    ({"memory_budget": "1GiB"}, r"^memory_budget is for a device with memory of its own, and this one is cpu"),
    ({"clipping": "none"}, r"^clipping='none': give 'global' or 'layer'"),
    ({"max_norm": 1.0, "optimizer_in_backward": True}, r"^max_norm=1 needs the norm of all gradients before the first"),
])  # fmt: skip
def test_options_that_do_not_fit_say_what_would(options: dict[str, Any], words: str) -> None:
    model = Net()
    with pytest.raises(InputError, match=words):
        autotuner.layer_to_layer(model, adamw(model), loss_of, **options)


def test_a_host_without_room_is_told_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.api.layer_to_layer.available_host_bytes", lambda: 10_000)
    model = Net()
    with pytest.raises(InputError, match=r"needs 13\.9 KiB more on the host for 4 layers .* 9\.77 KiB are available"):
        autotuner.layer_to_layer(model, adamw(model), loss_of)
    assert "forward" not in vars(model.blocks[0])


def test_an_error_in_the_middle_of_a_step_leaves_model_and_threads_in_order() -> None:
    torch.manual_seed(0)
    model = Net()
    plain, step = pair(model)
    threads = threading.active_count()
    wrong = {"tokens": batch(1)["tokens"], "labels": torch.full((3, 5), 99)}
    with pytest.raises(IndexError, match="99"):
        step(batch(0), wrong)
    assert threading.active_count() <= threads
    assert torch.equal(step(batch(0)), plain(batch(0)))
