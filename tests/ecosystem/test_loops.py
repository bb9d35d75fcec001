"""What people do with models in training loops of their own, with `torch.compile(model, backend="autotuner")`."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autotuner
from autotuner.errors import TunedWarning
from tests.ecosystem.known import LAYERS, OPTIONS, Net, Tuned, assert_same, batch, remember, use

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database that knows the layers of `Net` in train and eval mode, which are one region."""
    found = tmp_path_factory.mktemp("known") / "known.sqlite"
    remember(found, Net(), [batch(0)])
    return found


@pytest.fixture(autouse=True)
def known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(path, monkeypatch)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="autotuner", options=OPTIONS, dynamic=False)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def train(model: Any, optimizer: torch.optim.Optimizer, first: int = 0, steps: int = STEPS) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_optimizers_of_each_form_move_the_parameters(options: dict[str, bool]) -> None:
    ours, theirs, tuned = Net(), Net(), Tuned()
    theirs.load_state_dict(ours.state_dict())
    assert train(compiled(ours), adamw(ours, **options)) == pytest.approx(train(theirs, adamw(theirs, **options)))
    assert_same(ours, theirs)
    assert (tuned.graphs, tuned.places) == (1, LAYERS)


def looped(model: Any, own: nn.Module) -> list[Tensor]:
    """Train as libraries do: clipping, accumulation over two batches, a closure, a schedule, an average, evaluation."""
    optimizer = adamw(own, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    ema: Any = get_ema_multi_avg_fn
    average = AveragedModel(own, multi_avg_fn=ema(0.5))
    found = []
    for number in range(STEPS):

        def closure(number: int = number) -> Any:
            optimizer.zero_grad(set_to_none=bool(number % 2))
            for part in range(2):
                (model(batch(2 * number + part)) / 2).backward()
            return nn.utils.clip_grad_norm_(own.parameters(), 0.1)

        found.append(optimizer.step(closure))
        schedule.step()
        average.update_parameters(own)
        own.eval()
        with torch.no_grad():
            found.append(model(batch(number)))
        with torch.inference_mode():
            found.append(average(batch(number)).clone())
        own.train()
    return [torch.as_tensor(each).clone() for each in found]


def test_clipping_accumulation_schedules_averages_and_evaluation_are_what_they_were() -> None:
    ours, theirs, tuned = Net(), Net(), Tuned()
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(looped(compiled(ours), ours), looped(theirs, theirs), rtol=1e-5, atol=1e-5)
    assert_same(ours, theirs)
    assert tuned.places == LAYERS * tuned.graphs


def in_place(model: Net) -> Any:
    model.compile(backend="autotuner", options=OPTIONS, dynamic=False)
    return model


def of_a_part(model: Net) -> Any:
    model.layers = compiled(model.layers)
    return model


@pytest.mark.parametrize("compile_it", [in_place, of_a_part])
def test_a_model_can_be_compiled_in_place_or_in_part(compile_it: Callable[[Net], Any]) -> None:
    ours, theirs, tuned = Net(), Net(), Tuned()
    theirs.load_state_dict(ours.state_dict())
    optimizer = adamw(ours)
    assert train(compile_it(ours), optimizer) == pytest.approx(train(theirs, adamw(theirs)))
    assert_same(ours, theirs)
    assert tuned.places == LAYERS


def test_a_compiled_model_is_copied_pickled_and_saved() -> None:
    ours = Net()
    called = compiled(ours)
    optimizer = adamw(ours)
    train(called, optimizer)
    tuned = Tuned()
    copied = copy.deepcopy(called)
    pickled = pickle.loads(pickle.dumps(ours))
    file = io.BytesIO()
    torch.save({"model": called.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded, state = Net(), torch.load(file)
    again = compiled(loaded)
    again.load_state_dict(state["model"])
    other = adamw(loaded)
    other.load_state_dict(state["optimizer"])
    for each in (copied, pickled, loaded):
        torch.testing.assert_close(each(batch(7)), ours(batch(7)))
    assert train(again, other, STEPS) == pytest.approx(train(called, optimizer, STEPS))
    train(copied, adamw(copied), STEPS)
    assert_same(loaded, ours)
    assert copied.state_dict().keys() == called.state_dict().keys()
    assert tuned.places == LAYERS * tuned.graphs


def test_a_training_step_runs_regions_tuned() -> None:
    ours, theirs, tuned = Net(), Net(), Tuned()
    theirs.load_state_dict(ours.state_dict())
    step = autotuner.training_step(ours, adamw(ours), compiler="aot_eager")
    assert [float(step(batch(number))) for number in range(STEPS)] == pytest.approx(train(theirs, adamw(theirs)))
    assert_same(ours, theirs)
    assert (tuned.graphs, tuned.places) == (1, LAYERS)


def test_a_checkpointed_model_trains_as_it_did() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return self.head(x).square().mean()

    ours, theirs = Checkpointed(), Checkpointed()
    theirs.load_state_dict(ours.state_dict())
    assert train(compiled(ours), adamw(ours)) == pytest.approx(train(theirs, adamw(theirs)))
    assert_same(ours, theirs)


def test_a_summary_tells_two_models_apart() -> None:
    first, second = Net(), nn.Sequential(Net(), nn.Flatten(0))
    for each in (first, second):
        compiled(each)(batch(0))
    found = [autotuner.summary(each).graphs for each in (first, second, Net())]
    assert [len(graphs) for graphs in found] == [1, 1, 0]
    assert found[0][0].headline.startswith("2 of 2 regions run tuned (1 of 1 kinds): ")


def test_no_warning_is_given_where_all_is_well(recwarn: pytest.WarningsRecorder) -> None:
    ours = Net()
    train(compiled(ours), adamw(ours))
    assert not [each for each in recwarn if issubclass(each.category, TunedWarning)]
