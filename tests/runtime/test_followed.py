"""Inputs and gradients that are read where they lie, as long as they lie where those of the call before lay."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autotuner.runtime import region_operator
from autotuner.runtime.built_steps import BuiltSteps
from autotuner.runtime.gradient_stacks import stacked
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.saved_state import LEASES
from autotuner.runtime.scratch import Scratch, sharing
from autotuner.runtime.stages import MOVES, Stages
from autotuner.runtime.workspace import Workspace
from tests.runtime.made_up_device import instead_of_the_cpu
from tests.runtime.plans import configuration, model
from tests.runtime.regions import assert_same, declared_ports, operands, siblings_model, step

LAYERS = 3


@pytest.fixture(params=range(3))
def layers(request: pytest.FixtureRequest) -> tuple[list[TunedRegion], Tensor, list[Tensor]]:
    of = model()
    (x, *_), parameters = operands(of)
    found = configuration(of, request.param)
    return [TunedRegion(found, declared_ports(of)) for _ in range(LAYERS)], x, parameters


def run(layers: Sequence[TunedRegion], parameters: Sequence[Tensor]) -> Callable[..., Any]:
    def call(inputs: Sequence[Tensor], _: Sequence[Tensor]) -> list[Tensor]:
        (x,) = inputs
        for layer in layers:
            (x,) = layer.call([x], parameters)
        return [x]

    return call


def workspaces(layers: Sequence[TunedRegion]) -> list[Workspace]:
    """Return the workspace of each layer, in which nothing runs."""
    found = []
    for layer in layers:
        pool = layer.bound.last.pool
        workspace = pool.take()
        pool.give_back(workspace)
        found.append(workspace)
    return found


def expected(layers: Sequence[TunedRegion], x: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    """Return outputs and gradients of the first step, which copies everything."""
    found = step(run(layers, parameters), [x], parameters)
    assert all(not workspace._inputs.in_place for workspace in workspaces(layers))
    return found


def test_a_layer_reads_what_the_one_before_hands_out_where_it_is(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]],
) -> None:
    regions, x, parameters = layers
    wanted = expected(regions, x, parameters)
    for _ in range(4):
        assert_same(step(run(regions, parameters), [x], parameters), wanted)
    found = workspaces(regions)
    assert [len(each._inputs.in_place) for each in found] == [1] * LAYERS
    assert [len(each._given.in_place) for each in found[:-1]] == [1] * (LAYERS - 1)
    read = [each.steps.views[place].data_ptr() for each in found for place in each._inputs.in_place]
    handed = [each.outputs.by_phase["forward"][0].handed[0].data_ptr() for each in found]
    assert read == [x.data_ptr(), *handed[:-1]]
    assert all(layer.bound.last.pool.made == 1 for layer in regions)


def test_graphs_go_on_with_what_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    device = instead_of_the_cpu(monkeypatch, follows=True)
    of = model()
    (x, *_), parameters = operands(of)
    regions = [TunedRegion(configuration(of), declared_ports(of)) for _ in range(LAYERS)]
    given = torch.randn_like(x)  # at one place in all steps
    for _ in range(10):
        device.log.clear()
        for tensor in (x, *parameters):
            tensor.grad = None
        (y,) = run(regions, parameters)([x], ())
        y.backward(given)
    assert device.log == ["replayed"] * 2 * LAYERS
    found = [tensor.grad for tensor in (x, *parameters)]
    plain = [TunedRegion(configuration(of), declared_ports(of)) for _ in range(LAYERS)]
    for tensor in (x, *parameters):
        tensor.grad = None
    run(plain, parameters)([x], ())[0].backward(given)
    assert_same(found, [tensor.grad for tensor in (x, *parameters)])


def test_graphs_of_calls_that_are_built_anew_in_a_capture_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = instead_of_the_cpu(monkeypatch)
    of = model()
    (x, *_), parameters = operands(of)
    region = TunedRegion(configuration(of), declared_ports(of))
    for _ in range(3):
        step(region.call, [x], parameters)
    (y,) = region.call([x], parameters)
    (lease,) = LEASES.values()
    outputs = lease.workspace.outputs
    before = outputs.by_phase["backward"][0]
    outputs.renew({"backward"})
    for tensor in (x, *parameters):
        tensor.grad = None
    device.capturing = True
    torch.autograd.backward(y.sum())
    device.capturing = False
    assert before in outputs.outlived


def test_inputs_that_move_are_copied_and_after_some_moves_always(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]],
) -> None:
    regions, x, parameters = layers
    wanted = expected(regions, x, parameters)
    places = [x, *(x.detach().clone().requires_grad_() for _ in range(3))]
    for turn in range(2 * MOVES + 4):
        here = places[turn // 2 % len(places)]
        assert_same(step(run(regions, parameters), [here], parameters), wanted)
    first, *others = workspaces(regions)
    assert not first._inputs.in_place
    assert all(each._inputs.in_place for each in others)


def test_forwards_that_wait_for_their_backwards_read_what_is_theirs(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]],
) -> None:
    regions, x, parameters = layers
    wanted = expected(regions, x, parameters)
    other = (x.detach() * 2).requires_grad_()
    of_other = step(run(regions, parameters), [other], parameters)
    for turn in range(6):
        waiting = [
            (run(regions, parameters)([leaf], ()), leaf, each) for leaf, each in ((x, wanted), (other, of_other))
        ]
        for made, leaf, each in waiting if turn % 2 else reversed(waiting):
            assert_same(step(lambda *_, made=made: made, [leaf], parameters), each)


def test_hooks_may_give_backward_a_copy_of_an_input(layers: tuple[list[TunedRegion], Tensor, list[Tensor]]) -> None:
    regions, x, parameters = layers
    wanted = expected(regions, x, parameters)

    def pack(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.shape == x.shape else tensor

    def call(inputs: Sequence[Tensor], _: Sequence[Tensor]) -> list[Tensor]:
        made = [*inputs]
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            for region in regions:
                made += region.call(made[-1:], parameters)
        assert [len(each._inputs.in_place) for each in busy()] == [1] * LAYERS
        for y in made[1:-1]:
            y.detach().zero_()  # what is read in place is not what backward has to read
        return made[-1:]

    def busy() -> list[Workspace]:
        return [lease.workspace for lease in LEASES.values()]

    for _ in range(3):
        for _ in range(3):
            assert_same(step(run(regions, parameters), [x], parameters), wanted)
        assert_same(step(call, [x], parameters), wanted)


def test_an_input_that_was_changed_before_backward_is_noticed(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]],
) -> None:
    regions, x, parameters = layers
    wanted = expected(regions, x, parameters)
    for _ in range(3):
        assert_same(step(run(regions, parameters), [x], parameters), wanted)
    here = x.detach().clone().requires_grad_() + 0
    (y,) = run(regions, parameters)([here], ())
    here.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_calls_without_gradient_read_in_place_and_leave_training_as_it_was(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]],
) -> None:
    regions, x, parameters = layers
    wanted = expected(regions, x, parameters)
    other = x.detach() * 2
    with torch.no_grad():
        (alone,) = run(regions, parameters)([other], ())
        alone = alone.clone()
    for _ in range(4):
        assert_same(step(run(regions, parameters), [x], parameters), wanted)
        with torch.no_grad():
            assert_same(run(regions, parameters)([other], ()), [alone])


@pytest.mark.parametrize("fails", ["building", "copying"])
def test_a_call_that_ends_with_an_error_leaves_no_trace(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (region, *_), x, parameters = layers
    expected([region], x, parameters)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(*{"building": (BuiltSteps, "build"), "copying": (Stages, "_over")}[fails], fail)
        with pytest.raises(torch.OutOfMemoryError):
            region.call([x], parameters)  # would have its input read in place from now on
    for factor in (1.0, 2.0, 3.0):
        plain = TunedRegion(region.plan.configuration, region.plan.ports)
        with torch.no_grad():
            x.mul_(factor)
        assert_same(step(region.call, [x], parameters), step(plain.call, [x], parameters))
    assert region.bound.last.pool.made == 2


def test_a_backward_that_ended_with_an_error_cannot_be_run_again(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (region, *_), x, parameters = layers
    wanted = step(region.call, [x], parameters)
    (y,) = region.call([x], parameters)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "_run", fail)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.backward(y.sum(), retain_graph=True)
    with pytest.raises(RuntimeError, match="has ended with an error"):
        torch.autograd.backward(y.sum())
    assert_same(step(region.call, [x], parameters), wanted)


def test_a_tensor_that_stands_for_the_negative_of_its_memory_is_copied(
    layers: tuple[list[TunedRegion], Tensor, list[Tensor]],
) -> None:
    (region, *_), x, parameters = layers
    negative = torch._neg_view(x.detach())
    assert negative.is_neg()
    wanted = step(region.call, [(-x).detach().requires_grad_()], parameters)
    with torch.no_grad():
        direct = region.operator(*region.arguments([negative], parameters))[0]
    assert_same(direct, wanted[:1])
    for _ in range(4):
        given = step(lambda *_: region.call([negative], parameters), [x], parameters)
        assert_same(given[:1], wanted[:1])
        assert_same(given[2:], wanted[2:])


def test_what_backward_hands_out_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part of a stack is frozen, the stack is a copy."""
    of = siblings_model()
    (x, *_), parameters = operands(of)
    made: list[int] = []
    monkeypatch.setattr(region_operator, "stacked", lambda *given: made.append(1) or stacked(*given))  # type: ignore[func-returns-value]
    for is_frozen in (False, True):
        parameters[0].requires_grad_(not is_frozen)
        region = TunedRegion(configuration(of), declared_ports(of))
        wanted = step(region.call, [x], parameters)
        made.clear()
        for number in range(1, 4):
            assert_same(step(region.call, [x], parameters), wanted)
            assert len(made) <= number
        assert (len(made) == 3) == is_frozen, "gradients that lie where they belong are handed out without more ado"
        made.clear()
        with sharing(Scratch(is_of_one_step=True)):
            assert_same(step(TunedRegion(region.plan.configuration, region.plan.ports, in_place=True).call,
                             [x], parameters), wanted)  # fmt: skip
        assert made == [1]
