"""Batches of a training loop: nested containers of tensors, as a structure and the tensors in order."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label that counts in no loss, as torch and transformers have it."""
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class UnknownBatchError(TypeError):
    """A batch holds something other than tensors, constants, mappings, lists and tuples."""


def structure_of(batch: Any, tensors: list[Tensor]) -> Hashable:
    """Return a batch's structure, and append its tensors to a list.

    Two batches have equal structures if they differ in the elements of their tensors alone: shapes, dtypes, keys and
    constants are part of the structure.

    Raises:
        UnknownBatchError: the batch holds something else.
    """
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return "tensor", tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return "mapping", tuple((key, structure_of(value, tensors)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), tuple(structure_of(value, tensors) for value in batch)
    if isinstance(batch, CONSTANTS):
        return "constant", type(batch), batch
    raise UnknownBatchError(f"the batch holds a {type(batch).__name__}")


def batch_of(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the batch of a structure with these tensors; mappings become dicts."""
    kind, *rest = structure
    if kind == "tensor":
        return next(tensors)
    if kind == "mapping":
        return {key: batch_of(value, tensors) for key, value in rest[0]}
    if kind == "constant":
        return rest[1]
    values = [batch_of(value, tensors) for value in rest[0]]
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def apart(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors, one that came before as a view: a model that gets one object twice is compiled for that.

    So it would be compiled once more where ids and labels are one tensor in some batches, and two in others.
    """
    seen: set[int] = set()
    for tensor in tensors:
        yield tensor.view_as(tensor) if id(tensor) in seen else tensor
        seen.add(id(tensor))


def moved_to(batch: Any, device: torch.device) -> Any:
    """Return a batch with the tensors in its mappings, which become dicts, lists and tuples on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved_to(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [moved_to(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
