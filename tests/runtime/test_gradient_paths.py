"""Parameters that reach a loss by comparisons, places and casts alone: gradients are None exactly where eager's are."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import autotuner
from autotuner.api.survey import found_in, region_calls
from autotuner.plan.configuration import Configuration
from tests.ecosystem.known import Tuned
from tests.processes import spawn
from tests.runtime.capture.known import Compilation, assert_equal, gradients, planned
from tests.runtime.made_up_device import instead_of_the_cpu

WIDTH, LENGTH, LAYERS, RANKS, STEPS = 16, 8, 3, 2, 5


class Layer(nn.Module):
    """A layer with parameters that may reach its result by numbers without a gradient alone."""

    def __init__(self, inner: "Inner") -> None:
        super().__init__()
        self.norm, self.up, self.other = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.floor, self.scale = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(1.5 * torch.ones(WIDTH))
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        y = self.up(self.norm(x))
        return x + self.inner(self, y)


Inner = Callable[[Layer, Tensor], Tensor]
OTHER = {"other.weight", "other.bias"}
INNER: dict[str, tuple[Inner, set[str]]] = {
    "a threshold": (lambda o, y: torch.where(y > o.floor, y, 0.1 * y) * o.scale, {"floor", *OTHER}),
    "a mask": (lambda o, y: y * (y > o.floor).to(y.dtype) * o.scale, {"floor", *OTHER}),
    "a threshold that is learned elsewhere, too": (
        lambda o, y: torch.where(y > o.floor, y, 0.1 * y) * o.scale * o.floor.exp(),
        OTHER,
    ),
    "a product that is compared": (
        lambda o, y: torch.where(y > o.other(y * o.scale), y, -y),
        {"floor", "scale", *OTHER},
    ),
    "a filled mask": (lambda o, y: (y * o.scale).masked_fill(o.other(y) < 0, 0.0), {"floor", *OTHER}),
    "places": (
        lambda o, y: y * o.scale * nn.functional.one_hot(o.other(y).argmax(-1), WIDTH).to(y.dtype),
        {"floor", *OTHER},
    ),
    "integers": (lambda o, y: y * (o.scale * 3).to(torch.int64).to(y.dtype), {"floor", "scale", *OTHER}),
    "buckets": (
        lambda o, y: y * torch.bucketize(y.detach(), o.floor.sort().values).to(y.dtype) * o.scale,
        {"floor", *OTHER},
    ),
    "detached": (lambda o, y: y * o.other(y).detach() * o.scale, {"floor", *OTHER}),
    "rounded": (lambda o, y: y * o.other(y).round() * o.scale.sign(), {"floor"}),
    "straight through": (
        lambda o, y: y * (o.floor + (o.floor.round() - o.floor).detach()) * o.scale.round().detach(),
        {"scale", *OTHER},
    ),
}
"""What layers compute, and the parameters without a gradient; those that are rounded have gradients of zeros."""


class Net(nn.Module):
    """Layers one after the other."""

    def __init__(self, inner: str = "a threshold") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(INNER[inner][0]) for _ in range(LAYERS))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(number: int = 0, rows: slice = slice(0, 2)) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=generator)[rows]


def loss_of(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("inner", INNER)
def test_gradients_are_none_where_eagers_are_and_zeros_where_eagers_are(inner: str, compiler: str) -> None:
    model = Net(inner)
    wanted = gradients(model, lambda called: loss_of(called, batch()))
    names = [name for name, _ in model.layers[0].named_parameters()]
    assert {name for name in names if f"layers.0.{name}" not in wanted} == INNER[inner][1]
    compilation = Compilation(model, compiler=compiler)
    found = gradients(model, lambda called: loss_of(called, batch()), compilation.model)
    assert_equal(found, wanted, 1e-12)
    assert len(compilation.regions) == LAYERS
    assert {region.calls for region in compilation.regions} == {1}
    zeros = {name for name, gradient in wanted.items() if not gradient.any()}
    assert bool(zeros) == (inner == "rounded")
    assert not any(found[name].any() for name in zeros)


class Sided(nn.Module):
    """Layers that return something beside, of which what they read has no other way to a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(INNER["a threshold"][0]) for _ in range(LAYERS))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, learned: bool) -> Tensor:
        penalty = x.new_zeros(())
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = layer(x)
            beside = gate(x).sigmoid()
            penalty = penalty + (beside if learned else (beside > 0.5).to(x.dtype)).mean()
        return x.square().mean() + penalty


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("learned", [False, True])
def test_what_alone_makes_an_output_without_a_gradient_has_none(learned: bool, compiler: str) -> None:
    model = Sided().double()
    wanted = gradients(model, lambda called: called(batch(), learned))
    assert ("gates.0.weight" in wanted) == learned
    compilation = Compilation(model, compiler=compiler)
    assert_equal(gradients(model, lambda called: called(batch(), learned), compilation.model), wanted, 1e-12)
    assert len(compilation.regions) == LAYERS
    assert any(len(region.plan.results.outputs) > 1 for region in compilation.regions)


