"""Workspaces of one step: they give their memory back, read inputs where they are, and compute what others do."""

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autotuner.ir.models import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.measure.devices.cpu_sampling import allocated_bytes
from autotuner.plan.memory_planner import MemoryPlan
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.scratch import Scratch, sharing
from autotuner.runtime.workspace import Workspace
from tests.runtime.made_up_device import MadeUpDevice, instead_of_the_cpu
from tests.runtime.plans import configuration, model
from tests.runtime.regions import assert_same, declared_ports, operands, step

LAYERS = 6
SCALED = {
    "version": 1,
    "name": "scaled",
    "dtype": "float64",
    "axes": {"b": "batch", "h": "hidden"},
    "inputs": {"x": {"axes": "bh"}},
    "parameters": {},
    "operators": [
        {"name": "halved", "kind": "scale", "spec": "bh->bh", "inputs": ["x"], "outputs": ["halved"],
         "attributes": {"factor": 0.5}},
        {"name": "y", "kind": "gelu_erf", "spec": "bh->bh", "inputs": ["halved"], "outputs": ["y"]},
    ],
    "outputs": ["y"],
}  # fmt: skip
"""What backward reads is made of the input, and is not the input."""
WIDE = {"b": 4, "l": 64, "h": 64, "n": 4, "p": 16, "f": 256}


def layers(
    count: int = LAYERS, *, extents: dict[str, int] | None = None
) -> tuple[list[TunedRegion], list[Tensor], list[Tensor]]:
    """Return equal layers, their input and their parameters."""
    of = model() if extents is None else model(extents)
    found = configuration(of)
    (x, *_), parameters = operands(of)
    return [TunedRegion(found, declared_ports(of), in_place=True) for _ in range(count)], [x], parameters


def one_behind_the_other(made: Sequence[TunedRegion], parameters: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
    def run(inputs: Sequence[Tensor], _: Sequence[Tensor]) -> list[Tensor]:
        (x,) = inputs
        for layer in made:
            (x,) = layer.call([x], parameters)
        return [x]

    return run


def alive() -> list[Workspace]:
    """Return the workspaces of this process that have memory."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Workspace and not each.is_gone]


@pytest.mark.slow
def test_a_step_that_keeps_nothing_computes_the_same_and_leaves_no_memory() -> None:
    made, inputs, parameters = layers()
    run = one_behind_the_other(made, parameters)
    before = len(alive())
    with sharing(Scratch(is_of_one_step=True)):
        found = [step(run, inputs, parameters) for _ in range(2)]
        assert len(alive()) == before
    expected = step(run, inputs, parameters)
    assert len(alive()) == before + LAYERS
    for each in found:
        assert_same(each, expected)


@pytest.mark.slow
def test_a_captured_step_leaves_no_memory_either(monkeypatch: pytest.MonkeyPatch) -> None:
    device: MadeUpDevice = instead_of_the_cpu(monkeypatch)
    made, inputs, parameters = layers()
    run = one_behind_the_other(made, parameters)
    before = len(alive())
    found: list[list[Tensor | None]] = []
    replay = device.captured(lambda: found.append(step(run, inputs, parameters)), device.pool())
    assert len(alive()) == before
    replay()
    assert len(alive()) == before
    device.capturing = False
    assert_same(found[-1], step(run, inputs, parameters))


@pytest.mark.slow
def test_without_gradients_and_with_a_graph_that_is_kept_memory_is_given_back_when_nobody_holds_it() -> None:
    made, (x, *_), parameters = layers(1)
    run = one_behind_the_other(made, parameters)
    before = len(alive())
    with sharing(Scratch(is_of_one_step=True)):
        with torch.no_grad():
            run([x], parameters)
        assert len(alive()) == before
        (y,) = run([x], parameters)
        first = torch.autograd.grad(y.sum(), parameters, retain_graph=True)
        assert len(alive()) == before + 1
        second = torch.autograd.grad(y.sum(), parameters)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        assert len(alive()) == before


def test_inputs_have_no_memory_where_they_are_read_in_place() -> None:
    (layer,), (x, *_), parameters = layers(1)
    plan = layer.plan.memory
    assert [buffer.role for buffer in plan.buffers if set(buffer.offsets) & set(plan.inputs.values())] == ["input"]
    stages: list[int] = []
    with sharing(Scratch(is_of_one_step=True)):
        outputs, lease = layer.forward([x.detach()], [parameter.detach() for parameter in parameters], in_place=True)
        stages += [len(lease.workspace._inputs.tensors())]
    outputs, lease = layer.forward([x.detach()], [parameter.detach() for parameter in parameters], in_place=True)
    stages += [len(lease.workspace._inputs.tensors())]
    assert stages == [0, 1]
    assert outputs


def test_hooks_that_give_copies_to_backward_give_the_same_gradients() -> None:
    made, inputs, parameters = layers(2)
    run = one_behind_the_other(made, parameters)
    expected = step(run, inputs, parameters)
    with sharing(Scratch(is_of_one_step=True)), saved_tensors_hooks(Tensor.clone, lambda copy: copy):
        found = step(run, inputs, parameters)
    assert_same(found, expected)


@pytest.mark.slow
def test_a_step_needs_what_its_forward_leaves_and_one_layer_more() -> None:
    made, inputs, parameters = layers(extents=WIDE)
    run = one_behind_the_other(made, parameters)
    plan: MemoryPlan = made[0].plan.memory

    def once(scratch: Scratch) -> Callable[[], None]:
        def run_it() -> None:
            with sharing(scratch):
                step(run, inputs, parameters)

        return run_it

    once(Scratch(is_of_one_step=True))()  # kernels are built
    found = allocated_bytes(once(Scratch(is_of_one_step=True)))
    kept = allocated_bytes(once(Scratch()))
    x, weights = inputs[0].nbytes, sum(parameter.nbytes for parameter in parameters)
    # Outputs are read by the next layers; gradients of shared parameters are added to those of the layer before.
    least = LAYERS * plan.kept_bytes + (plan.arena_bytes - plan.kept_bytes) + LAYERS * x + weights
    assert least <= found <= 1.05 * least
    assert 1.15 * found < kept < 1.25 * found


def test_an_input_that_backward_does_not_read_has_no_memory_behind_forward() -> None:
    of = ModelFile("test", parse_definition(SCALED, "test")).instantiate(extents={"b": 64, "h": 1024}, dtype="float64")
    found, ports = configuration(of), declared_ports(of)
    made = [TunedRegion(found, ports, in_place=True) for _ in range(LAYERS)]
    plan: MemoryPlan = made[0].plan.memory
    assert plan.read_again == frozenset()
    ((x,), _), expected = operands(of), operands(of)[0]
    y = expected[0]
    for _ in made:
        y = nn.functional.gelu(0.5 * y)
    y.sum().backward()  # type: ignore[no-untyped-call]

    def once() -> None:
        x.grad = None
        with sharing(Scratch(is_of_one_step=True)):
            (y,) = one_behind_the_other(made, [])([x], [])
            y.sum().backward()  # type: ignore[no-untyped-call]

    once()  # kernels are built
    assert_same([x.grad], [expected[0].grad])
    least = LAYERS * plan.kept_bytes + (plan.arena_bytes - plan.kept_bytes) + x.nbytes
    # Where a layer begins, what it reads and makes is there, and the gradients of both where its backward does.
    assert least <= allocated_bytes(once) <= least + 2 * x.nbytes
