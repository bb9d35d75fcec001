"""A configuration as plain calls: what a backward leaves for another one."""

import re
import sys

import pytest
import torch
from torch import Tensor

from autotuner.errors import InputError
from autotuner.ir.models import Model
from autotuner.runtime import TrainingStep
from tests.runtime.layers import batch
from tests.runtime.plans import MASKED, WITH_DROPOUT, configuration, model

pytestmark = pytest.mark.slow


def training_step(of: Model) -> TrainingStep:
    found = configuration(of)
    generator = torch.Generator().manual_seed(0)
    graph = found.graph()
    values: dict[str, Tensor] = {
        name: torch.randn(graph.shape(name), generator=generator, dtype=torch.float64)
        for name, tensor in graph.tensors.items()
        if tensor.role == "parameter"
    }
    return TrainingStep(found, values)


def test_a_backward_that_keeps_leaves_all_for_the_next() -> None:
    step = training_step(model(p=WITH_DROPOUT))
    step.forward(batch())
    runs = [{n: g.clone() for n, g in step.backward(batch(1), keeps=keeps).items()} for keeps in (True, True, False)]
    for run in runs[1:]:
        assert all(torch.equal(runs[0][name], grad) for name, grad in run.items())


def test_a_second_backward_is_refused_where_the_first_kept_nothing() -> None:
    step = training_step(model())
    with pytest.raises(RuntimeError, match="run forward again"):
        step.backward(batch(1))
    step.forward(batch())
    step.backward(batch(1))
    with pytest.raises(RuntimeError, match="keeps=True"):
        step.backward(batch(1))
    step.forward(batch())
    assert step.backward(batch(1))


def test_inputs_and_gradients_are_read_where_they_are_if_asked_and_copied_again_afterwards() -> None:
    workspace = training_step(model()).workspace
    wanted = (True,) * len(workspace.ports.sources)
    x, grad = batch(), batch(1)

    def step(x: Tensor, grad: Tensor, in_place: bool) -> list[Tensor]:
        (y,) = workspace.forward(x, in_place=in_place)
        found = workspace.backward((grad,), wanted, in_place=in_place)
        return [y.clone(), *(each.clone() for each in found if each is not None)]

    expected = step(x, grad, False)
    for stage in workspace.stages():
        stage.fill_(float("nan"))
    found = step(x, grad, True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(x, batch())
    assert torch.equal(grad, batch(1))
    found = step(x.transpose(0, 1).contiguous().transpose(0, 1), grad, True)  # lies otherwise, and so is copied
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    workspace.forward(x)
    x.zero_()
    again = workspace.backward((grad,), wanted)
    assert all(torch.equal(one, other) for one, other in zip(again, expected[1:], strict=True) if one is not None)


def test_a_backward_in_place_that_keeps_leaves_all_for_the_next() -> None:
    workspace = training_step(model(p=WITH_DROPOUT)).workspace
    wanted = (True,) * len(workspace.ports.sources)
    workspace.forward(batch(), in_place=True)
    runs = []
    for keeps in (True, False):
        runs.append([g.clone() for g in workspace.backward((batch(1),), wanted, keeps, in_place=True) if g is not None])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_a_gradient_that_lies_otherwise_is_not_mistaken_for_the_one_that_was_read_in_place_before() -> None:
    workspace = training_step(model()).workspace
    wanted = (True,) * len(workspace.ports.sources)
    spread = batch(2)[:, :1].expand(-1, batch(2).shape[1], -1)
    workspace.forward(batch())
    expected = [g.clone() for g in workspace.backward((spread,), wanted) if g is not None]
    workspace.forward(batch(), in_place=True)
    workspace.backward((batch(1),), wanted, True, in_place=True)
    found = [g for g in workspace.backward((spread,), wanted, in_place=True) if g is not None]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_a_captured_forward_hands_out_is_made_anew_and_nothing_of_the_callers_is_held_afterwards() -> None:
    workspace = training_step(model()).workspace
    wanted = (True,) * len(workspace.ports.sources)
    workspace.forward(batch())
    workspace.backward((batch(1),), wanted)
    (before,) = workspace.outputs.by_phase["forward"]
    x = batch()
    holders = sys.getrefcount(x), torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    workspace.in_capture = True
    (y,) = workspace.forward(x.transpose(0, 1).contiguous().transpose(0, 1), in_place=True)
    assert y.data_ptr() != before.handed[0].data_ptr()
    workspace.backward((batch(1),), wanted, in_place=True)
    workspace.forward(x, in_place=True)
    workspace.backward((batch(1),), wanted, in_place=True)
    assert (sys.getrefcount(x), torch._C._storage_Use_Count(x.untyped_storage()._cdata)) == holders


WIDE = (2, 6, 8)


@pytest.mark.parametrize(
    "given, found",
    [
        (torch.zeros(1, 6, 8, dtype=torch.float64), "(1, 6, 8) torch.float64 on cpu"),
        (torch.zeros(8, dtype=torch.float64), "(8,) torch.float64 on cpu"),
        (torch.zeros((), dtype=torch.float64), "() torch.float64 on cpu"),
        (torch.zeros(WIDE), "(2, 6, 8) torch.float32 on cpu"),
        (torch.zeros(WIDE, dtype=torch.bool), "(2, 6, 8) torch.bool on cpu"),
        (torch.zeros(WIDE, dtype=torch.float64, device="meta"), "(2, 6, 8) torch.float64 on meta"),
    ],
    ids=["batch of one", "row", "scalar", "narrow type", "boolean", "device"],
)
def test_an_input_or_a_gradient_that_is_unlike_the_configurations_is_refused(given: Tensor, found: str) -> None:
    step = training_step(model())
    runs = "and the configuration runs (2, 6, 8) torch.float64 on cpu"
    with pytest.raises(InputError, match=re.escape(f"the x is {found}, {runs}")):
        step.forward(given)
    step.forward(batch())
    with pytest.raises(InputError, match=re.escape(f"the gradient of y is {found}, {runs}")):
        step.backward(given)
    assert set(step.backward(batch(1))) >= {"grad_x"}


@pytest.mark.parametrize(
    "mask, found",
    [
        (torch.zeros(6, dtype=torch.float64), "(6,) torch.float64 on cpu"),
        (torch.zeros(2, 6, dtype=torch.bool), "(2, 6) torch.bool on cpu"),
    ],
)
def test_a_mask_that_is_unlike_the_configurations_is_refused(mask: Tensor, found: str) -> None:
    step = training_step(MASKED)
    with pytest.raises(
        InputError, match=re.escape(f"the attention_mask is {found}, and the configuration runs (2, 6)")
    ):
        step.forward(batch(), mask)
    assert torch.equal(step.forward(batch()), step.forward(batch(), torch.zeros(2, 6, dtype=torch.float64)))


def test_a_mask_for_a_configuration_without_one_is_refused_not_left_out() -> None:
    with pytest.raises(InputError, match="a mask is given, and the configuration has none"):
        training_step(model()).forward(batch(), torch.zeros(2, 6, dtype=torch.float64))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="the x is a NoneType: give a tensor"):
        training_step(model()).forward(None)  # type: ignore[arg-type]
