"""When calls run one by one, when they are captured and when replayed; and a workspace's order between streams."""

import warnings
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from autotuner.errors import ConfigurationError
from autotuner.runtime import TunedModule, TunedWarning, apply
from autotuner.runtime.devices import Run
from autotuner.runtime.framework import encoder_layer
from autotuner.runtime.graphs import CallSequence, Graphs, Switch, TemporaryMemory
from autotuner.runtime.workspace import Workspace
from tests.runtime.layers import batch, tuned_layer
from tests.runtime.made_up_device import MadeUpDevice, instead_of_the_cpu
from tests.runtime.plans import configuration, model


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    return instead_of_the_cpu(monkeypatch)


def rows(device: MadeUpDevice, names: str = "a") -> tuple[Graphs, Switch, list[CallSequence]]:
    switch = Switch(True)
    return Graphs(device, switch), switch, [CallSequence([partial(device.log.append, name)]) for name in names]


def test_a_row_runs_once_call_by_call_then_it_is_captured_and_from_then_on_replayed() -> None:
    device = MadeUpDevice()
    graphs, _, (row,) = rows(device)
    for _ in range(3):
        graphs.run(row)
    assert device.log == ["a", "a", "captured", *["a", "replayed"] * 2]


def test_while_the_caller_captures_calls_run_one_by_one() -> None:
    device = MadeUpDevice()
    graphs, _, (row,) = rows(device)
    for _ in range(2):
        graphs.run(row)
    device.log.clear()
    device.capturing = True
    graphs.run(row)
    assert device.log == ["a"]


def test_each_stream_has_a_graph_of_its_own_up_to_two() -> None:
    device = MadeUpDevice()
    graphs, _, (row,) = rows(device)
    for device.now in (1, 1, 2, 3, 1, 2):
        graphs.run(row)
    replayed = ["a", "replayed"]
    assert device.log == ["a", *["a", "captured", *replayed] * 2, "a", *replayed * 2]


def test_where_a_capture_fails_all_rows_run_call_by_call_with_one_warning() -> None:
    device = MadeUpDevice()
    graphs, switch, (first, second) = rows(device, "ab")
    for row in (first, second):
        graphs.run(row)
    device.fails = True
    with pytest.warns(TunedWarning, match=r"without CUDA graphs.*not permitted when stream is capturing\)$"):
        graphs.run(first)
    device.fails = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs.run(second)
        graphs.run(first)
    assert device.log == ["a", "b", "a", "b", "a"]
    assert not switch.is_on


def test_graphs_that_come_after_all_others_are_gone_have_memory_of_their_own() -> None:
    device = MadeUpDevice()
    pools = iter(range(9))
    device.pool = lambda: next(pools)  # type: ignore[assignment, method-assign, return-value]
    taken: list[Any] = []

    def captured(run: Run, pool: Any, repeats: int = 0, *, is_whole_step: bool = False) -> Run:  # noqa: ARG001
        taken.append(pool)
        return int

    device.captured = captured  # type: ignore[method-assign]
    memory = TemporaryMemory()
    ours, others = Graphs(device, Switch(True), memory), Graphs(device, Switch(True), memory)

    def run_twice(graphs: Graphs) -> CallSequence:
        row = CallSequence([lambda: None])
        for _ in range(2):
            graphs.run(row)
        return row

    first, second = run_twice(ours), run_twice(others)
    assert taken == [0, 0]
    del first
    first = run_twice(ours)
    assert taken == [0, 0, 0]
    del first, second
    run_twice(others)
    assert taken == [0, 0, 0, 1]


def test_a_row_that_makes_no_graphs_is_never_captured() -> None:
    device = MadeUpDevice()
    graphs, _, _ = rows(device)
    row = CallSequence([lambda: device.log.append("c")], replays=False)
    for _ in range(3):
        graphs.run(row)
    assert device.log == ["c", "c", "c"]


def idle(layer: TunedModule) -> Workspace:
    """Return the workspace that a layer's next call gets; while a graph is captured that is none of those before."""
    if not layer.calls:
        layer(batch())
    pool = layer.bind()[0].pool
    workspace = pool.take()
    pool.give_back(workspace)
    return workspace


def test_a_workspace_waits_for_the_stream_that_it_ran_on_last(made_up: MadeUpDevice) -> None:
    layer, _ = tuned_layer(graphs=False)
    for made_up.now in (1, 1, 2):
        y = layer(batch())
    assert made_up.log == ["stream 2 waits for stream 1, 2 tensors"]
    made_up.now = 3
    y.sum().backward()
    assert made_up.log[1:] == ["stream 3 waits for stream 2, 2 tensors"]


def test_a_workspace_that_a_callers_graph_writes_to_is_not_taken_again(made_up: MadeUpDevice) -> None:
    layer, _ = tuned_layer()
    workspace = idle(layer)
    made_up.capturing = True
    layer(batch()).sum().backward()
    made_up.capturing = False
    assert idle(layer) is not workspace


def test_without_gradients_a_workspace_in_a_callers_graph_is_not_taken_again_either(made_up: MadeUpDevice) -> None:
    layer, _ = tuned_layer()
    workspace = idle(layer)
    made_up.capturing = True
    with torch.no_grad():
        layer(batch())
    assert idle(layer) is not workspace


def test_a_fifth_choice_of_gradients_makes_no_graph() -> None:
    layer, _ = tuned_layer()
    layer(batch()).sum().backward()
    assert layer._bindings
    made = layer._bindings[0].pool.take().outputs.take("backward")
    count = len(made.handed)
    choices = [tuple(place == number for place in range(count)) for number in range(5)]
    assert [made.sequence_for(wanted).replays for wanted in choices] == [True, True, True, True, False]
    assert made.sequence_for(choices[0]) is made.sequence_for(choices[0])


@pytest.mark.slow
def test_a_configuration_of_another_device_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"on cpu, and .* measured on cuda: move .* module.to\('cuda'\)"):
        apply(encoder_layer(model()), configuration(model(), 0, "cuda"))


def test_on_the_cpu_graphs_are_ignored() -> None:
    layer, _ = tuned_layer(graphs=True)
    layer(batch())
    assert layer.bind()[0].pool.take()._graphs is None


def test_what_a_capture_outlives_is_kept_until_nothing_is_captured(made_up: MadeUpDevice) -> None:
    layer, _ = tuned_layer()
    workspace = idle(layer)
    layer(batch())
    before = [*workspace.outputs.by_phase["forward"]]
    assert before
    made_up.capturing = True
    assert layer._bindings
    workspace.forward(batch(), current=layer._bindings[0].current(), in_place=True)
    assert workspace.outputs.outlived[:1] == before
    workspace.tidy()
    assert workspace.outputs.outlived[:1] == before
    made_up.capturing = False
    workspace.tidy()
    assert workspace.outputs.outlived == []


def test_a_row_is_captured_in_a_thread_in_which_it_has_run() -> None:
    """A thread may have the number of one that has ended."""
    device = MadeUpDevice()
    graphs, _, (row,) = rows(device)

    def run_in_a_thread(times: int) -> None:
        def run() -> None:
            for _ in range(times):
                graphs.run(row)

        thread = Thread(target=run)
        thread.start()
        thread.join()

    for _ in range(3):
        run_in_a_thread(1)
    assert device.log == ["a"] * 3
    run_in_a_thread(2)
    assert device.log == ["a"] * 3 + ["a", "a", "captured", "a", "replayed"]
