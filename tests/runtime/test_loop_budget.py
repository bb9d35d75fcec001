"""Memory budgets of ordinary loops: what their steps compute, need and say."""

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import autotuner
import autotuner.runtime.built_steps
from autotuner.errors import BudgetError, InputError, TunedWarning
from autotuner.plan.phrases import binary
from autotuner.runtime import loop_budget
from autotuner.runtime.one_pass_updates import is_known
from autotuner.runtime.step_needs import StepNeeds
from tests.runtime.capture.known import Known
from tests.runtime.made_up_device import MEMORY, instead_of_the_cpu
from tests.runtime.test_step_budget import LAYERS, Layers, Leaner, batch, trained

STEPS = 7
OFF, LESS = 0.05, 0.9
"""By so much of the peak a prediction may be off; and a share of the least budget under which memory is kept."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def known_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Leaner())
    monkeypatch.setattr("autotuner.tuner.peak_search.CALLS", (4, 4))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def looped(
    model: nn.Module,
    budget: int | str | None,
    *,
    parts: int = 1,
    between: Callable[[Any, int], object] = lambda *_: None,
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] | None = None,
) -> tuple[list[float], list[StepNeeds]]:
    """Return the losses of some steps of a loop, and what its summary says that they need."""
    torch._dynamo.reset()
    made = optimizers(model) if optimizers else [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)]
    tuned = autotuner.optimize(model, compiler="eager", memory_budget=budget, watch=None)
    torch.manual_seed(1)
    losses = []
    for number in range(STEPS):
        between(tuned, number)
        for part in range(parts):
            loss = tuned(batch(parts * number + part)).square().mean() / parts
            loss.backward()
        losses.append(float(loss.detach()))
        for optimizer in made:
            optimizer.step()
        for optimizer in made:
            optimizer.zero_grad()
    return losses, [*autotuner.summary(model).needs]


def budget_between(needs: StepNeeds, share: float) -> int:
    return int(needs.least_bytes + share * (needs.measured_bytes - needs.least_bytes))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_steps_of_a_loop_compute_the_same_under_any_budget_and_need_what_is_predicted_and_never_more(
    p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if p:
        monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    wanted, _ = looped(Layers(p), None)
    losses, (most,) = looped(Layers(p), "1GiB")
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert most.repeating == 0
    for share in (0.6, 0.0):
        budget = budget_between(most, share)
        losses, (needs,) = looped(Layers(p), budget)
        assert losses == pytest.approx(wanted, rel=1e-8)
        assert 0 < needs.measured_bytes <= budget
        assert abs(needs.predicted_bytes / needs.measured_bytes - 1) <= OFF
    assert needs.repeating > 0


def test_a_budget_holds_no_model_and_no_optimizer_behind_their_last_step() -> None:
    made: list[ref[object]] = []

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        own = torch.optim.AdamW(model.parameters(), lr=1e-3)
        made.extend([ref(model), ref(own)])
        return [own]

    looped(Layers(), "1GiB", optimizers=optimizers)
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in made] == [None, None]


def test_a_budget_for_which_memory_cannot_be_kept_has_it_taken_anew_in_each_step() -> None:
    wanted, _ = looped(Layers(), None)
    _, (most,) = looped(Layers(), "1GiB")
    losses, (needs,) = looped(Layers(), int(LESS * most.least_bytes))
    assert losses == pytest.approx(wanted, rel=1e-8)
    assert needs.least_bytes < LESS * most.least_bytes
    assert needs.measured_bytes <= LESS * most.least_bytes


def test_kernels_are_built_once_where_memory_is_kept_and_in_each_step_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = 0

    def counted(*arguments: Any, made: Any = autotuner.runtime.built_steps.BuiltSteps.__init__, **named: Any) -> None:
        nonlocal built
        built += 1
        made(*arguments, **named)

    def note(_: Any, number: int) -> None:
        if number >= STEPS - 2:
            counts.append(built)

    _, (most,) = looped(Layers(), "1GiB")
    monkeypatch.setattr("autotuner.runtime.built_steps.BuiltSteps.__init__", counted)
    counts: list[int] = []
    for budget in ("1GiB", budget_between(most, 0.3)):
        looped(Layers(), budget, between=note)
    _, (least,) = looped(Layers(), int(LESS * most.least_bytes), between=note)
    assert most.keeping_bytes == 0
    assert least.keeping_bytes == pytest.approx(most.least_bytes, rel=OFF)
    assert str(least).endswith(
        f"; with {binary(least.keeping_bytes, up=True)}, kernels need not be built anew in each step"
    )
    before, after = counts[::2], counts[1::2]
    again = [stop - start for start, stop in zip(before, after, strict=True)]
    assert again[:2] == [0, 0]
    assert again[2] >= 3  # once or twice for each layer


def test_whole_steps_update_in_one_pass_beside_loops_under_a_budget() -> None:
    loop_budget.loop_budget(1 << 40, torch.device("cpu"))
    optimizer = torch.optim.AdamW(Layers().parameters())
    assert is_known(optimizer)
    hook = register_optimizer_step_post_hook(lambda *_: None)
    assert not is_known(optimizer)
    hook.remove()


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_regions_become_graphs_once_their_memory_stays_and_are_replayed_from_then_on(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(_: Any, number: int) -> None:
        seen.append((number, device.captures, device.replays))

    wanted, _ = looped(Layers(), None)
    _, (most,) = looped(Layers(), "1GiB")
    device = instead_of_the_cpu(monkeypatch)
    pools = []
    monkeypatch.setattr(device, "pool", lambda: pools.append(MEMORY) or MEMORY)  # type: ignore[func-returns-value]
    seen: list[tuple[int, int, int]] = []
    losses, (needs,) = looped(Layers(), budget_between(most, share), between=note)
    assert losses == pytest.approx(wanted, rel=1e-8)
    captures = [captures for _, captures, _ in seen]
    assert captures[:4] == [0] * 4  # compiles, is measured, and builds
    assert captures[4] == captures[-1] == 2 * LAYERS  # a forward that is repeated is a graph already
    again = [after - before for (_, _, before), (_, _, after) in pairwise(seen[4:])]
    assert set(again) == {2 * LAYERS + needs.repeating}
    assert (needs.repeating > 0) == (share < 1)
    assert pools == [MEMORY]  # they never run at one time


def test_gradients_are_summed_over_several_calls_and_what_is_called_without_any_belongs_to_no_step() -> None:
    def evaluate(model: Any, number: int) -> None:
        if number in (0, 2, 4):
            with torch.no_grad():
                model(batch(99))

    wanted, _ = looped(Layers(), None, parts=2, between=evaluate)
    _, (most,) = looped(Layers(), "1GiB", parts=2, between=evaluate)
    budget = budget_between(most, 0.3)
    losses, (needs,) = looped(Layers(), budget, parts=2, between=evaluate)
    assert losses == pytest.approx(wanted, rel=1e-8)
    assert needs.measured_bytes <= budget


def test_a_step_ends_with_the_last_of_its_optimizers() -> None:
    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        weights = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim <= 1]
        return [torch.optim.AdamW(weights, lr=1e-3, fused=True), torch.optim.SGD(others, lr=1e-3)]

    wanted, _ = looped(Layers(), None, optimizers=two)
    losses, (needs,) = looped(Layers(), "1GiB", optimizers=two)
    assert losses == pytest.approx(wanted, rel=1e-12)
    state = sum(2 * each.nbytes + 4 for each in Layers().parameters() if each.ndim > 1)
    gradients = sum(each.nbytes for each in Layers().parameters())
    assert needs.measured_bytes > state + 2 * gradients


def test_layers_that_the_user_checkpoints_run_within_the_budget() -> None:
    wanted, _ = looped(Layers(checkpointed=True), None)
    _, (most,) = looped(Layers(checkpointed=True), "1GiB")
    budget = budget_between(most, 0.3)
    losses, (needs,) = looped(Layers(checkpointed=True), budget)
    assert losses == pytest.approx(wanted, rel=1e-8)
    assert needs.measured_bytes <= budget


def test_a_budget_that_is_too_small_is_refused_by_the_optimizers_second_step_as_by_a_whole_one() -> None:
    with pytest.raises(BudgetError, match=r"memory_budget is 1.00 MiB, and a training step needs .* of gradients"):
        looped(Layers(), "1MiB")
    with pytest.raises(BudgetError) as whole:
        trained(Layers(), "1MiB")
    with pytest.raises(BudgetError) as loop:
        looped(Layers(), "1MiB")
    assert loop.value.least_bytes == pytest.approx(whole.value.least_bytes, rel=OFF)


def test_what_is_no_budget_or_decides_nothing_is_said() -> None:
    with pytest.raises(InputError, match=r"memory_budget .*: write a number of bytes, or one with a unit"):
        looped(Layers(), "sixteen")
    options: dict[str, Any] = {"memory_budget": "1GiB", "capture": "step"}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="memory_budget is for a loop of one's own"):
        torch.compile(Layers(), backend="autotuner", options=options)(batch())
    with pytest.warns(TunedWarning, match=r"memory_budget decides nothing: no region of this model runs tuned"):
        looped(nn.Sequential(nn.Linear(32, 32)), "1GiB")


def test_a_call_that_finds_no_memory_ends_its_step_and_the_next_ones_are_leaner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (most,) = looped(Layers(), "1GiB")

    def lacking(model: Any, number: int) -> None:
        if number == 4:
            with monkeypatch.context() as patch:
                patch.setattr("autotuner.runtime.region_choice.HeldCall.__init__", out_of_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    model(batch(number))

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    wanted, _ = looped(Layers(), None)
    losses, (needs,) = looped(Layers(), most.measured_bytes, between=lacking)
    assert losses == pytest.approx(wanted, rel=1e-8)
    assert needs.measured_bytes < most.measured_bytes


@pytest.mark.parametrize("is_roomy", [False, True])
def test_shapes_keep_memory_side_by_side_only_where_the_budget_has_room_for_all(*, is_roomy: bool) -> None:
    budget = 1 << 29 if is_roomy else looped(Layers(), "1GiB")[1][0].measured_bytes + (1 << 16)
    steps: list[list[float]] = []
    for given in (None, budget):
        torch._dynamo.reset()
        model = Layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tuned = autotuner.optimize(model, compiler="eager", memory_budget=given, watch=None)
        steps.append([])
        for number in range(10):
            loss = tuned(batch(number, 4 if number % 2 else 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps[-1].append(float(loss.detach()))
    assert steps[1] == pytest.approx(steps[0], rel=1e-8)
    large, small = autotuner.summary(model).needs
    assert small.measured_bytes < large.measured_bytes <= budget
    own = loop_budget.loop_budget(budget, torch.device("cpu"))
    kept = [each.budget.standing_bytes for each in own._steps.values() if each.budget.needs is not None]
    assert len(kept) == 2
    assert sum(size > 0 for size in kept) == (2 if is_roomy else 1)
    assert max(kept) < large.measured_bytes


def test_steps_under_torchs_profiler_are_not_measured_and_later_ones_are() -> None:
    def profiled(_: Any, number: int) -> None:
        if number == 1:
            profiler.start()
        if number == 3:
            profiler.stop()

    wanted, (most,) = looped(Layers(), "1GiB")
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    losses, (needs,) = looped(Layers(), "1GiB", between=profiled)
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert needs.least_bytes == most.least_bytes
    assert needs.measured_bytes == most.measured_bytes


def test_models_with_one_budget_on_one_device_share_it() -> None:
    looped(Layers(), "64MiB")
    own = loop_budget.loop_budget(64 << 20, torch.device("cpu"))
    assert own is loop_budget.loop_budget(1 << 26, torch.device("cpu"))
    assert own in loop_budget.loop_budgets()
    unknown: list[Tensor] = [nn.Parameter(torch.zeros(1))]
    assert loop_budget.needs_of(unknown) == ()
