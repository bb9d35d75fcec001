"""Workspaces of several layers that share memory while none of the others is in use."""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autotuner.runtime import arena_memory
from autotuner.runtime.arena_memory import ArenaMemory, apart, held_memory
from autotuner.runtime.graphs import StreamOrder
from autotuner.runtime.pool import REFUSED
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.workspace import CPU
from tests.runtime.made_up_device import MadeUpDevice, instead_of_the_cpu
from tests.runtime.regions import assert_same, step
from tests.runtime.test_given_back import LAYERS, layers

Run = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with apart():
        yield


def one_behind_the_other(made: Sequence[TunedRegion], *, reentrant: bool | None) -> Run:
    """Return what calls layers, each in a checkpoint of torch's, or without where `reentrant` is None."""

    def run(inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        (x,) = inputs
        for layer in made:

            def call(x: Tensor, layer: TunedRegion = layer) -> Tensor:
                return layer.call([x], parameters)[0]

            x = call(x) if reentrant is None else checkpoint(call, x, use_reentrant=reentrant)
        return [x]

    return run


def memories() -> list[ArenaMemory]:
    """Return the memory of arenas that there is, of what was built in this test."""
    gc.collect()
    return arena_memory._MADE.memories.alive()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_the_memory_of_one(reentrant: bool) -> None:
    made, inputs, parameters = layers()
    found = [step(one_behind_the_other(made, reentrant=reentrant), inputs, parameters) for _ in range(2)]
    assert len(memories()) == 1
    expected = step(one_behind_the_other(made, reentrant=None), inputs, parameters)
    for each in found:
        assert_same(each, expected)
    # Each has its own from now on, and whatever comes next finds its workspaces.
    for _ in range(2):
        assert [layer.bound.last.pool.made for layer in made] == [1, *[2] * (LAYERS - 1)]
        assert len(memories()) == LAYERS
        for again in (reentrant, None, reentrant, None):
            assert_same(step(one_behind_the_other(made, reentrant=again), inputs, parameters), expected)


def test_two_calls_of_each_layer_build_nothing_behind_the_second_step_with_evaluation_before() -> None:
    made, inputs, parameters = layers()
    run = one_behind_the_other(made, reentrant=None)

    def twice(inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        return [*run(inputs, parameters), *run(inputs, parameters)]

    with torch.no_grad():
        run(inputs, parameters)
    steps = [step(twice, inputs, parameters) for _ in range(2)]
    counts = [layer.bound.last.pool.made for layer in made]
    steps += [step(twice, inputs, parameters) for _ in range(2)]
    assert [layer.bound.last.pool.made for layer in made] == counts
    for each in steps[1:]:
        assert_same(each, steps[0])


def test_layers_without_gradients_have_the_memory_of_one_and_train_in_their_own() -> None:
    made, inputs, parameters = layers()
    run = one_behind_the_other(made, reentrant=None)
    with torch.no_grad():
        (y,) = run(inputs, parameters)
    assert len(memories()) == 1
    (again,) = run(inputs, parameters)
    assert torch.equal(again, y)
    assert {layer.bound.last.pool.made for layer in made[1:]} == {2}
    assert len(memories()) == LAYERS


def test_a_layer_whose_memory_was_in_use_several_times_has_its_own() -> None:
    made, inputs, parameters = layers(2)
    first, second = (layer.bound for layer in made)
    with torch.no_grad():
        made[0].call(inputs, parameters)
        made[1].call(inputs, parameters)
        pool = second.last.pool
        for number in range(REFUSED + 2):
            # Somebody has the memory of the workspace that the layer would take.
            memory = pool._idle[-1].arena.memory
            held = None if memory is None else memory.hold()
            made[1].call(inputs, parameters)
            assert pool.made == 2 + min(number, REFUSED - 1)
            del held
    assert pool._idle[-1].arena.memory is None
    assert first.last.pool.made == 1


def test_memory_in_use_is_not_taken_and_much_larger_memory_neither() -> None:
    order = StreamOrder()
    first = held_memory(100, CPU, order)
    second = held_memory(100, CPU, order)
    assert first.memory is not second.memory
    assert first.memory.hold() is None
    memory = first.memory
    del first
    taken = held_memory(51, CPU, order)
    assert taken.memory is memory
    assert held_memory(101, CPU, order).memory.tensor.numel() == 101
    del taken
    assert held_memory(49, CPU, order).memory.tensor.numel() == 49


def test_threads_share_nothing() -> None:
    made, inputs, parameters = layers(2)

    def evaluate(layer: TunedRegion) -> Tensor:
        with torch.no_grad():
            return layer.call(inputs, parameters)[0]

    first = evaluate(made[0])
    with ThreadPoolExecutor(1) as executor:
        second = executor.submit(evaluate, made[1]).result()
        pools = [layer.bound.last.pool for layer in made]
        shared = {id(pool._idle[0].arena.memory) for pool in pools}
    assert torch.equal(first, second)
    assert len(shared) == 2


def test_shared_memory_is_used_in_order_on_whatever_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up: MadeUpDevice = instead_of_the_cpu(monkeypatch)
    made, inputs, parameters = layers(2)
    with torch.no_grad():
        made[0].call(inputs, parameters)
        made_up.now = 2
        made[1].call(inputs, parameters)
        assert made_up.log == ["stream 2 waits for stream 1, 1 tensors"] * 2, "the arena's memory, and the scratch"
        made[0].call(inputs, parameters)  # its own tensors were last used on stream 1, and the memory on this one
    assert len(memories()) == 1
    assert [line for line in made_up.log[2:] if "waits" in line] == ["stream 2 waits for stream 1, 4 tensors"]


def test_memory_that_a_callers_graph_writes_is_never_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up: MadeUpDevice = instead_of_the_cpu(monkeypatch)
    made, inputs, parameters = layers(2)
    (x,) = (each.clone().requires_grad_() for each in inputs)
    (y,) = made[0].call([x], parameters)
    made_up.capturing = True
    torch.autograd.backward(y.sum())
    made_up.capturing = False
    del y
    gc.collect()
    memory = made[0].bound.last.pool._in_capture[0].arena.memory
    with torch.no_grad():
        made[1].call(inputs, parameters)
    assert memory is not None
    assert memory.hold() is None
    assert made[1].bound.last.pool._idle[0].arena.memory is not memory
