"""Whole training steps: when they are plain, when they are captured, and what a graph is made anew for."""

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotuner
from autotuner.errors import InputError, TunedWarning
from autotuner.runtime.batches import batch_of, structure_of
from tests.runtime.whole_steps import Pair, adamw, batches, loss_of, net


def test_every_call_is_one_step_before_a_capture_as_well_as_after() -> None:
    pair = Pair(max_norm=0.1)
    pair.train_all(batches(5))
    assert (pair.recorder.captures, pair.step.replays, pair.step.plain) == (1, 3, 2)
    assert str(pair.step) == "3 of 5 steps were replayed, from 1 CUDA graphs"
    norm = pair.step.gradient_norm
    assert norm is not None
    assert norm > 0.1
    assert all(parameter.grad is None for parameter in pair.ours.parameters())


def test_state_that_the_first_step_makes_is_gathered_once_and_loaded_state_is_not() -> None:
    pair = Pair()
    pair.train_all(batches(5))
    first = {id(value) for state in pair.own.state.values() for value in state.values()}
    assert [{id(tensor) for tensor in each} for each in pair.recorder.gathered if each] == [first]
    pair.own.load_state_dict(copy.deepcopy(pair.own.state_dict()))
    pair.other.load_state_dict(copy.deepcopy(pair.other.state_dict()))
    pair.train_all(batches(3))
    assert sum(map(bool, pair.recorder.gathered)) == 1


def test_state_that_graphs_read_is_not_gathered_where_other_parameters_get_some() -> None:
    pair = Pair()
    last = pair.ours.get_submodule("2")
    for twin in (pair.ours, pair.theirs):
        twin.get_submodule("2").requires_grad_(False)
    pair.train_all(batches(3))
    assert pair.step.replays == 1
    kept = {id(value) for state in pair.own.state.values() for value in state.values()}
    for twin in (pair.ours, pair.theirs):
        twin.get_submodule("2").requires_grad_(True)
    pair.train_all(batches(4))
    gathered = [{id(tensor) for tensor in each} for each in pair.recorder.gathered if each]
    made = {id(value) for each in last.parameters() for value in pair.own.state[each].values()}
    assert gathered == [kept, made]


def test_losses_are_tensors_of_their_own() -> None:
    pair = Pair()
    losses = [pair.step(batch) for batch in batches(6)]
    assert len({float(loss) for loss in losses}) == 6


def test_a_learning_rate_that_a_scheduler_changes_reaches_the_graph() -> None:
    pair = Pair()
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (pair.own, pair.other)]
    for batch in batches(6):
        pair.train(batch)
        for scheduler in schedulers:
            scheduler.step()
    assert (pair.recorder.captures, pair.step.replays) == (1, 4)
    assert pair.own.param_groups[0]["lr"] == pair.other.param_groups[0]["lr"]


def test_a_learning_rate_that_is_a_tensor_reaches_the_graph() -> None:
    pair = Pair(lambda model: adamw(model, lr=torch.tensor(0.05)))
    for batch in batches(6):
        for each in (pair.own, pair.other):
            each.param_groups[0]["lr"] = each.param_groups[0]["lr"] * 0.7
        pair.train(batch)
    assert (pair.recorder.captures, pair.step.replays) == (1, 4)


