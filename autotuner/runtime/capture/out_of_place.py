"""Masks that are filled in place right where they are made, written as one call that changes nothing.

`torch.nn` makes each additive mask so: `torch.zeros_like(mask, dtype=...).masked_fill_(mask, -inf)`.
"""

from typing import Any

import torch
from torch import Tensor, fx

from autotuner.runtime.capture.calls import EXAMPLE

_MAKERS = (torch.zeros_like, torch.ones_like, torch.full_like, torch.zeros, torch.ones, torch.full)


def fill_out_of_place(graph: fx.Graph) -> None:
    """Replace `masked_fill_` by `masked_fill` where nobody else reads the tensor that is filled."""
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        if (
            (node.op, node.target) == ("call_method", "masked_fill_")
            and isinstance(source, fx.Node)
            and source.target in _MAKERS
            and list(source.users) == [node]
            and "out" not in source.kwargs
        ):
            node.target = "masked_fill"
            for each in (source, node):  # whose examples are one tensor, changed
                if isinstance(each.meta.get(EXAMPLE), Tensor):
                    each.meta[EXAMPLE] = torch.empty_like(each.meta[EXAMPLE])
