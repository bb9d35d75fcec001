"""Generators that compiled functions draw from.

Where a compiled function draws numbers in forward which it draws once more in backward, as with a checkpoint, torch
gives it pairs of generators with equal seeds, one for each of the two. A graph of calls advances those generators
alone that were registered with it before it was captured, and torch tells nobody which ones there are.
"""

from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

import torch

_MADE: list[torch.Generator] = []
"""They stay when their functions go: torch 2.11 has no weak references to generators."""


def note_generators() -> None:
    """Note the generators of functions that are called for the first time from now on.

    Where torch makes them elsewhere than it did up to 2.13, none is noted; graphs that draw from one are not captured.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    make: Any = getattr(runtime_wrappers, "initialize_rng_states", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def noted(count: int, index: int, forward: Any, backward: Any, **rest: Any) -> None:
        make(count, index, forward, backward, **rest)
        note((*forward, *backward))

    runtime_wrappers.initialize_rng_states = noted  # type: ignore[assignment]


def note(generators: Sequence[torch.Generator]) -> None:
    """Note generators that a compiled function draws from."""
    _MADE.extend(generators)


def generators_on(device: torch.device) -> Iterator[torch.Generator]:
    """Return the noted generators of a device."""
    return (each for each in _MADE if each.device == device)
