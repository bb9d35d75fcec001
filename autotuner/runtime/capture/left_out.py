"""The share of a graph's flop that runs tuned, and reasons for the rest, in words of the model's modules."""

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from torch import fx

from autotuner.runtime.capture.calls import CountedCall, calls_of
from autotuner.runtime.capture.checkpointed import CapturedModule
from autotuner.runtime.capture.joined_heads import HEAD
from autotuner.runtime.capture.module_costs import costs_by_module
from autotuner.runtime.capture.region_model import Region
from autotuner.runtime.coverage import Coverage, LeftOut, PlannedPart, merged, planned_parts, tuned_parts
from autotuner.runtime.region_plan import RegionPlan

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
OUTSIDE = "outside of the layers that repeat"
ALONE = "nothing like it repeats, and it has no attention"
WITH_LOSS = "one operator with the loss, some rows at a time"


class Parts:
    """The calls of a graph, each with its flop, its region, and what cuts it off from one.

    It is made before the graph is changed.
    """

    def __init__(self, graph: fx.Graph, captured: CapturedModule | str) -> None:
        """Count the flop of a graph.

        Args:
            captured: its regions, or why there are none.
        """
        self._calls = calls_of(graph)
        self._captured = captured
        self._regions: dict[fx.Node, Region] = {}
        self._reasons: dict[fx.Node, str] = {}
        self._modules: dict[fx.Node, set[str]] = {}
        for call in self._calls:
            self._modules.setdefault(call.node, set()).add(_NUMBER.sub("*", call.module))
        if isinstance(captured, str):
            return
        for region in captured.regions:
            self._regions |= dict.fromkeys(captured.nodes_of(region), region)
        self._layer = {call.node: _layer(call.module) for call in self._calls}
        self._floating = {call.node for call in self._calls if call.floating}
        self._has_layers = any(self._layer.values())
        self._amid = self._between()
        self._reasons = {call.node: self._reason(call.node, captured.refused) for call in self._calls if call.flop}

    def coverage(
        self, tuned: Collection[Region], untuned: str, plans: Mapping[Region, RegionPlan] | None = None
    ) -> Coverage:
        """Return what runs tuned, and what does not.

        Args:
            tuned: regions that do.
            untuned: why others do not, but for those of which capture says why.
            plans: of tuned regions, as far as they are known.
        """
        flop = tuned_flop = 0
        parts, inside = [], []
        for call in self._calls:
            flop += call.flop
            region = self._regions.get(call.node)
            if region is not None and region in tuned:
                tuned_flop += call.flop
                inside.append((_NUMBER.sub("*", call.module), call.flop))
            elif call.flop or self._is_refused(call):
                reason = self._said(call, untuned)
                parts.append(LeftOut(_NUMBER.sub("*", call.module), 1, call.flop, reason))
        planned = planned_parts(part for region, plan in (plans or {}).items() for part in self._planned(region, plan))
        return Coverage(flop, tuned_flop, merged(parts), tuned_parts(inside), planned)

    def _planned(self, region: Region, plan: RegionPlan) -> list[PlannedPart]:
        """Return what a region's plan tells of the modules that make its calls."""
        if isinstance(self._captured, str):
            return []
        modules = {
            tensor: {module for node in nodes for module in self._modules.get(node, ())}
            for tensor, nodes in self._captured.nodes_by_tensor(region).items()
        }
        return costs_by_module(region, plan, modules)

    def _is_refused(self, call: CountedCall) -> bool:
        """Say whether a call without flop is of a layer, and capture knows it not."""
        if isinstance(self._captured, str):
            return False
        return call.floating and call.node in self._captured.refused and bool(_layer(call.module))

    def _said(self, call: CountedCall, untuned: str) -> str:
        if call.node.target is HEAD:  # which no rule reads
            return WITH_LOSS
        if isinstance(self._captured, str):
            return self._captured
        refused = self._captured.refused.get(call.node)
        if refused is not None:
            return refused
        return untuned if call.node in self._regions else self._reasons[call.node]

    def _reason(self, node: fx.Node, refused: Mapping[fx.Node, str]) -> str:
        """Say why a call that is known is in no region."""
        layer = self._layer[node]
        if self._has_layers and not layer:
            return OUTSIDE
        here = [each for each in self._floating if self._layer[each] == layer]
        found = _nearest(node, refused, here) or _nearest(node, refused, self._amid)
        return f"cut off by {refused[found]}" if found else ALONE

    def _between(self) -> list[fx.Node]:
        """Return calls behind the first one of a layer and before the last one."""
        places = [place for place, call in enumerate(self._calls) if call.flop and self._layer[call.node]]
        calls = self._calls[min(places) : max(places)] if places else []
        return [call.node for call in calls if call.floating]


def _nearest(node: fx.Node, wanted: Collection[fx.Node], among: Iterable[fx.Node]) -> fx.Node | None:
    """Return the wanted node that is fewest steps away from another, along nodes of which all are among some."""
    ahead, waiting = set(among) - {node}, deque([node])
    while waiting:
        here = waiting.popleft()
        if here in wanted and here is not node:
            return here
        near = [each for each in (*here.all_input_nodes, *here.users) if each in ahead]
        ahead.difference_update(near)
        waiting.extend(near)
    return None


def _layer(module: str) -> str:
    """Return the path of the layer that a module is in, up to its number; "" where it is in none."""
    found = _NUMBER.search(module)
    return module[: found.end()] if found else ""
