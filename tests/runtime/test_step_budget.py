"""Training steps under a memory budget: what they compute, what they need, and what they say."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotuner
from autotuner.errors import BudgetError, InputError
from autotuner.runtime.region_choice import RegionChoice
from autotuner.runtime.step_budget import StepBudget, StepNeeds
from autotuner.runtime.whole_step import WholeStep
from autotuner.space.fusion import repeats
from autotuner.tuner import solving
from tests.runtime.capture import known
from tests.runtime.capture.known import Known
from tests.runtime.made_up_device import instead_of_the_cpu

LAYERS = 4
STEPS = 6
OFF = 0.05
"""By so much of the peak a prediction may be off."""


@pytest.fixture(autouse=True)
def plans_for_small_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have plans found that leave fewer bytes of tensors as small as these, and all regions known."""
    monkeypatch.setattr(repeats, "BYTES_MIN", 0)
    monkeypatch.setattr(solving, "LEAN_BYTES", 0)
    monkeypatch.setattr(known, "_PLANNED", {})
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Model(nn.Module):
    """Encoder layers, one of which may run twice, or be checkpointed by the user."""

    def __init__(self, p: float = 0.1, *, again: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 128, dropout=p, activation="gelu", batch_first=True)
            for _ in range(LAYERS)
        )
        self.again, self.checkpointed = again, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed and number == 1 else layer(x)
        return self.layers[0](x) if self.again else x


def batch(seed: int = 0, rows: int = 8) -> Tensor:
    return torch.randn(rows, 32, 32, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(
    model: nn.Module, budget: int | str | None, *, steps: int = STEPS, parts: int = 1, rows: int = 8
) -> tuple[list[float], WholeStep]:
    """Return the losses of some steps, and the function that ran them."""
    torch._dynamo.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = autotuner.training_step(model, optimizer, loss_of, compiler="eager", memory_budget=budget, watch=None)
    torch.manual_seed(1)
    return [
        float(step(*(batch(parts * number + part, rows) for part in range(parts)))) for number in range(steps)
    ], step


def needs_of(step: WholeStep) -> StepNeeds:
    (needs,) = step.needs
    return needs


@pytest.fixture(scope="module")
def range_of_needs() -> list[StepNeeds]:
    """What a step needs, without a limit."""
    return []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"again": True}, {"checkpointed": True}], ids=["plain", "twice", "checkpoint"])
def test_steps_compute_the_same_under_any_budget_and_need_what_is_predicted_and_never_more(
    options: dict[str, bool],
) -> None:
    wanted, _ = trained(Model(**options), None)
    losses, step = trained(Model(**options), "1GiB")
    assert losses == wanted
    most = needs_of(step)
    assert most.repeating == 0
    times = [most.time_us]
    for share in (0.8, 0.6, 0.4, 0.2, 0.0):
        budget = int(most.least_bytes + share * (most.measured_bytes - most.least_bytes))
        losses, step = trained(Model(**options), budget)
        needs = needs_of(step)
        assert losses == wanted
        assert needs.measured_bytes <= budget
        assert abs(needs.predicted_bytes / needs.measured_bytes - 1) <= OFF
        assert needs.budget_bytes == budget
        times.append(needs.time_us)
    assert times == sorted(times)
    assert 1.15 * times[0] < times[-1] < 1.5 * times[0]
    assert most.least_bytes < 0.6 * most.measured_bytes


@pytest.mark.slow
def test_plans_that_leave_less_are_taken_before_forwards_are_repeated() -> None:
    _, step = trained(Model(0.0), "1GiB", steps=4)
    most = needs_of(step)
    _, step = trained(Model(0.0), most.measured_bytes - 1, steps=5)
    needs = needs_of(step)
    assert needs.repeating == 0
    assert needs.least_us < needs.time_us < 1.05 * needs.least_us
    assert needs.measured_bytes < most.measured_bytes


