"""Generators that compiled functions draw from.

Where a compiled function draws numbers in forward which it draws once more in backward, as with a checkpoint, torch
gives it pairs of generators with equal seeds, one for each of the two. A graph of calls advances those generators
alone that were registered with it before it was captured, and torch tells nobody which ones there are.
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch

Pair = tuple[torch.Generator, torch.Generator]
"""Of forward, and of backward."""

_MADE: list[Pair] = []
"""They stay when their functions go: torch 2.11 has no weak references to generators."""
NOTES = "_autotuner_notes"
"""Attribute of torch's function that makes them, once what it makes is noted."""


def note_generators() -> None:
    """Note the generators of functions that are called for the first time from now on.

    Where torch makes them elsewhere than it did up to 2.13, none is noted; graphs that draw from one are not captured.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    make: Any = getattr(runtime_wrappers, "initialize_rng_states", None)
    if make is None or hasattr(make, NOTES):
        return

    @wraps(make)
    def noted(count: int, index: int, forward: Any, backward: Any, **rest: Any) -> None:
        make(count, index, forward, backward, **rest)
        _MADE.extend(zip(forward, backward, strict=True))

    setattr(noted, NOTES, True)
    runtime_wrappers.initialize_rng_states = noted  # type: ignore[assignment]


def pairs_on(device: torch.device) -> list[Pair]:
    """Return the noted generators of a device."""
    return [pair for pair in _MADE if pair[0].device == device]


def register(graph: Any, pairs: Iterable[Pair]) -> None:
    """Have a graph of calls, which is captured next, advance generators."""
    for pair in pairs:
        for generator in pair:
            graph.register_generator_state(generator)


def follow(generator: torch.Generator, leader: torch.Generator) -> None:
    """Have a generator draw what another one draws from now on."""
    seed, offset = leader.initial_seed(), leader.get_offset()
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    if generator.get_offset() != offset:
        generator.set_offset(offset)