def test_where_the_optimizer_takes_no_tensor_each_learning_rate_has_a_graph() -> None:
    pair = Pair(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for number, batch in enumerate(batches(8)):
        for each in (pair.own, pair.other):
            each.param_groups[0]["lr"] = 0.1 if number < 4 else 0.01
        pair.train(batch)
    assert (pair.recorder.captures, pair.step.replays) == (2, 4)


def test_hyperparameters_that_change_in_each_step_are_told_of() -> None:
    pair = Pair(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = batches(1)

    def train() -> None:
        for number in range(70):
            for each in (pair.own, pair.other):
                each.param_groups[0]["lr"] = 0.1 / (number + 1)
            pair.train(batch)

    with pytest.warns(TunedWarning, match=r"for a learning rate that changes give the optimizer fused=True") as told:
        train()
    assert len(told) == 1
    assert (pair.step.replays, pair.step.plain) == (0, 70)


def test_each_shape_has_a_graph_up_to_a_limit_and_further_ones_are_plain() -> None:
    pair = Pair(max_graphs=2)
    with pytest.warns(TunedWarning, match=r"^2 graphs of a training step are captured, and steps of any further shape"):
        pair.train_all([*batches(4, 3), *batches(4, 4), *batches(4, 5)])
    pair.train_all([*batches(1, 3), *batches(1, 4)])
    assert (pair.recorder.captures, pair.step.replays, pair.step.plain) == (2, 6, 8)


def test_modes_and_frozen_parameters_have_graphs_of_their_own() -> None:
    pair = Pair()
    changes: list[Callable[[Any], Any]] = [nn.Module.train, nn.Module.eval, lambda m: m[2].requires_grad_(False)]
    for change in changes:
        for each in (pair.ours, pair.theirs):
            change(each)
        pair.train_all(batches(3))
    assert pair.recorder.captures == 3


def test_parameters_that_are_loaded_in_place_are_seen_by_the_graph() -> None:
    pair = Pair()
    for number, batch in enumerate(batches(6)):
        if number == 4:
            state = {name: value * 0.5 for name, value in pair.ours.state_dict().items()}
            for each in (pair.ours, pair.theirs):
                each.load_state_dict(state)
        pair.train(batch)
    assert pair.recorder.captures == 1


@pytest.mark.parametrize("what", ["optimizer", "parameter"])
def test_memory_that_moved_is_noticed_and_captured_anew(what: str) -> None:
    pair = Pair()
    for number, batch in enumerate(batches(8)):
        if number == 4 and what == "optimizer":
            for each in (pair.own, pair.other):
                each.load_state_dict(copy.deepcopy(each.state_dict()))
        if number == 4 and what == "parameter":
            for model in (pair.ours, pair.theirs):
                weight = model.get_parameter("0.weight")
                weight.data = weight.data.clone()
        pair.train(batch)
    assert pair.recorder.captures == 2


def test_micro_batches_count_as_one_step() -> None:
    pair, whole = Pair(), batches(1, 8)[0]
    halves = [{name: value[part] for name, value in whole.items()} for part in (slice(4), slice(4, 8))]
    for _ in range(4):
        torch.testing.assert_close(pair.step(*halves), pair.plain(whole))
    for one, other in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_model_that_draws_on_the_host_is_not_captured() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        random.random()
        return loss_of(model, batch)

    pair = Pair(loss=loss)
    with pytest.warns(TunedWarning, match="not captured as a CUDA graph: the model draws random numbers on the host"):
        pair.train_all(batches(4))
    assert (pair.step.replays, pair.step.plain) == (0, 4)
    assert "not captured: the model draws" in str(pair.step)


def test_a_model_that_replaces_a_buffer_is_not_captured() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.seen: Tensor = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.seen = self.seen + 1
            self.newest: Tensor = nn.Buffer(x.detach())
            return self.inner(x) * self.seen

    pair = Pair(model=Counting())
    with pytest.warns(TunedWarning, match="the model replaces a parameter or a buffer in each step"):
        pair.train_all(batches(4))


def test_a_capture_that_fails_leaves_plain_steps_and_says_why() -> None:
    model = net()
    pair = Pair(model=model, uncaptured=lambda: lambda batch: loss_of(model, batch))

    def fail(run: Any, pool: Any, repeats: int = 0, *, is_whole_step: bool = False) -> Any:  # noqa: ARG001
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    pair.recorder.captured = fail  # type: ignore[method-assign]
    with pytest.warns(TunedWarning, match=r"could not be captured \(operation not permitted when stream is capturing"):
        pair.train_all(batches(4))


def test_an_optimizer_that_counts_on_the_host_is_not_captured() -> None:
    with pytest.warns(TunedWarning, match="Adagrad has no option capturable"):
        pair = Pair(lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1))
    pair.train_all(batches(3))


def test_a_batch_that_is_not_known_runs_plainly() -> None:
    class Odd:
        def __init__(self, batch: dict[str, Tensor]) -> None:
            self.batch = batch

    pair = Pair(loss=lambda model, batch: loss_of(model, batch.batch))
    with pytest.warns(TunedWarning, match="the batch holds a Odd"):
        pair.train(Odd(batches(1)[0]))


@pytest.mark.parametrize("has_schedule", [False, True], ids=["", "schedule"])
def test_an_optimizer_that_wants_a_closure_is_refused_and_no_other(has_schedule: bool) -> None:
    model = net()
    wants, wants_none = torch.optim.LBFGS(model.parameters()), adamw(model)
    for each in (wants, wants_none) if has_schedule else ():
        torch.optim.lr_scheduler.LambdaLR(each, lambda _: 0.5)  # which puts a function around the step
    with pytest.raises(InputError, match="LBFGS computes the loss several times in a step, and training_step computes"):
        autotuner.training_step(model, wants, loss_of)
    autotuner.training_step(model, wants_none, loss_of)


def test_what_is_no_batch_or_no_loss_is_refused() -> None:
    pair = Pair(loss=lambda model, batch: model(batch["x"]))
    with pytest.raises(InputError, match=r"the loss is \(6, 3\): return a tensor of one element"):
        pair.step(batches(1)[0])
    with pytest.raises(InputError, match="a training step needs a batch"):
        pair.step()


def test_a_batch_is_taken_apart_and_put_together() -> None:
    batch = ({"x": torch.ones(2), "n": 3, "none": None}, [torch.zeros(1)])
    tensors: list[Tensor] = []
    structure = structure_of(batch, tensors)
    assert len(tensors) == 2
    assert batch_of(structure, iter(tensors)) == batch
    assert structure == structure_of(({"x": torch.zeros(2), "n": 3, "none": None}, [torch.ones(1)]), [])
    assert structure != structure_of(({"x": torch.zeros(2), "n": 4, "none": None}, [torch.ones(1)]), [])
    assert structure != structure_of(({"x": torch.zeros(2).long(), "n": 3, "none": None}, [torch.ones(1)]), [])


def test_on_the_cpu_the_step_is_plain_and_compiled(tmp_path: Path) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = net(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x)).square().mean()

    torch._dynamo.reset()
    ours, x = Layers(), torch.randn(5, 4)
    theirs = copy.deepcopy(ours)
    own, other = adamw(ours), adamw(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunedWarning)
        step = autotuner.training_step(ours, own, max_norm=1.0, compiler="eager", database=tmp_path / "none.sqlite")
        for _ in range(3):
            loss = step({"x": x})
    for _ in range(3):
        other.zero_grad()
        expected = theirs(x)
        expected.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        other.step()
    torch.testing.assert_close(loss, expected.detach())
    assert str(step) == "0 of 3 steps were replayed, from 0 CUDA graphs"
    with pytest.raises(InputError, match="the model returns a tuple without a loss"):
        autotuner.training_step(nn.GRU(2, 2), adamw(net()), compiler="eager", database=tmp_path / "none.sqlite")(
            [torch.ones(1, 2)]
        )
