"""Assignments as functions: a tensor with some of its places replaced, as `x[index] = value` leaves it."""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor


def placed(x: Tensor, value: Any, index: Any = ...) -> Tensor:
    """Return a tensor as `x[index] = value` would leave it, which it does not change.

    Gradients are those of the assignment. Numbers, slices, None and an ellipsis become ATen's functional calls, and so
    do tensors of places.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if all(_is_basic(part) for part in parts):
        return _placed(x, value, _spelled_out(parts, x.ndim), 0)
    if len(parts) == 1 and _is_mask(parts[0], x) and isinstance(value, int | float) and x.is_floating_point():
        hides = parts[0][(..., *[None] * (x.ndim - parts[0].ndim))]
        return x.masked_fill(hides, value)
    if all(_is_places(part) for part in parts):
        return torch.index_put(x, parts, value.to(x.dtype) if isinstance(value, Tensor) else x.new_full((), value))
    changed = x.clone()
    changed[index] = value
    return changed


def _is_basic(part: Any) -> bool:
    return part is None or part is ... or isinstance(part, slice) or type(part) is int


def _is_places(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.int32, torch.int64)


def _is_mask(part: Any, x: Tensor) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool and part.shape == x.shape[: part.ndim]


def _spelled_out(parts: Sequence[Any], ndim: int) -> list[Any]:
    """Return an index with a slice for each dimension that an ellipsis, or nothing, stands for."""
    used = sum(part is not None and part is not ... for part in parts)
    whole = [slice(None)] * (ndim - used)
    found: list[Any] = []
    for part in parts if any(part is ... for part in parts) else (*parts, ...):
        found += whole if isinstance(part, EllipsisType) else [part]
    return found


def _placed(x: Tensor, value: Any, parts: Sequence[Any], dim: int) -> Tensor:
    """Return a tensor with a value at places from a dimension on: the innermost part first."""
    while parts and parts[0] == slice(None):
        parts, dim = parts[1:], dim + 1
    if not parts:
        return _like(x, value)
    part, rest = parts[0], parts[1:]
    if part is None:
        return _placed(x.unsqueeze(dim), value, rest, dim + 1).squeeze(dim)
    if isinstance(part, int):
        inner = _placed(x.select(dim, part), value, rest, dim)
        return torch.select_scatter(x, inner, dim, part)
    start, stop, step = part.indices(x.shape[dim])
    stop = max(start, stop)
    inner = _placed(x.narrow(dim, start, stop - start)[(*[slice(None)] * dim, slice(None, None, step))],
                    value, rest, dim + 1)  # fmt: skip
    return torch.slice_scatter(x, inner, dim, start, stop, step)


def _like(x: Tensor, value: Any) -> Tensor:
    """Return a value in the shape and the type of a tensor, in memory of its own."""
    if not isinstance(value, Tensor):
        return torch.full_like(x, value)
    while value.ndim > x.ndim and value.shape[0] == 1:
        value = value[0]
    copied: Tensor = value.to(x.dtype).expand(x.shape).clone(memory_format=torch.contiguous_format)
    return copied
