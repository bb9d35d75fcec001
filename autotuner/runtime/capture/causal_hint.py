"""Dynamo's way through `nn.TransformerEncoder` and `nn.TransformerDecoder` that are given a mask.

Both compare the mask with a causal one and branch on the answer, so dynamo stops in front of them and all of their
layers run uncompiled. The answer is only a hint, by which attention may leave the mask out: without it, the mask that
is given counts, and the result is the same.
"""

from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.modules import transformer


def _detect_is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:  # noqa: ARG001
    """Return whether the caller says that a mask is causal; its values are not read."""
    return is_causal is True


def leave_out_the_hint() -> None:
    """Have dynamo trace stacks of torch's own layers as one graph, whatever mask they are given."""
    asked = getattr(transformer, _detect_is_causal_mask.__name__, None)
    if asked is not None:  # as in the versions of torch that are known
        with suppress(ValueError, TypeError):  # torch has a way of its own, or another signature
            torch.compiler.substitute_in_graph(asked)(_detect_is_causal_mask)
