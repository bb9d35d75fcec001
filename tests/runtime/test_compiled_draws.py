"""Graphs that draw from where a generator is, and generators of compiled functions."""

from typing import Any

import pytest
import torch
import torch._functorch.aot_autograd

from autotuner.runtime.devices import compiled_draws
from autotuner.runtime.devices.compiled_draws import note_generators, pairs_on
from autotuner.runtime.devices.cuda import DrawingReplay

runtime_wrappers = torch._functorch._aot_autograd.runtime_wrappers
CPU = torch.device("cpu")


class State(torch.Generator):
    """A generator with an offset, as those of GPUs have it."""

    offset = 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> "State":
        self.offset = offset
        return self

    def manual_seed(self, seed: int) -> "State":
        super().manual_seed(seed)
        self.offset = 0
        return self


def state(seed: int, offset: int) -> State:
    made = State().manual_seed(seed)
    made.offset = offset
    return made


def test_a_graph_draws_on_from_where_the_generator_is() -> None:
    drawn, own, generator = [], state(1, 0), state(7, 40)

    def replay() -> None:
        drawn.append((own.initial_seed(), own.offset))
        own.offset += 8

    replayed = DrawingReplay(replay, generator, own)
    replayed()
    replayed()
    generator.manual_seed(9)
    replayed()
    assert drawn == [(7, 40), (7, 48), (9, 0)]
    assert (generator.initial_seed(), generator.offset) == (9, 8)


def test_a_graph_that_draws_nothing_leaves_the_generator_alone() -> None:
    generator, ran = state(7, 40), []
    replayed = DrawingReplay(lambda: ran.append(1), generator, state(1, 0))
    replayed()
    generator.manual_seed(9)
    replayed()
    assert (len(ran), generator.initial_seed(), generator.offset) == (2, 9, 0)


def test_a_replay_draws_the_same_in_backward_behind_a_forward_that_had_none() -> None:
    forward, backward, drawn = state(3, 8), state(3, 8), []

    def replay() -> None:
        drawn.append((forward.offset, backward.offset))
        forward.offset += 4
        backward.offset += 4

    replayed = DrawingReplay(replay, state(7, 40), state(1, 0), [(forward, backward)])
    replayed()
    forward.offset += 4  # a forward that is only looked at
    replayed()
    replayed()
    assert drawn == [(8, 8), (16, 16), (20, 20)]
    forward.manual_seed(5)
    replayed()
    assert (backward.initial_seed(), drawn[-1]) == (5, (0, 0))


def test_generators_of_compiled_functions_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [torch.Generator(), torch.Generator()]

    def make(count: int, index: int, forward: list[Any], backward: list[Any], *, device: torch.device) -> None:
        assert (count, index, device) == (1, 0, CPU)
        forward.append(made[0])
        backward.append(made[1])

    monkeypatch.setattr(compiled_draws, "_MADE", [])
    monkeypatch.setattr(runtime_wrappers, "initialize_rng_states", make)
    note_generators()
    note_generators()
    initialize: Any = runtime_wrappers.initialize_rng_states
    assert initialize.__wrapped__ is make
    initialize(1, 0, [], [], device=CPU)
    assert pairs_on(CPU) == [tuple(made)]
    assert not pairs_on(torch.device("meta"))


def test_a_torch_that_makes_its_generators_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(runtime_wrappers, "initialize_rng_states")
    note_generators()
    assert not hasattr(runtime_wrappers, "initialize_rng_states")
