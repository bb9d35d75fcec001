"""Training steps under a memory budget: what they compute, what they need, and what they say."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import autotuner
from autotuner.api.survey import region_calls
from autotuner.errors import BudgetError, InputError, TunedWarning
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from autotuner.ir.records import canonical_json
from autotuner.measure.devices.cpu_sampling import AllocationCount
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import LeanerPlan
from autotuner.runtime.budget_room import SPARE, BudgetRoom
from autotuner.runtime.kept_steps import KeptStepLog
from autotuner.runtime.step_budget import StepBudget
from autotuner.runtime.step_needs import StepNeeds
from autotuner.runtime.whole_step import WholeStep
from autotuner.space import build_space
from autotuner.tuner import build_configuration
from tests.made_up import HERE, UNEXPLAINED, times
from tests.runtime.capture.known import FEW, Known, planned
from tests.runtime.made_up_device import instead_of_the_cpu

LAYERS = 3
STEPS = 4
OFF = 0.05
"""By so much of the peak a prediction may be off."""


class Leaner(Known):
    """Knows every model, with a plan that leaves less for backward."""

    made: ClassVar[dict[str, Configuration]] = {}

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:  # noqa: ARG002
        return [self._of(model) for model in models]

    def _of(self, model: Model) -> Configuration:
        key = canonical_json(model.to_json())
        if key not in self.made:
            whole, graph = planned(model), training_graph(model.graph())
            assert whole.memory is not None
            space = build_space(graph, FEW, saving=True)
            lean = build_configuration(
                model, space, times(space.calls), HERE, {}, policy=UNEXPLAINED,
                budget_bytes=int(0.93 * whole.memory.peak_bytes),
            )  # fmt: skip
            assert lean.memory is not None
            assert lean.memory.held_bytes < 0.9 * whole.memory.held_bytes
            plan = LeanerPlan(lean.steps, lean.certificate.predicted_us, lean.memory.held_bytes, lean.memory.peak_bytes)
            self.made[key] = replace(whole, leaner=(plan,))
        return self.made[key]


@pytest.fixture(autouse=True)
def known_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Leaner())
    monkeypatch.setattr("autotuner.tuner.peak_search.CALLS", (4, 4))  # a lean plan is enough, not the best one
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Layers(nn.Module):
    """Encoder layers, one of which may run twice, or be checkpointed by the user."""

    def __init__(self, p: float = 0.0, *, again: bool = False, checkpointed: bool = False) -> None:
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
    loss: Tensor = model(x).square().mean()
    return loss


def trained(
    model: nn.Module, budget: int | str | None, *, steps: int = STEPS, parts: int = 1, rows: int = 8, **options: Any
) -> tuple[list[float], WholeStep]:
    """Return the losses of some steps, and the function that ran them."""
    torch._dynamo.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = autotuner.training_step(
        model, optimizer, loss_of, compiler="eager", memory_budget=budget, watch=None, **options
    )  # fmt: skip
    torch.manual_seed(1)
    return [
        float(step(*(batch(parts * number + part, rows) for part in range(parts)))) for number in range(steps)
    ], step


def hold_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the allocator say that it keeps what is freed."""
    monkeypatch.setattr(AllocationCount, "stop", lambda self, stop=AllocationCount.stop: (stop(self)[0], 1))


def needs_of(step: WholeStep) -> StepNeeds:
    (needs,) = step.needs
    return needs


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"again": True}], ids=["plain", "twice"])
def test_steps_compute_the_same_under_any_budget_and_need_what_is_predicted_and_never_more(
    options: dict[str, bool],
) -> None:
    wanted, _ = trained(Layers(**options), None)
    losses, step = trained(Layers(**options), "1GiB")
    assert losses == pytest.approx(wanted, rel=1e-8)
    most = needs_of(step)
    assert most.repeating == 0
    times = [most.time_us]
    for share in (0.7, 0.3, 0.0):
        budget = int(most.least_bytes + share * (most.measured_bytes - most.least_bytes))
        losses, step = trained(Layers(**options), budget)
        needs = needs_of(step)
        assert losses == pytest.approx(wanted, rel=1e-8)
        assert needs.measured_bytes <= budget
        assert abs(needs.predicted_bytes / needs.measured_bytes - 1) <= OFF
        assert needs.budget_bytes == budget
        times.append(needs.time_us)
    assert times == sorted(times)
    assert 1.15 * times[0] < times[-1] < 1.6 * times[0]
    assert most.least_bytes < 0.62 * most.measured_bytes


