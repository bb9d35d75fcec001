"""Plain steps: where a step that failed can be begun anew, and where it cannot."""

import pytest
import torch
from torch import Tensor, nn

from autotuner.runtime.devices import CpuRuntime
from autotuner.runtime.plain_step import PlainStep
from autotuner.runtime.updates_in_backward import UpdatesInBackward

RUNTIME = CpuRuntime(torch.device("cpu"))
X = torch.ones(4, 3)


class NoMemory(Exception):
    """What a step ends with."""


def plain_step(model: nn.Module, *, in_backward: bool = False) -> tuple[PlainStep, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = UpdatesInBackward(optimizer, part_bytes=1) if in_backward else None
    return PlainStep(model, optimizer, lambda x: model(x).square().sum(), in_backward=parts), optimizer


def test_generators_and_gradients_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    step, _ = plain_step(model)
    put_back = step.beginning(RUNTIME)
    drawn = torch.rand(3)
    torch.autograd.backward(step.loss(X))
    assert put_back()
    assert torch.equal(torch.rand(3), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_buffers_that_were_written_are_no_beginning() -> None:
    step, _ = plain_step(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    put_back = step.beginning(RUNTIME)
    step.loss(X)
    assert not put_back()


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_update_that_has_begun_is_not_begun_anew(monkeypatch: pytest.MonkeyPatch, *, in_backward: bool) -> None:
    step, optimizer = plain_step(nn.Linear(3, 2), in_backward=in_backward)
    calls = iter([None, NoMemory] if in_backward else [NoMemory])
    original = optimizer.step

    def moved() -> None:
        error = next(calls)
        original()
        if error is not None:
            raise error

    monkeypatch.setattr(optimizer, "step", moved)
    put_back = step.beginning(RUNTIME)
    with pytest.raises(NoMemory):
        step.run([X])
    assert not put_back()


def test_a_backward_that_failed_before_any_update_is_begun_anew() -> None:
    step, _ = plain_step(nn.Linear(3, 2), in_backward=True)
    step.run([X])
    put_back = step.beginning(RUNTIME)
    with pytest.raises(RuntimeError):
        step.run([torch.ones(4, 5)])
    assert put_back()


def test_backward_runs_in_the_thread_that_runs_the_step() -> None:
    model, seen = nn.Linear(3, 2), []

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().sum()
        found.register_hook(lambda _: seen.append(torch._C._is_multithreading_enabled()))  # type: ignore[no-untyped-call]
        return found

    PlainStep(model, torch.optim.SGD(model.parameters()), loss).run([X, X])
    assert seen == [False, False]
    assert torch._C._is_multithreading_enabled()
