"""Regions of a graph module of dynamo's: of its graph, and of the bodies that it checkpoints.

Where a model calls `torch.utils.checkpoint` inside of what is compiled, dynamo puts the checkpointed function into a
graph of its own, a body, and marks its call. The other compiler runs a body once more before its backward.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, noop_context_fn

from autotuner.ir.kinds import SOFTMAXES
from autotuner.runtime.capture.aliases import Contexts
from autotuner.runtime.capture.reading import unknown_context
from autotuner.runtime.capture.region_model import Region
from autotuner.runtime.capture.rewriting import Call, Captured
from autotuner.runtime.capture.selective import CONTEXTS, told_of_policies

CHECKPOINT = "tag_activation_checkpoint"
BUDGET = "_region_activation_memory_budget"
"""Key of what `torch.autograd.graph.region_activation_memory_budget` notes at the calls of a graph."""


class CapturedModule:
    """A graph module with its regions.

    Attributes:
        regions: those of the graph, then those of each body.
        reasons: how many nodes are torch's, by why; and regions that are none of ours after all.
        nodes: calls in all graphs.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._whole = Captured(module.graph)
        self._bodies = {} if unknown_context(module.graph) else dict(_read_bodies(module, self._whole))
        inside = [region for body in self._bodies.values() for region in body.regions]
        counts = Counter(region.key for region in inside)
        bodies_of = Counter(family for body in self._bodies.values() for family in _families(body.regions))
        self.regions: list[Region] = [
            *self._whole.regions,
            *(
                each for each in inside
                if counts[each.key] > 1 or _has_attention(each)
                or any(bodies_of[family] > 1 for family in _families([each]))
            ),
        ]  # fmt: skip
        graphs = (self._whole, *self._bodies.values())
        self.nodes = sum(each.nodes for each in graphs)

    def is_checkpointed(self, region: Region) -> bool:
        """Say whether a region is one of a body's."""
        return any(region is each for body in self._bodies.values() for each in body.regions)

    @property
    def reasons(self) -> Counter[str]:
        found = Counter(self._whole.reasons)
        for reason in [each for each in found if each.startswith(CHECKPOINT) and self._bodies]:
            del found[reason]  # its body was read
        return sum((each.reasons for each in self._bodies.values()), found)

    @property
    def refused(self) -> dict[fx.Node, str]:
        """Reasons why nodes of all graphs are torch's, or the regions that they are in."""
        return {
            node: why for captured in (self._whole, *self._bodies.values()) for node, why in captured.refused.items()
        }

    def nodes_of(self, region: Region) -> set[fx.Node]:
        """Return the nodes that a region stands for."""
        return self._owner(region).nodes_of(region)

    def nodes_by_tensor(self, region: Region) -> dict[str, list[fx.Node]]:
        """Return the nodes of each of a region's operators, by the first tensor that it makes in the region's model."""
        owner = self._owner(region)
        return {name: owner.nodes_of_operator(operation) for name, operation in region.operators.items()}

    def _owner(self, region: Region) -> Captured:
        return next(each for each in (self._whole, *self._bodies.values()) if region in each.regions)

    def told_of(self, regions: Iterable[Region]) -> str:
        """Say what is done with regions, not yet replaced, of which a selective checkpoint keeps some calls only."""
        wanted = set(regions)
        found = {
            body: [captured.nodes_of(region) for region in captured.regions if region in wanted]
            for body, captured in self._bodies.items()
        }
        return told_of_policies(found)

    def replace(self, calls: Mapping[Region, Call]) -> list[Region]:
        """Put calls in place of regions, and return those for which that was possible."""
        placed = []
        for captured in (self._whole, *self._bodies.values()):
            own = {region: calls[region] for region in captured.regions if region in calls}
            placed += captured.replace(own) if own else []
        for body in self._bodies:
            body.recompile()
        return placed


def _read_bodies(
    module: fx.GraphModule, captured: Captured, within: tuple[fx.Node, ...] = ()
) -> Iterator[tuple[fx.GraphModule, Captured]]:
    """Yield what a graph checkpoints with gradients, and what that checkpoints, as read where it is called.

    Args:
        captured: the graph.
        within: the contexts of autocast that its call is in.
    """
    contexts = Contexts(module.graph, within)
    for body, calls in _bodies(module).items():
        recorded = [call for call in calls if call not in contexts.unrecorded]
        if not recorded:
            continue
        autocast = contexts.autocast[recorded[0]]
        called = captured.called(body.graph, calls[0].args[1:] if len(calls) == 1 else (), autocast)
        read = Captured(body.graph, is_unit=True, called=called)
        yield body, read
        yield from _read_bodies(body, read, autocast)


def _bodies(module: fx.GraphModule) -> dict[fx.GraphModule, list[fx.Node]]:
    """Return what a graph checkpoints, each with its calls."""
    found: dict[fx.GraphModule, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(module, str(node.args[0].target), None)
            if isinstance(body, fx.GraphModule):
                found.setdefault(body, []).append(node)
    return found


def repeat_as_drawn(call: fx.Node) -> None:
    """Have the call of a region that draws random numbers made again with the same ones, where it is made again.

    Under a budget for activations the other compiler makes calls again as it sees fit. Those that are marked get the
    state of random numbers of the first time; the others draw anew. Where a checkpoint holds the call, it marks it.
    """
    budgets = (node.meta.get("custom") or {} for node in call.graph.nodes)
    if config.activation_memory_budget < 1 or any(BUDGET in each for each in budgets):
        call.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def with_checkpoints(module: fx.GraphModule) -> fx.GraphModule:
    """Have a graph's checkpoints restore the state of random numbers, for one that runs call by call.

    Torch leaves that to compilers which draw numbers from a seed.
    """
    for body, calls in _bodies(module).items():
        with_checkpoints(body)
        for call in calls:
            call.target = _checkpoint
    module.recompile()
    return module


def _checkpoint(body: fx.GraphModule, *given: Any, **options: Any) -> Any:
    contexts = body.meta.get(CONTEXTS, noop_context_fn)
    return checkpoint(body, *given, **options | {"use_reentrant": False, "context_fn": contexts})


def _families(regions: Iterable[Region]) -> set[tuple[str, str]]:
    """Return the families of the layers that regions are of; a family with several bodies repeats."""
    operations = (operation for region in regions for operation in region.cut.operations)
    return {layer.kin for operation in operations for layer in operation.layers}


def _has_attention(region: Region) -> bool:
    return any(operation.kind in SOFTMAXES for operation in region.cut.operations)