class Doubling(torch.autograd.Function):
    """A function of users, whose backward is given zeros in place of None by torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return 2 * grads[0]


class Before(nn.Module):
    """Layers that compare with what a module before them has made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(INNER["a threshold"][0]) for _ in range(LAYERS))
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        line = Doubling.apply(self.before(x))  # type: ignore[no-untyped-call]
        for layer, other in zip(self.layers, self.others, strict=True):
            x = layer(x)
            x = x + torch.where(x > line, other(x), x)
        return x


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_no_gradient_goes_on_before_a_comparison(compiler: str) -> None:
    model = Before().double()
    wanted = gradients(model, lambda called: loss_of(called, batch()))
    assert "before.weight" not in wanted
    compilation = Compilation(model, compiler=compiler)
    assert_equal(gradients(model, lambda called: loss_of(called, batch()), compilation.model), wanted, 1e-12)
    assert len(compilation.regions) == LAYERS


def configurations(model: nn.Module, x: Tensor) -> list[Configuration]:
    """Return plans for the regions of a step, without measuring."""
    return [planned(each) for each in found_in(region_calls(model, [(x,)]), model)]


def test_an_applied_module_has_the_gradients_of_eager_and_those_of_a_penalty_on_gradients() -> None:
    def ran(of: nn.Module) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(of, x), x, create_graph=True)
        again = torch.autograd.grad(slope.square().sum(), list(of.parameters()), allow_unused=True)
        return gradients(of, lambda called: loss_of(called, batch())), again

    model = Net()
    (wanted, wanted_again), tuned = ran(model), autotuner.apply(model, configurations(model, batch()))
    found, again = ran(tuned)
    assert_equal(found, wanted, 1e-12)
    for name, one, other in zip(dict(model.named_parameters()), again, wanted_again, strict=True):
        assert (one is None) == (other is None), name
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer under which zeros, in place of None, would decay a parameter."""
    return torch.optim.AdamW(model.parameters(), lr=2**-7, weight_decay=0.5, fused=True)


def plainly(model: Any, optimizer: torch.optim.Optimizer, *batches: Tensor) -> None:
    optimizer.zero_grad()
    for x in batches:
        torch.autograd.backward(loss_of(model, x) / len(batches))
    optimizer.step()


def assert_trained_alike(
    found: tuple[nn.Module, torch.optim.Optimizer], wanted: tuple[nn.Module, torch.optim.Optimizer], model: nn.Module
) -> None:
    """Check two trained models, and which of their parameters have a state, that have begun as a third one."""
    begun = dict(model.named_parameters())
    for (name, own), other in zip(found[0].named_parameters(), wanted[0].parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
        assert bool(found[1].state.get(own)) == bool(wanted[1].state.get(other)), name
        assert torch.equal(other, begun[name]) == name.endswith(("floor", "other.weight", "other.bias"))


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in backward": {"optimizer_in_backward": True},
    "captured": {"captured": True},
    "captured, in backward": {"captured": True, "optimizer_in_backward": True},
    "under a budget": {"memory_budget": "1GiB"},
    "eager": {"compiler": "eager"},
    "inductor": {"compiler": "inductor"},
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_training_steps_leave_alone_what_has_no_gradient(way: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"compiler": "aot_eager"} | WAYS[way]
    torch._dynamo.reset()
    model, tuned = Net(), Tuned()
    known = configurations(model, batch())
    if options.pop("captured", False):
        instead_of_the_cpu(monkeypatch)
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    own, other = adamw(ours), adamw(theirs)
    step = autotuner.training_step(ours, own, loss_of, configurations=known, watch=None, **options)
    for number in range(STEPS):
        batches = [batch(10 * number + part) for part in range(parts)]
        step(*batches)
        plainly(theirs, other, *batches)
    assert_trained_alike((ours, own), (theirs, other), model)
    assert tuned.places == LAYERS
    assert step.replays == (STEPS - 2 if "captured" in way else 0)


class Stack(nn.Module):
    """Blocks of layers that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_layers_on_the_host_leave_alone_what_has_no_gradient(in_backward: bool) -> None:
    torch._dynamo.reset()
    model, tuned = Stack(), Tuned()
    known = configurations(Net(), batch())
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    own, other = adamw(ours), adamw(theirs)
    step = autotuner.layer_to_layer(
        ours, own, loss_of, configurations=known, compiler="aot_eager", optimizer_in_backward=in_backward, watch=None
    )
    for number in range(STEPS):
        batches = [batch(10 * number + part) for part in range(2)]
        step(*batches)
        plainly(theirs, other, *batches)
    assert_trained_alike((ours, own), (theirs, other), model)
    assert tuned.places == 2 * LAYERS  # the input of the first block has no gradient


