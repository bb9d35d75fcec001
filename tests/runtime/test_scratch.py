"""What one phase makes and reads itself lies in memory that all layers of a device share, where calls are queued."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
from torch import Tensor

from autotuner.ir.device import CPU, DEVICE_TYPES
from autotuner.runtime import stages
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.scratch import common_scratch
from tests.runtime.made_up_device import MadeUpDevice, instead_of_the_cpu
from tests.runtime.plans import configuration, model
from tests.runtime.regions import assert_same, declared_ports, operands, step

LAYERS, STEPS = 4, 40


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeUpDevice]:
    monkeypatch.setitem(DEVICE_TYPES, CPU, replace(DEVICE_TYPES[CPU], has_graphs=True))
    yield instead_of_the_cpu(monkeypatch)
    gc.collect()


def layers(count: int = LAYERS) -> list[TunedRegion]:
    of = model()
    return [TunedRegion(configuration(of), declared_ports(of), graphs=False) for _ in range(count)]


def given() -> tuple[Tensor, list[Tensor]]:
    (x, *_), parameters = operands(model())
    return x, parameters


def step_of(layer: TunedRegion, x: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    return step(layer.call, [x], parameters)


def test_layers_share_it_and_leave_nothing_in_it(made_up: MadeUpDevice) -> None:
    x, parameters = given()
    alone, several = layers(1), layers()
    wanted = step_of(alone[0], x, parameters)
    for _ in range(3):
        made = [layer.call([x], parameters) for layer in several]  # all wait for their backwards
        common_scratch(x.device).memory(1, x.device).fill_(255)
        for outputs in reversed(made):
            assert_same(step(lambda *_, outputs=outputs: outputs, [x], parameters), wanted)
    plan = several[0].plan.memory
    workspaces = [layer.bound.last.pool.take() for layer in several]
    places = {workspace.arena._scratch.data_ptr() for workspace in workspaces if workspace.arena._scratch is not None}
    assert 0 < plan.kept_bytes < plan.arena_bytes
    assert places == {common_scratch(x.device).memory(plan.arena_bytes - plan.kept_bytes, x.device).data_ptr()}
    assert made_up.log == []


@pytest.mark.usefixtures("made_up")
def test_it_goes_with_the_last_layer() -> None:
    x, parameters = given()
    several = layers(2)
    for layer in several:
        step_of(layer, x, parameters)
    before = common_scratch(x.device)
    assert before.memory(0, x.device).untyped_storage().nbytes() > 0
    number = id(before)
    del before
    gc.collect()
    assert id(common_scratch(x.device)) == number
    del several, layer
    gc.collect()
    assert not common_scratch(x.device)._memory


def test_a_copy_of_an_input_goes_once_it_is_read_in_place(
    made_up: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "MOVES", 3)
    x, parameters = given()
    (layer,) = layers(1)
    held = []
    for _ in range(3):
        step_of(layer, x, parameters)
        workspace = layer.bound.last.pool.take()
        held.append(len([*workspace._inputs.memory()]))
        layer.bound.last.pool.give_back(workspace)
    assert held == [1, 0, 0]
    other = x.detach().clone().requires_grad_()
    wanted = step_of(layer, x, parameters)
    assert_same(step_of(layer, other, parameters), wanted)
    assert made_up.log == []


def test_a_callers_graph_has_its_own(made_up: MadeUpDevice) -> None:
    x, parameters = given()
    (layer,) = layers(1)
    wanted = step_of(layer, x, parameters)
    made_up.capturing = True
    assert_same(step_of(layer, x, parameters), wanted)
    made_up.capturing = False
    pool = layer.bound.last.pool
    assert pool.made == 2
    assert pool.take().scratch is common_scratch(x.device)


@pytest.mark.usefixtures("made_up")
def test_threads_take_turns() -> None:
    several, begin = layers(), Barrier(LAYERS)
    operands_of = [given() for _ in several]
    wanted = [step_of(layer, *each) for layer, each in zip(several, operands_of, strict=True)]

    def run(number: int) -> None:
        begin.wait()
        for _ in range(STEPS):
            assert_same(step_of(several[number], *operands_of[number]), wanted[number])

    with ThreadPoolExecutor(LAYERS) as executor:
        for done in [executor.submit(run, number) for number in range(LAYERS)]:
            done.result()


def test_where_calls_run_to_their_end_each_has_its_own() -> None:
    x, parameters = given()
    several = layers(2)
    for layer in several:
        step_of(layer, x, parameters)
    assert [layer.bound.last.pool.take().scratch for layer in several] == [None, None]