@pytest.mark.slow
def test_copies_of_parameters_count_that_a_plan_wants_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_the_cpu(monkeypatch)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))

    def needs_under(budget: int | str) -> StepNeeds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        optimizer = torch.optim.SGD(model.parameters())
        step = autotuner.training_step(model, optimizer, compiler="eager", memory_budget=budget, watch=None)
        for _ in range(STEPS):
            step({"input_ids": ids, "labels": ids})
        return needs_of(step)

    most = needs_under("1GiB")
    copied = LAYERS * 73_728  # of query, key and value, and of gate and up
    for needs in (most, needs_under((most.least_bytes + most.measured_bytes) // 2)):
        assert abs(needs.predicted_bytes - needs.measured_bytes) <= copied / 10
        assert needs.measured_bytes <= needs.budget_bytes
    assert 0 < needs.repeating < LAYERS


@pytest.mark.slow
def test_updates_in_backward_go_with_a_budget_and_lower_what_a_step_needs_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotuner.runtime.updates_in_backward.PART_BYTES", 1)
    wanted, _ = trained(Layers(), None)
    needs = []
    for in_backward in (False, True):
        _, roomy = trained(Layers(), "1GiB", rows=1, optimizer_in_backward=in_backward)
        needs.append(needs_of(roomy))
        losses, step = trained(Layers(), "1GiB", optimizer_in_backward=in_backward)
        most = needs_of(step)
        budget = most.least_bytes + (most.measured_bytes - most.least_bytes) // 2
        under, _ = trained(Layers(), budget, optimizer_in_backward=in_backward)
        assert losses == pytest.approx(wanted, rel=1e-8)
        assert under == pytest.approx(wanted, rel=1e-8)
    gradients = sum(parameter.nbytes for parameter in Layers().parameters())
    assert needs[1].least_bytes < needs[0].least_bytes - 0.5 * gradients  # of one layer's, all are there


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"checkpointed": True}], ids=["plain", "checkpoint"])
def test_a_forward_that_is_repeated_draws_the_same_masks(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    wanted, _ = trained(Layers(0.3, **options), None)
    assert wanted != trained(Layers(0.0, **options), None)[0]
    _, step = trained(Layers(0.3, **options), "1GiB")
    for share in (0.5, 0.0):
        most = needs_of(step)
        budget = int(most.least_bytes + share * (most.measured_bytes - most.least_bytes))
        losses, under = trained(Layers(0.3, **options), budget)
        assert losses == wanted
        assert needs_of(under).repeating > 0


@pytest.mark.slow
def test_plans_that_leave_less_are_taken_before_forwards_are_repeated() -> None:
    _, step = trained(Layers(), "1GiB")
    most = needs_of(step)
    _, step = trained(Layers(), most.measured_bytes - 1)
    needs = needs_of(step)
    assert needs.repeating == 0
    assert needs.least_us < needs.time_us < 1.1 * needs.least_us
    assert needs.measured_bytes < most.measured_bytes


@pytest.mark.slow
def test_a_region_whose_backward_repeats_operators_that_fused_kernels_keep_inside_is_put_in_order() -> None:
    (region,) = region_calls(Layers(), [(batch(),)]).models.values()
    space, whole = build_space(training_graph(region.graph()), FEW, saving=True), planned(region)
    assert whole.memory is not None
    with pytest.raises(BudgetError, match=r"no plan fits into .* bytes: the smallest that was found needs"):
        build_configuration(
            region, space, times(space.calls), HERE, {}, policy=UNEXPLAINED,
            budget_bytes=int(0.9 * whole.memory.peak_bytes),
        )  # fmt: skip


def taken(log: KeptStepLog, places: Iterable[int]) -> dict[Any, Any]:
    return {region: region.ways[place] for region, place in zip(log.order, places, strict=True)}


@pytest.mark.slow
def test_what_is_predicted_is_what_is_measured_whatever_each_region_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all combinations of the layers' ways, the fastest is taken of those that fit as predicted."""
    _, step = trained(Layers(), "1GiB")
    most = needs_of(step)
    found: dict[tuple[int, ...], StepNeeds] = {}
    for chosen in product((0, 1, 3), repeat=LAYERS):  # each plan, and the leaner one with its forward repeated
        if [*chosen] != sorted(chosen):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(KeptStepLog, "fastest", lambda log, _, chosen=chosen: taken(log, chosen))
            _, step = trained(Layers(), "1GiB")
        found[chosen] = needs = needs_of(step)
        assert abs(needs.predicted_bytes / needs.measured_bytes - 1) <= OFF
    for needs in sorted(found.values(), key=lambda needs: needs.predicted_bytes)[::5]:
        _, step = trained(Layers(), needs.predicted_bytes)
        least_us = min(each.time_us for each in found.values() if each.predicted_bytes <= needs.predicted_bytes)
        assert needs_of(step).time_us <= least_us
        assert needs_of(step).measured_bytes <= needs.predicted_bytes
    assert most.measured_bytes == max(each.measured_bytes for each in found.values())


@pytest.mark.slow
def test_micro_batches_and_shapes_have_their_own_needs() -> None:
    wanted, _ = trained(Layers(), None, parts=2)
    losses, step = trained(Layers(), "1GiB", parts=2)
    assert losses == pytest.approx(wanted, rel=1e-8)
    parted = needs_of(step)
    model = Layers()
    _, step = trained(model, "1GiB")
    for number in range(4):
        step(batch(number, rows=2))
    large, small = step.needs
    assert small.measured_bytes < 0.7 * large.measured_bytes
    assert 1 < parted.measured_bytes / large.measured_bytes < 1.12  # gradients of the one and of the sum


@pytest.mark.slow
def test_a_budget_that_no_way_meets_is_refused_with_what_is_needed_and_what_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, step = trained(Layers(), "1GiB")
    least = needs_of(step).least_bytes
    with pytest.raises(BudgetError) as raised:
        trained(Layers(), "1MiB")
    assert 0.8 * least < raised.value.least_bytes < 0.9 * least  # regions keep no memory then
    _, step = trained(Layers(), raised.value.least_bytes)
    assert needs_of(step).least_bytes == raised.value.least_bytes
    assert needs_of(step).repeating >= LAYERS - 1
    assert re.fullmatch(
        r"memory_budget is 1.00 MiB, and a training step needs [\d.]+ MiB at least, with the forward of all 3 "
        r"tuned regions repeated in backward: [\d.]+ [KM]iB of parameters and buffers, "
        r"[\d.]+ [KM]iB of the optimizer's state, [\d.]+ [KM]iB of gradients, "
        r"[\d.]+ MiB of all else. It needs most .*: give it more memory, or a smaller batch",
        str(raised.value),
    )
    monkeypatch.setattr("autotuner.runtime.updates_in_backward.PART_BYTES", 1)
    with pytest.raises(BudgetError, match=r"state, [\d.]+ MiB of all else, gradients among it. It needs most") as less:
        trained(Layers(), "1MiB", optimizer_in_backward=True)
    assert less.value.least_bytes <= least
    for wrong in ("sixteen", "16 XB", -1, 1.5, True):
        with pytest.raises(InputError, match=r"memory_budget .*: write a number of bytes, or one with a unit"):
            trained(Layers(), wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_captured_steps_keep_to_the_budget_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = trained(Layers(), "1GiB")
    budget = needs_of(step).least_bytes + (1 << 19)
    device = instead_of_the_cpu(monkeypatch)
    wanted, _ = trained(Layers(), None, steps=5)
    losses, step = trained(Layers(), budget, steps=5)
    assert device.captures == 2
    assert step.replays == 2
    assert losses == pytest.approx(wanted, rel=1e-8)
    said = str(step)
    assert f"{needs_of(step).repeating} of {LAYERS} regions run their forward again in backward, +" in said
    assert 0 < needs_of(step).repeating < LAYERS


@pytest.mark.slow
def test_a_captured_step_that_takes_more_than_the_budget_is_captured_anew_with_leaner_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, step = trained(Layers(), "1GiB")
    most = needs_of(step).measured_bytes
    instead_of_the_cpu(monkeypatch)
    reserved = iter([most + (1 << 20)])
    chooses_again = StepBudget.chooses_again
    monkeypatch.setattr(StepBudget, "chooses_again", lambda self, _: chooses_again(self, next(reserved, most)))
    losses, step = trained(Layers(), most, steps=6)
    assert step.replays == 2
    needs = needs_of(step)
    assert needs.measured_bytes < most - (1 << 19)
    assert needs.reserved_bytes == most
    assert losses == pytest.approx(trained(Layers(), None, steps=6)[0], rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False])
def test_a_captured_step_that_leaves_room_is_captured_anew_with_faster_regions_and_these_stay_if_they_fit(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, step = trained(Layers(), "1GiB")
    budget = needs_of(step).measured_bytes
    monkeypatch.setattr("autotuner.runtime.budget_room.SPARE", 0.15)
    hold_blocks(monkeypatch)
    device = instead_of_the_cpu(monkeypatch)
    given = iter([int(0.8 * budget), budget if fits else budget + 1])
    chooses_again, times = StepBudget.chooses_again, []

    def captured_with(own: StepBudget, _: int) -> bool:
        assert own.needs is not None
        times.append(own.needs.time_us)
        return chooses_again(own, next(given, budget))

    monkeypatch.setattr(StepBudget, "chooses_again", captured_with)
    _, step = trained(Layers(), budget, steps=9)
    assert device.captures == len(times) == (2 if fits else 3)
    assert times[1] < times[0]
    assert needs_of(step).time_us == times[1 if fits else 0] == times[-1]


@pytest.mark.slow
def test_a_capture_that_finds_no_memory_is_made_again_with_leaner_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    device = instead_of_the_cpu(monkeypatch)
    device.lacks = 2
    losses, step = trained(Layers(), "4MiB", steps=9)
    assert (device.captures, device.lacks, step.replays) == (1, 0, 4)
    assert needs_of(step).predicted_bytes < (1 - (1 + 2) / 32) * (4 << 20)  # twice as much each time
    assert losses == pytest.approx(trained(Layers(), None, steps=9)[0], rel=1e-8)


@pytest.mark.slow
def test_a_front_says_what_other_budgets_would_give_and_they_do() -> None:
    _, step = trained(Layers(), "1GiB")
    (front,) = step.fronts
    assert front[0].budget_bytes == needs_of(step).least_bytes
    assert front[0].repeating > front[-1].repeating == 0
    assert front[-1].time_us == needs_of(step).time_us
    assert len(front) >= LAYERS
    for point in front:
        _, step = trained(Layers(), point.budget_bytes, steps=3)
        needs = needs_of(step)
        assert needs.repeating == point.repeating
        assert needs.time_us == pytest.approx(point.time_us)
        assert needs.measured_bytes <= needs.predicted_bytes == point.budget_bytes
        assert step.fronts == [front]


def failing(function: Any, number: int) -> Any:
    """Return a function that finds no memory at its call of that number, behind all that it does."""
    calls = iter(range(number, -1000, -1))

    def call(*arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return found

    return call


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
def test_a_choice_that_finds_no_memory_before_the_update_is_given_up_and_its_step_run_again(
    monkeypatch: pytest.MonkeyPatch, *, captured: bool
) -> None:
    if captured:
        instead_of_the_cpu(monkeypatch)
    wanted, _ = trained(Layers(), None)
    monkeypatch.setattr("torch.autograd.backward", failing(torch.autograd.backward, 3))
    losses, step = trained(Layers(), "4MiB")
    assert losses == pytest.approx(wanted, rel=1e-8)
    assert needs_of(step).measured_bytes <= 31 / 32 * (4 << 20)
    assert (step.plain, step.replays) == ((3, 1) if captured else (4, 0))


@pytest.mark.slow
def test_a_step_that_finds_no_memory_elsewhere_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("torch.autograd.backward", failing(torch.autograd.backward, 2))  # as lean as can be
        with pytest.raises(torch.OutOfMemoryError):
            trained(Layers(), "4MiB")
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", failing(torch.optim.AdamW.step, 3))  # parameters are updated
        with pytest.raises(torch.OutOfMemoryError):
            trained(Layers(), "4MiB")


@pytest.mark.slow
def test_where_the_allocator_holds_blocks_a_first_choice_leaves_some_of_the_budget_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, step = trained(Layers(), "1GiB")
    most = needs_of(step).predicted_bytes
    hold_blocks(monkeypatch)
    with monkeypatch.context() as only_first:
        only_first.setattr(BudgetRoom, "grow", lambda *_: False)
        _, step = trained(Layers(), most)
        assert 0.8 * most < needs_of(step).predicted_bytes <= most * (1 - SPARE)
        _, step = trained(Layers(), int(most / (1 - SPARE)) + 2)
        assert needs_of(step).predicted_bytes == most
    _, step = trained(Layers(), most, steps=8)
    assert needs_of(step).predicted_bytes == most
    least = needs_of(step).least_bytes
    _, step = trained(Layers(), int(least * (1 - SPARE / 2)))  # nothing is left free then
    assert (needs_of(step).repeating, needs_of(step).least_bytes) == (LAYERS, least)
    assert needs_of(step).measured_bytes <= needs_of(step).budget_bytes < least


@pytest.mark.slow
def test_where_the_leanest_capture_finds_no_memory_steps_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = instead_of_the_cpu(monkeypatch)
    device.lacks = 20
    with pytest.warns(
        TunedWarning, match=r"could not be captured \(CUDA out of memory. Tried to allocate 2.00 MiB.; \w+"
    ):
        losses, step = trained(Layers(), "4MiB", steps=12)
    assert step.replays == 0
    assert losses == pytest.approx(trained(Layers(), None, steps=12)[0], rel=1e-8)


@pytest.mark.slow
def test_a_model_that_is_compiled_already_is_refused_and_one_without_tuned_regions_is_warned_of() -> None:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters())
    compiled: Any = torch.compile(model, backend="autotuner")
    with pytest.raises(InputError, match="this one is compiled already: give training_step the model that"):
        autotuner.training_step(compiled, optimizer, loss_of, memory_budget="1GiB")
    plain = nn.Linear(32, 32)
    with pytest.warns(TunedWarning, match=r"memory_budget decides nothing: no region of this model runs tuned, and a"):
        trained(plain, "1GiB")


@pytest.mark.slow
def test_where_each_choice_needs_more_than_was_predicted_the_leanest_ways_run_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, step = trained(Layers(), "1GiB")
    most = needs_of(step)
    budget = (most.least_bytes + most.measured_bytes) // 2
    monkeypatch.setattr(KeptStepLog, "fastest", lambda log, _: {region: region.ways[0] for region in log.order})
    _, step = trained(Layers(), budget, steps=9)
    needs = needs_of(step)
    assert step.is_settled
    assert needs.repeating == LAYERS
    assert needs.measured_bytes == pytest.approx(most.least_bytes, rel=0.01)


@pytest.mark.slow
def test_layers_that_are_frozen_hold_nothing_and_are_left_as_fast_as_they_are() -> None:
    def frozen() -> nn.Module:
        model = Layers()
        model.layers[:2].requires_grad_(False)
        return model

    _, step = trained(frozen(), "1GiB")
    most = needs_of(step)
    _, step = trained(frozen(), most.measured_bytes)
    assert needs_of(step).repeating == 0
    _, step = trained(frozen(), most.measured_bytes - 1)
    needs = needs_of(step)
    assert needs.measured_bytes < most.measured_bytes
    assert needs.repeating == 0
    assert needs.time_us < 1.25 * needs.least_us  # all take turns with the memory of a leaner plan