@pytest.mark.slow
def test_what_is_predicted_is_what_is_measured_whatever_each_region_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """All combinations of three layers: the chosen one is the fastest of those that were measured to fit."""
    monkeypatch.setattr("tests.runtime.test_step_budget.LAYERS", 3)
    ways = iter([*itertools.product(range(2), repeat=3)])
    measured: dict[tuple[int, ...], StepNeeds] = {}

    def places(regions: list[RegionChoice], chosen: tuple[int, ...]) -> list[int]:
        by_speed = [(region.ways.index(region.fastest), region.ways.index(region.leanest)) for region in regions]
        return [ends[place] for ends, place in zip(by_speed, chosen, strict=True)]

    for chosen in ways:
        with monkeypatch.context() as patch:

            def forced(options: Any, room: Any, chosen: tuple[int, ...] = chosen) -> list[int]:  # noqa: ARG001
                fastest = [min(range(len(o)), key=lambda n, o=o: o[n].time_us) for o in options]
                leanest = [min(range(len(o)), key=lambda n, o=o: (o[n].held_bytes, o[n].backward_bytes, o[n].time_us)) for o in options]
                return [(f, l)[c] for f, l, c in zip(fastest, leanest, chosen, strict=True)]

            patch.setattr("autotuner.runtime.step_budget.fastest_ways", forced)
            _, step = trained(Model(), "1GiB", steps=4)
        measured[chosen] = needs_of(step)
        assert abs(measured[chosen].predicted_bytes / measured[chosen].measured_bytes - 1) <= OFF
    for budget in sorted({needs.measured_bytes for needs in measured.values()}):
        _, step = trained(Model(), budget, steps=5)
        fitting = [needs.time_us for needs in measured.values() if needs.measured_bytes <= budget]
        assert needs_of(step).time_us <= min(fitting)


@pytest.mark.slow
def test_micro_batches_and_shapes_have_their_own_needs() -> None:
    wanted, _ = trained(Model(), None, parts=2)
    losses, step = trained(Model(), "1GiB", parts=2)
    assert losses == wanted
    parted = needs_of(step)
    model = Model()
    _, step = trained(model, "1GiB")
    for number in range(4):
        step(batch(number, rows=2))
    large, small = step.needs
    assert small.measured_bytes < 0.7 * large.measured_bytes
    assert abs(parted.measured_bytes / large.measured_bytes - 1) < 0.1


@pytest.mark.slow
def test_a_budget_that_no_way_meets_is_refused_with_what_is_needed_and_what_for() -> None:
    _, step = trained(Model(), "1GiB", steps=4)
    least = needs_of(step).least_bytes
    with pytest.raises(BudgetError) as raised:
        trained(Model(), "1MiB")
    assert raised.value.least_bytes == least
    assert re.fullmatch(
        r"memory_budget is 1.00 MiB, and a training step needs [\d.]+ MiB at least, with every region's forward "
        r"repeated in backward: [\d.]+ [KM]iB of parameters and buffers, [\d.]+ [KM]iB of the optimizer's state, "
        r"[\d.]+ [KM]iB of gradients, [\d.]+ MiB of all else. It needs most .*: give it more memory, or a smaller batch",
        str(raised.value),
    )
    for wrong in ("sixteen", "16 XB", -1, 1.5, True):
        with pytest.raises(InputError, match="memory_budget .*: write a number of bytes, or one with a unit"):
            trained(Model(), wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_captured_steps_keep_to_the_budget_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = trained(Model(), None)
    _, step = trained(Model(), "1GiB", steps=4)
    budget = needs_of(step).least_bytes + (1 << 20)
    device = instead_of_the_cpu(monkeypatch)
    losses, step = trained(Model(), budget, steps=STEPS)
    assert device.captures == 1
    assert step.replays == STEPS - 3
    assert losses == wanted
    said = str(step)
    assert f"{needs_of(step).repeating} of {LAYERS} regions run their forward again in backward, +" in said
    assert 0 < needs_of(step).repeating < LAYERS


@pytest.mark.slow
def test_a_captured_step_that_takes_more_than_the_budget_is_captured_anew_with_leaner_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, step = trained(Model(), "1GiB", steps=4)
    most = needs_of(step).measured_bytes
    instead_of_the_cpu(monkeypatch)
    reserved = iter([most + (1 << 20)])
    exceeded = StepBudget.exceeded
    monkeypatch.setattr(StepBudget, "exceeded", lambda self, _: exceeded(self, next(reserved, most)))
    losses, step = trained(Model(), most, steps=8)
    assert step.replays == 2
    needs = needs_of(step)
    assert needs.measured_bytes < most - (1 << 19)
    assert needs.reserved_bytes == most
    assert losses == trained(Model(), None, steps=8)[0]
