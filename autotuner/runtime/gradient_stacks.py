"""Stacks of gradients: those of several parameters that a plan makes in one product, returned as one tensor.

What an operator of a compiled model returns must not share memory, and the gradients of query, key and value weights
often do. So the gradients of a stack are one tensor with one more dimension, the first; what takes them from the
operator separates them again. Stacks are written as a list: for each parameter, the number of the first parameter in
its stack.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from autotuner.plan.memory_planner import Geometry
from autotuner.runtime.output_set import copy_of


def stacks_of(gradients: Sequence[Geometry]) -> list[int]:
    """Return, for each parameter, the first one whose gradient lies in one stack with its own: mostly itself."""
    found: list[int] = []
    for number, lies in enumerate(gradients):
        first = next(i for i, other in enumerate(gradients) if other.buffer == lies.buffer)
        found.append(first if gradients[first].shape == lies.shape else number)
    return found


def stacked(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], stacks: Sequence[int], wanted: Sequence[bool]
) -> list[Tensor]:
    """Return a tensor for each stack of which something is wanted, or the gradient itself where it has one member."""
    return [
        _joined([gradients[i] for i in members], parameters[members[0]]) if len(members) > 1
        else gradients[members[0]].contiguous()  # type: ignore[union-attr]  # it is wanted
        for members in wanted_stacks(stacks, wanted)
    ]  # fmt: skip


def like_stacked(parameters: Sequence[Tensor], stacks: Sequence[int], wanted: Sequence[bool]) -> list[Tensor]:
    """Return empty tensors like those of `stacked`, for an operator's fake implementation."""
    made = []
    for members in wanted_stacks(stacks, wanted):
        like = parameters[members[0]]
        made.append(like.new_empty((len(members), *like.shape) if len(members) > 1 else like.shape))
    return made


def separated(found: Iterator[Tensor], stacks: Sequence[int], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the wanted gradients of parameters, None for others, from the tensors of `stacked`."""
    gradients: list[Tensor | None] = [None] * len(stacks)
    for members in wanted_stacks(stacks, wanted):
        stack = next(found)
        for number, i in enumerate(members):
            if wanted[i]:
                gradients[i] = stack[number] if len(members) > 1 else stack
    return gradients


def without_shared_memory(tensors: Sequence[Tensor], others: Iterable[Tensor | None] = ()) -> list[Tensor]:
    """Return tensors, those that share their memory with another one of all these as copies of the same strides."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    beside = {tensor.untyped_storage().data_ptr() for tensor in others if tensor is not None}
    if len({*storages, *beside}) == len(storages) + len(beside) and not any(one.storage_offset() for one in tensors):
        return list(tensors)
    return [
        one if storages.count(at) == 1 and at not in beside and not one.storage_offset() else copy_of(one)
        for one, at in zip(tensors, storages, strict=True)
    ]


def wanted_stacks(stacks: Sequence[int], wanted: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Return the parameters of each stack of which something is wanted, in the order of their first ones."""
    return _wanted_members(tuple(stacks), tuple(wanted))


@lru_cache(maxsize=256)
def _wanted_members(stacks: tuple[int, ...], wanted: tuple[bool, ...]) -> tuple[tuple[int, ...], ...]:
    found = (tuple(i for i, other in enumerate(stacks) if other == first) for first in dict.fromkeys(stacks))
    return tuple(members for members in found if any(wanted[i] for i in members))


def _joined(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Return gradients as one tensor, those that are not there as zeros; without a copy where they lie so."""
    first, *rest = (None if one is None else one.contiguous() for one in gradients)
    if first is not None and all(
        one is not None
        and one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and one.storage_offset() == first.storage_offset() + (number + 1) * first.numel()
        for number, one in enumerate(rest)
    ):
        return first.as_strided((len(gradients), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([torch.zeros_like(like) if one is None else one for one in (first, *rest)])
