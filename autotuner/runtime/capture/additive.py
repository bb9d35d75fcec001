"""Masks as kernels take them: added to the scores, and ones and zeros for queries."""

import torch
from torch import Tensor

from autotuner.ir.graph import Graph


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask that is true where a key counts adds to scores: 0, and the lowest finite number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def finite(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask without what is no finite number of a type: the lowest one stands for it."""
    return mask.clamp_min(torch.finfo(dtype).min)


def added_in(graph: Graph, name: str) -> str | None:
    """Return the type in which a tensor is added to scores as a mask; None for one that is read otherwise as well."""
    found = {
        graph.tensors[name].dtype if reader.kind == "mask" and reader.inputs[0] != name
        else added_in(graph, reader.outputs[0]) if reader.kind == "cast"
        else None
        for reader in graph.consumers[name]
    }  # fmt: skip
    return found.pop() if len(found) == 1 else None


def added_to_scores(mask: Tensor, keys: int, given_as: str, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to scores, as finite numbers; 0 where a query sees no key.

    Args:
        mask: boolean, or additive.
        keys: its dimension of keys.
        given_as: the type in which attention reads it.
        dtype: of the result.
    """
    hidden = _hidden(mask, given_as, dtype)
    added = additive(~hidden, dtype) if mask.dtype == torch.bool else finite(mask.to(dtype), dtype)
    return added.masked_fill(hidden.all(keys, keepdim=True), 0.0)


def seeing(mask: Tensor, keys: int, given_as: str, dtype: torch.dtype) -> Tensor:
    """Return 1 for each query that sees a key, and 0 for others; arguments as of `added_to_scores`."""
    return (~_hidden(mask, given_as, dtype).all(keys)).to(dtype)


def _hidden(mask: Tensor, given_as: str, dtype: torch.dtype) -> Tensor:
    """Return where a mask hides a key; what is no finite number in the type of attention is as low as -inf."""
    return ~mask if mask.dtype == torch.bool else mask.to(getattr(torch, given_as)).to(dtype) == -torch.inf
