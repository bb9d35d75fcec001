"""Gradients of parameters that are handed over as soon as a region's backward has made them.

What torch.compile compiles hands out all gradients of a model at the end of backward. So somebody who has something to
do with each, while backward goes on, takes them from the regions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils import dlpack

from autotuner.runtime.gradient_stacks import wanted_stacks


@dataclass(frozen=True)
class Made:
    """Gradients of some parameters, in one tensor.

    Args:
        parameters: as the region's forward got them.
        gradients: one for each, parts of `whole`.
        whole: what is handed out unless somebody takes them over.
    """

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    whole: Tensor


class Taker(Protocol):
    """Takes gradients over."""

    def place_of(self, parameter: Tensor) -> Tensor | None:
        """Return memory that the gradient of a parameter may be written to, for it to be taken over there; or None."""
        ...

    def take(self, made: Sequence[Made]) -> list[Tensor]:
        """Take gradients over, or not, and return what is handed out in place of each `whole`."""
        ...


_TAKERS: list[Taker] = []
_ALONE: dict[int, tuple[bool, ...]] = {}
"""By the number of a region: for each of its parameters, whether nothing else in its graph reads it."""


@contextmanager
def taken_by(taker: Taker) -> Iterator[None]:
    """Have gradients handed over to somebody, in all threads, while a backward runs in it."""
    _TAKERS.append(taker)
    try:
        yield
    finally:
        _TAKERS.remove(taker)


def note_readers(graph: fx.Graph, operator: Any) -> None:
    """Note which parameters of a graph's regions nothing else in it reads."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is operator:
            number, parameters = node.args[0], node.args[3]
            _ALONE[number] = tuple(
                isinstance(each, fx.Node) and set(each.users) == {node} and _places(node, each) == 1
                for each in parameters
            )


def _places(node: fx.Node, given: fx.Node) -> int:
    """Return how many of the operands are a node; the second argument is one of them once more."""
    return sum(each is given for each in (*node.args[2], *node.args[3]))  # type: ignore[misc]


def handed_out(
    number: int,
    parameters: Sequence[Tensor],
    made: Sequence[Tensor],
    stacks: Sequence[int],
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of a region's parameters, as `stacked` makes them, once somebody could take them over."""
    alone, found = _ALONE.get(number), list(made)
    if not _TAKERS or alone is None:
        return found
    offered: dict[int, Made] = {}
    for place, members in enumerate(wanted_stacks(stacks, wanted)):
        if all(alone[i] and wanted[i] for i in members):
            whole = found[place]
            pieces = list(whole.unbind(0)) if len(members) > 1 else [whole]
            offered[place] = Made([parameters[i] for i in members], pieces, whole)
    for place, handed in zip(offered, _TAKERS[-1].take(list(offered.values())), strict=True):
        found[place] = handed
    return found


def places_of(number: int, parameters: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return where gradients of a region's parameters may be written to, or None for memory of the region's own."""
    alone = _ALONE.get(number)
    if not _TAKERS or alone is None:
        return [None] * len(parameters)
    return [
        _TAKERS[-1].place_of(parameter) if is_alone and want else None
        for parameter, is_alone, want in zip(parameters, alone, wanted, strict=True)
    ]


def alike_over(memory: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor like another one over some bytes of memory, as if it were memory of its own."""
    flat = memory[: whole.nbytes].view(whole.dtype).as_strided(whole.shape, whole.stride())
    return as_own(flat)


def in_place_of(whole: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """Return memory that holds parts one after the other in the form of `whole`, as if it were memory of its own.

    None where they do not lie so. What an operator returns must not share memory with anything, as far as torch knows.
    """
    size = parts[0].nbytes
    lie_so = all(
        part.is_contiguous() and part.data_ptr() == parts[0].data_ptr() + number * size
        for number, part in enumerate(parts)
    )
    if not (lie_so and whole.is_contiguous() and len(parts) * size == whole.nbytes):
        return None
    flat = torch.as_strided(parts[0], whole.shape, whole.stride(), parts[0].storage_offset())
    return as_own(flat)


def as_own(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that is its own storage for torch."""
    found: Tensor = dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
    return found