OF_SEVERAL: dict[str, dict[str, Any]] = {
    "exchanged": {},
    "captured": {"captured": True},
    "shared out": {"shard_optimizer": True},
}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    known, found = configurations(Net(), batch(0, slice(0, 1))), {}
    for way, given in OF_SEVERAL.items():
        torch._dynamo.reset()
        options, captures = dict(given), pytest.MonkeyPatch()
        if options.pop("captured", False):
            instead_of_the_cpu(captures)
        model, tuned = Net(), Tuned()
        optimizer = adamw(model)
        step = autotuner.training_step(
            model, optimizer, loss_of, configurations=known, compiler="aot_eager", watch=None, **options
        )
        for number in range(STEPS):
            step(batch(number, slice(rank, rank + 1)))
        captures.undo()
        found[way] = model.state_dict(), step.optimizer_state(), tuned.places, step.replays
    found["ddp"] = wrapped(rank, known)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def wrapped(rank: int, known: list[Configuration]) -> Any:
    """Train in torch's own DistributedDataParallel."""
    torch._dynamo.reset()
    model, tuned = Net(), Tuned()
    optimizer, whole = adamw(model), DistributedDataParallel(model, find_unused_parameters=True)
    with torch._dynamo.config.patch(optimize_ddp=False):
        options: Any = {"configurations": known, "compiler": "aot_eager"}
        called = torch.compile(whole, backend="autotuner", options=options, dynamic=False)
        for number in range(STEPS):
            plainly(called, optimizer, batch(number, slice(rank, rank + 1)))
    return model.state_dict(), optimizer.state_dict(), tuned.places, 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (str(folder),), RANKS)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("way", [*OF_SEVERAL, "ddp"])
def test_several_processes_leave_alone_what_has_no_gradient_in_any(ranks: list[dict[str, Any]], way: str) -> None:
    model, theirs = Net(), Net()
    other = adamw(theirs)
    for number in range(STEPS):
        plainly(theirs, other, batch(number))
    ours = Net()
    own = adamw(ours)
    for values, _, places, replays in (rank[way] for rank in ranks):
        assert places == LAYERS
        assert replays == (STEPS - 3 if way == "captured" else 0)
        ours.load_state_dict(values)
        own.load_state_dict(ranks[0][way][1])
        assert_trained_alike((ours, own), (theirs, other), model)
