"""Updates in backward: parameters and losses are those of a step at the end; gradients are not all there at once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import autotuner
from autotuner.errors import InputError
from autotuner.measure.devices.cpu_sampling import allocated_bytes
from autotuner.runtime.updates_in_backward import UpdatesInBackward
from autotuner.runtime.whole_step import WholeStep
from tests.runtime.whole_steps import Pair, adamw, batches, loss_of, net

WIDTH = 256


def deep(layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def steps_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], part_bytes: int) -> list[WholeStep]:
    """Return a step for each of two models: the first one's updates are in backward."""
    updates = (UpdatesInBackward(optimizers[0], part_bytes), None)
    return [
        WholeStep(model, own, partial(loss_of, model), in_backward=each)
        for model, own, each in zip(models, optimizers, updates, strict=True)
    ]


def step_of(model: nn.Module, optimizer: Optimizer, part_bytes: int | None) -> WholeStep:
    in_backward = None if part_bytes is None else UpdatesInBackward(optimizer, part_bytes)
    return WholeStep(model, optimizer, lambda x: model(x).square().mean(), in_backward=in_backward)


def two_groups(model: nn.Module) -> Optimizer:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.3}], lr=0.01)


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        two_groups,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda model: torch.optim.RMSprop(model.parameters(), foreach=True),
        lambda model: torch.optim.Adafactor(model.parameters()),
        lambda model: torch.optim.NAdam(model.parameters()),
    ],
    ids=["fused AdamW", "two groups", "SGD", "RMSprop, foreach", "Adafactor", "NAdam"],
)
@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
def test_parameters_losses_and_state_are_the_same_bit_by_bit(
    make: Callable[[nn.Module], Optimizer], part_bytes: int
) -> None:
    models = [net(), net()]
    optimizers = [make(model) for model in models]
    steps = steps_of(models, optimizers, part_bytes)
    for batch in batches(4):
        assert torch.equal(*(step(batch) for step in steps))
    ours, theirs = (list(model.parameters()) for model in models)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(parameter.grad is None for parameter in ours)
    for one, other in zip(ours, theirs, strict=True):
        states = [own.state[parameter] for own, parameter in zip(optimizers, (one, other), strict=True)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*map(dict.values, states), strict=True))


def test_not_all_gradients_are_there_at_once() -> None:
    x, most = torch.randn(2, WIDTH), {}
    layer_bytes = 4 * WIDTH * (WIDTH + 1)
    for part_bytes in (None, layer_bytes // 2):
        model = deep()
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), part_bytes)
        step(x)
        most[part_bytes] = allocated_bytes(partial(step, x))
    everything, parts = most.values()
    assert everything > 8 * layer_bytes
    assert parts < 2 * layer_bytes


def test_of_micro_batches_only_the_last_one_updates_and_gradients_of_all_count() -> None:
    first, second = batches(2)
    models = [net(), net()]
    for step in steps_of(models, [adamw(model) for model in models], 1):
        for _ in range(2):
            step(first, second)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_may_be_sparse() -> None:
    models = [nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, is_ours in zip(models, (True, False), strict=True):
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        objective = partial(lambda model, ids: model(ids).square().mean(), model)
        WholeStep(model, own, objective, in_backward=UpdatesInBackward(own, 1) if is_ours else None)(torch.arange(5))
    assert all(torch.equal(*pair) for pair in zip(*(each.parameters() for each in models), strict=True))


def test_parameters_without_a_gradient_stay_and_shared_ones_are_updated_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.unused = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            loss: Tensor = self.head(self.words(ids)).square().mean()
            return loss

    ids = torch.tensor([1, 2, 5])
    models = [Tied(), Tied()]
    for model, is_ours in zip(models, (True, False), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = WholeStep(model, optimizer, model, in_backward=UpdatesInBackward(optimizer, 1) if is_ours else None)
        for _ in range(3):
            step(ids)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_captured_step_updates_in_backward_too() -> None:
    pair = Pair()
    pair.step = WholeStep(
        pair.ours, pair.own, lambda batch: loss_of(pair.ours, batch), recorder=pair.recorder,
        in_backward=UpdatesInBackward(pair.own, 1),
    )  # fmt: skip
    scheduler = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (pair.own, pair.other)]
    for batch in batches(6):
        pair.train(batch, 0.0)
        for each in scheduler:
            each.step()
    assert (pair.recorder.captures, pair.step.replays) == (1, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("known_to_none")
def test_a_compiled_model_trains_as_it_does_with_updates_at_the_end() -> None:
    losses = []
    for in_backward in (True, False):
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        optimizer = adamw(model, lr=1e-3)
        step = autotuner.training_step(
            model, optimizer, lambda model, x: model(x).square().mean(), compiler="aot_eager",
            optimizer_in_backward=in_backward, watch=None,
        )  # fmt: skip
        x = torch.randn(2, 6, 16)
        losses.append([float(step(x)) for _ in range(4)])
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][-1]


@pytest.fixture
def known_to_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AUTOTUNER_DATABASE", str(tmp_path / "none.sqlite"))


def test_a_gradient_that_comes_in_parts_is_an_error() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x.square().mean()

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = WholeStep(model, optimizer, model, in_backward=UpdatesInBackward(optimizer, 1))
    with pytest.raises(InputError, match=r"comes in parts, as in reentrant checkpoints.*use_reentrant=False"):
        step(torch.randn(2, 4, requires_grad=True))


class Homemade(torch.optim.SGD):
    """An optimizer that is not torch's own."""


def hooked(model: nn.Module) -> Optimizer:
    made = torch.optim.SGD(model.parameters())
    made.register_step_post_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: Homemade(model.parameters()), r"Homemade may do more in a step than that: take one of torch's"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS may do more"),
        (hooked, "hooks of SGD would run for each part"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_in_parts_is_refused(
    make: Callable[[nn.Module], Optimizer], words: str
) -> None:
    model = net()
    with pytest.raises(InputError, match=f"^optimizer_in_backward moves parameters part by part, and {words}"):
        autotuner.training_step(model, make(model), loss_of, optimizer_in_backward=True)


def test_clipping_needs_all_gradients_first() -> None:
    model = net()
    with pytest.raises(InputError, match=r"^max_norm=1 needs the norm of all gradients before the first update"):
        autotuner.training_step(model, adamw(model), loss_of, max_norm=1.0, optimizer_in_backward=True)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    model = net()
    step = WholeStep(
        model, own := adamw(model), lambda batch: loss_of(model, batch), in_backward=UpdatesInBackward(own)
    )
    with pytest.raises(InputError, match="before several processes have exchanged its gradient"):
        step(batches(1)[0])
