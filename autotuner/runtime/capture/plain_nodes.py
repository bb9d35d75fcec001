"""Nodes of a graph of dynamo's that make plain tensors, and calls that leave the rows of one as they are."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from autotuner.runtime.capture.calls import EXAMPLE
from autotuner.runtime.capture.changed_in_place import called

CASTS = ("float", "double", "to", "type", "contiguous")
SUMS = ("add", "iadd", "add_")
VIEWS = ("view", "reshape", "flatten", "squeeze", "unsqueeze")
TYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Of logits and losses. In float16, a gradient that is made before its scale is known could vanish."""


def example(node: fx.Node) -> Tensor:
    """Return the example of the tensor that a node makes."""
    found: Tensor = node.meta[EXAMPLE]
    return found


def is_plain(node: Any) -> TypeGuard[fx.Node]:
    """Say whether a node makes a plain tensor of known sizes."""
    made: Any = node.meta.get(EXAMPLE) if isinstance(node, fx.Node) else None
    return (
        type(made) in (Tensor, FakeTensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(made)
        and all(type(extent) is int for extent in made.shape)
    )


def keeps_rows(node: fx.Node, before: Tensor) -> bool:
    """Say whether a call is a cast or a view that leaves the words of each row, and the order of rows."""
    after = example(node)
    if after.device != before.device:
        return False
    if called(node) in CASTS and after.shape == before.shape:
        return after.dtype in TYPES
    is_kept = after.shape[-1:] == before.shape[-1:] and after.dtype == before.dtype
    return called(node) in VIEWS and is_kept and after.ndim > 1
