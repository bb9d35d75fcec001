"""Memory budgets on a GPU of steps that are not captured, beside what torch's allocator counts."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotuner
from autotuner.runtime.step_needs import StepNeeds
from tests.runtime.layers import CUDA
from tests.runtime.test_whole_step_cuda import Known

WIDTH, LAYERS, STEPS = 512, 4, 8
OFF = 0.05
"""By so much of the peak a prediction may be off."""

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def known_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    yield
    collect()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(CUDA)


def batch(number: int) -> Tensor:
    return torch.randn(32, 256, WIDTH, generator=torch.Generator().manual_seed(number)).to(CUDA)


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def collect() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def looped(budget: int | str | None) -> tuple[list[float], tuple[StepNeeds, ...], int]:
    """Return the losses of some steps of a loop, what they need, and the most that was allocated in the last two."""
    collect()
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tuned = autotuner.optimize(model, compiler="eager", memory_budget=budget, watch=None)
    losses = []
    for number in range(STEPS):
        if number == STEPS - 2:
            torch.cuda.reset_peak_memory_stats()
        loss = loss_of(tuned, batch(number))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, autotuner.summary(model).needs, torch.cuda.max_memory_allocated()


def stepped(budget: int | str | None) -> tuple[list[float], tuple[StepNeeds, ...], int]:
    """Return the same of steps that are the package's, and not captured."""
    collect()
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = autotuner.training_step(
        model, optimizer, loss_of, compiler="eager", memory_budget=budget, capture=False, watch=None
    )
    losses = []
    for number in range(STEPS):
        if number == STEPS - 2:
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(step(batch(number))))
    return losses, tuple(step.needs), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("trained", [looped, stepped])
def test_steps_that_are_not_captured_keep_to_their_budget(trained: Any) -> None:
    wanted, _, _ = trained(None)
    losses, (most,), peak = trained("4GiB")
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert most.repeating == 0
    assert peak <= most.measured_bytes * (1 + OFF)
    for share in (0.5, 0.1):
        budget = int(most.least_bytes + share * (most.measured_bytes - most.least_bytes))
        losses, (needs,), peak = trained(budget)
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert needs.repeating > 0
        assert max(needs.measured_bytes, needs.reserved_bytes, peak) <= budget
        assert abs(needs.predicted_bytes / needs.measured_bytes - 1) <= OFF
