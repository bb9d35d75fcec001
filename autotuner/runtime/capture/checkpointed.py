"""Regions of a graph module of dynamo's: of its graph, and of the bodies that it checkpoints.

Where a model calls `torch.utils.checkpoint` inside of what is compiled, dynamo puts the checkpointed function into a
graph of its own, a body, and marks its call. The other compiler runs a body once more before its backward.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autotuner.runtime.capture.region_model import Region
from autotuner.runtime.capture.rewriting import Call, Captured

CHECKPOINT = "tag_activation_checkpoint"


class CapturedModule:
    """A graph module with its regions.

    Attributes:
        regions: those of the graph, then those of each body.
        reasons: how many nodes are torch's, by why; and blocks that are none of ours after all.
        nodes: calls in all graphs.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._bodies = {body: Captured(body.graph, is_unit=True) for body in _bodies(module)}
        self._whole = Captured(module.graph)
        inside = [region for body in self._bodies.values() for region in body.regions]
        counts = Counter(region.key for region in inside)
        self.regions: list[Region] = [
            *self._whole.regions,
            *(each for each in inside if counts[each.key] > 1 or _has_attention(each)),
        ]
        graphs = (self._whole, *self._bodies.values())
        self.nodes = sum(each.nodes for each in graphs)

    @property
    def reasons(self) -> Counter[str]:
        found = Counter(self._whole.reasons)
        for reason in [each for each in found if each.startswith(CHECKPOINT) and self._bodies]:
            del found[reason]  # its body was read
        return sum((each.reasons for each in self._bodies.values()), found)

    @property
    def refused(self) -> dict[fx.Node, str]:
        """Reasons why nodes of all graphs are torch's, or the blocks that they are in."""
        return {
            node: why for captured in (self._whole, *self._bodies.values()) for node, why in captured.refused.items()
        }

    def nodes_of(self, region: Region) -> set[fx.Node]:
        """Return the nodes that a region stands for."""
        owner = next(each for each in (self._whole, *self._bodies.values()) if region in each.regions)
        return owner.nodes_of(region)

    def replace(self, calls: Mapping[Region, Call]) -> list[Region]:
        """Put calls in place of regions, and return those for which that was possible."""
        placed = []
        for captured in (self._whole, *self._bodies.values()):
            own = {region: calls[region] for region in captured.regions if region in calls}
            placed += captured.replace(own) if own else []
        for body in self._bodies:
            body.recompile()
        return placed


def _bodies(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield what a graph checkpoints with gradients, and what that checkpoints."""
    recording, seen = True, set()
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            recording = bool(node.args[0])
        if node.target is torch.ops.higher_order.tag_activation_checkpoint and recording:
            body = getattr(module, str(node.args[0].target), None)
            if isinstance(body, fx.GraphModule) and body not in seen:
                seen.add(body)
                yield body
                yield from _bodies(body)


def _has_attention(region: Region) -> bool:
    return any(operation.kind == "softmax" for operation in region.block.operations)
