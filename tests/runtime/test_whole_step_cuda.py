"""Whole training steps as one CUDA graph."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autotuner
from autotuner.api.backend import COMPILED, rewrite
from autotuner.errors import TunedWarning
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.runtime.region import TunedRegion
from tests.runtime.layers import CUDA
from tests.runtime.plans import configuration
from tests.runtime.whole_steps import Pair, adamw, batches, loss_of

pytestmark = pytest.mark.gpu
WIDTH = 16


class Known:
    """Knows every region, by a plan of made-up costs."""

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        return [configuration(model, 0, device_type) for model in models]

    def want(self, models: Iterable[Model], device_type: str) -> str:  # noqa: ARG002
        return ""


def encoder(p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=p, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def squared(model: Any, batch: Any) -> Tensor:
    found: Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return found


def sequences(count: int, length: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{name: torch.randn(4, length, WIDTH, generator=generator) for name in ("x", "y")} for _ in range(count)]


def tuned(regions: list[TunedRegion], objective: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Compile a function so that its regions run tuned, and the rest as it is."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made = rewrite(module, inputs, Known(), graphs=False)
        regions.extend(each for each in made if isinstance(each, TunedRegion))
        return module.forward

    torch._dynamo.reset()
    found: Callable[[Any], Tensor] = torch.compile(objective, backend=backend, dynamic=False)
    return found


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        partial(adamw, fused=False, foreach=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    ],
    ids=["fused", "foreach", "sgd", "rmsprop"],
)
def test_a_captured_step_trains_as_a_plain_loop_does_and_follows_its_scheduler(make: Any) -> None:
    pair = Pair(make, device=CUDA, max_norm=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.7) for each in (pair.own, pair.other)]
    for batch in batches(8):
        pair.train(batch, 1e-4)
        for scheduler in schedulers:
            scheduler.step()
    assert (pair.step.replays, pair.step.note) == (6, "")


def test_a_learning_rate_that_is_another_tensor_in_each_step_reaches_the_graph() -> None:
    pair = Pair(partial(adamw, lr=torch.tensor(0.05, device=CUDA)), device=CUDA)
    for batch in batches(6):
        for each in (pair.own, pair.other):
            each.param_groups[0]["lr"] = each.param_groups[0]["lr"] * 0.7
        pair.train(batch, 1e-4)
    assert pair.step.replays == 4


def test_regions_run_tuned_inside_of_the_graph() -> None:
    regions: list[TunedRegion] = []
    begun = len(COMPILED)
    pair = Pair(  # keys' biases have no gradient but rounding, which Adam would make steps of
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        loss=squared, model=encoder().train(), device=CUDA, compiled=partial(tuned, regions),
    )  # fmt: skip
    for length in (6, 5, 6):
        pair.train_all(sequences(5, length), 1e-4)
    assert (pair.step.replays, pair.step.note) == (11, "")
    assert [graph.tuned_places for graph in COMPILED[begun:]] == [2, 2]
    assert [region.calls for region in regions] == [3] * 4


def test_every_replay_draws_new_dropout_masks() -> None:
    regions: list[TunedRegion] = []
    pair = Pair(
        loss=squared, model=encoder(0.5).train(), device=CUDA, compiled=partial(tuned, regions),
        make=partial(adamw, lr=0.0, weight_decay=0.0),
    )  # fmt: skip
    (batch,) = sequences(1)
    assert len({float(pair.step(batch)) for _ in range(8)}) == 8
    assert pair.step.replays == 6


def test_a_step_that_waits_for_the_device_stays_plain_and_trains_on() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        found = loss_of(model, batch)
        return found * (1.0 if found.item() > -1.0 else 2.0)

    pair = Pair(loss=loss, device=CUDA)
    with pytest.warns(TunedWarning, match="not captured as a CUDA graph: the step could not be captured"):
        pair.train_all(batches(5), 1e-4)
    assert (pair.step.replays, pair.step.plain) == (0, 5)


@pytest.mark.parametrize("what", ["optimizer", "model"])
def test_what_is_loaded_between_steps_is_seen(what: str) -> None:
    pair = Pair(device=CUDA)
    states: Any = {"optimizer": (pair.own, pair.other), "model": (pair.ours, pair.theirs)}[what]
    saved: Any = None
    for number, batch in enumerate(batches(9)):
        if number == 2:
            saved = [{**each.state_dict()} for each in states]
            saved = [torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, each) for each in saved]
        if number == 5:
            for each, state in zip(states, saved, strict=True):
                each.load_state_dict(state)
        pair.train(batch, 1e-4)
    assert pair.step.replays == (5 if what == "optimizer" else 7)


def test_a_replay_does_not_wait_and_allocates_nothing_that_stays() -> None:
    pair = Pair(device=CUDA)
    found = [{name: value.to(CUDA) for name, value in batch.items()} for batch in batches(6)]
    for batch in found:
        pair.step(batch)
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in found:
            pair.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() <= before


def test_micro_batches_are_one_graph() -> None:
    pair = Pair(device=CUDA)
    (whole,) = batches(1, 8)
    halves = [{name: value[part] for name, value in whole.items()} for part in (slice(4), slice(4, 8))]
    for _ in range(5):
        torch.testing.assert_close(pair.step(*halves), pair.plain(whole))
    assert pair.step.replays == 3


def test_the_function_of_the_package_captures_a_model_under_autocast(tmp_path: Path) -> None:
    model = encoder().to(CUDA)
    optimizer = adamw(model, lr=1e-3)

    def loss(called: Any, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return squared(called, batch)

    torch._dynamo.reset()
    step = autotuner.training_step(model, optimizer, loss, database=tmp_path / "none.sqlite", compiler="aot_eager")
    losses = [float(step(batch)) for batch in sequences(1) * 20]
    assert step.replays == 18
    assert losses[-1] < losses[0]
