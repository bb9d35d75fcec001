"""Outputs that are kept between checkpoints, in a graph that Inductor compiles.

Torch keeps what one checkpoint makes and the next one reads, but not where an operator has several results, as that of
a region has. Backward would begin with the forward of all layers then, and hold what all of them leave.
"""

import hashlib
import operator
from functools import cache
from math import inf
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

OPTION = "joint_custom_post_pass"
"""Of Inductor: what is done to a graph of forward and backward before it is parted."""
NUMBER = "ac_graph_id"
"""Key of the number that torch notes at what a checkpoint holds."""
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class KeptBetween(CustomGraphPass):
    """Marks what a checkpoint hands to a later one as kept, where it is one of several results; see above."""

    def __call__(self, graph: fx.Graph) -> None:
        picked = [each for each in graph.nodes if each.target is operator.getitem]
        for node in [each for each in picked if isinstance(each.meta.get("val"), Tensor)]:
            later = [user for user in node.users if _comes_later(user, node)]
            if not later:
                continue
            with graph.inserting_after(node):
                # Torch keeps no view, and nothing that picks a result. Inductor leaves the copy out behind that.
                kept = graph.call_function(torch.ops.aten.clone.default, (node,))
            kept.meta = node.meta | {"recompute": CheckpointPolicy.MUST_SAVE}
            for user in later:
                user.replace_input_with(node, kept)

    def uuid(self) -> str:
        """Return what tells compiled code with this pass from other code."""
        return _digest()


def _comes_later(user: fx.Node, node: fx.Node) -> bool:
    """Say whether both are made again in backward, and the user in a later checkpoint than the node."""
    again = all(each.meta.get("recompute") in AGAIN for each in (user, node))
    return again and bool(user.meta.get(NUMBER, 0) > node.meta.get(NUMBER, inf))


@cache
def _digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
