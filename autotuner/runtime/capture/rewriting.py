"""Regions in a graph of dynamo's: which there are, and calls in place of the nodes that they stand for."""

from collections.abc import Callable, Mapping, Sequence, Set
from math import ceil
from typing import Any

import torch
from torch import fx

from autotuner.runtime.capture.aside import aside
from autotuner.runtime.capture.axes import Axis, UnknownError, extent, whole
from autotuner.runtime.capture.calls import EXAMPLE
from autotuner.runtime.capture.layers import layer_calls
from autotuner.runtime.capture.narrowing import narrow, renamed
from autotuner.runtime.capture.packed import seeds_of
from autotuner.runtime.capture.program import Operation, Taken, TensorValue, View, fixed_of, taken_by
from autotuner.runtime.capture.reading import NOT_CALLED, Called, GraphReading
from autotuner.runtime.capture.rearranging import EXAMPLE_SHAPE, in_strides, rearranged, shape_of
from autotuner.runtime.capture.region_model import Region, region_of
from autotuner.runtime.capture.regions import Cut, cuts_of

ANNOTATION = "custom"
"""Key of what `torch.fx.traceback.annotate` notes at a node."""
Call = Callable[[fx.Graph, Sequence[fx.Node], Sequence[fx.Node]], Sequence[fx.Node]]
"""Writes a region's call: given the graph and the nodes of inputs and parameters, returns those of outputs."""


class Captured:
    """A graph of dynamo's with its regions.

    Attributes:
        regions: those whose calls have a place, in the order of the graph.
        reasons: how many of its nodes are torch's, by why; and regions that are none of ours after all.
        refused: why a node is torch's, or the region that it is in.
    """

    def __init__(self, graph: fx.Graph, *, is_unit: bool = False, called: Called = NOT_CALLED) -> None:
        """Read a graph.

        Args:
            is_unit: it is one of several like it, and a region where nothing in it repeats.
            called: where it is called, if it is a body.
        """
        self.graph = graph
        self._reading = GraphReading(graph, called)
        self._reading.split_alike()
        self._roots = [
            node for node in graph.nodes
            if node.op == "output" or (node.op.startswith("call") and node not in self._reading.values)
        ]  # fmt: skip
        self._narrow()
        self._set_layers()
        live, readers = self._live(frozenset(self._reading.operations))
        needed = self._needed(set(readers))
        self._set_stages(live, needed)
        beside = aside([each for each in self._reading.operations if each in needed])
        _, readers = self._live(frozenset(self._reading.operations) - beside)
        demanded = set(readers)
        needed = self._needed(demanded)
        self.regions: list[Region] = []
        self.reasons, self.refused = self._reading.reasons, self._reading.refused
        self._views: dict[TensorValue, list[fx.Node]] = {}
        self._made: dict[Any, tuple[fx.Node | None, int]] = {}
        for node, value in self._reading.values.items():
            if isinstance(value, View):
                self._views.setdefault(value.tensor, []).append(node)
        self.nodes = len([node for node in graph.nodes if node.op.startswith("call")])
        operations = [each for each in self._reading.operations if each in needed]
        for cut in cuts_of(operations, demanded, self._handed_out(readers), is_unit=is_unit):
            try:
                self.regions.append(region_of(cut))
            except UnknownError as error:
                self._refuse(cut, error)
        self.regions = list(self._placed(self.regions))

    def _refuse(self, cut: Cut, error: UnknownError) -> None:
        self.reasons[f"a region: {error}"] += 1
        nodes = self._reading.nodes
        self.refused |= {nodes[operation.place]: f"a region: {error}" for operation in cut.operations}

    def called(self, body: fx.Graph, given: Sequence[Any], within: tuple[fx.Node, ...]) -> Called:
        """Return what the graph's call of a body says of that; see `GraphReading.called`."""
        return self._reading.called(body, given, within)

    def nodes_of(self, region: Region) -> set[fx.Node]:
        """Return the calls of the graph that a region stands for."""
        return {node for operation in region.cut.operations for node in self.nodes_of_operator(operation)}

    def nodes_of_operator(self, operation: Operation) -> list[fx.Node]:
        """Return the calls of the graph that an operator stands for."""
        return [self._reading.nodes[place] for place in (operation.place, *operation.places)]

    def _narrow(self) -> None:
        """Have operators computed in 16 bits that are computed in float32 between casts."""
        _, demanded = self._live(frozenset(self._reading.operations))
        stands_for = narrow(self._reading.operations, demanded)
        for node, value in self._reading.values.items():
            if isinstance(value, View):
                self._reading.values[node] = renamed(value, stands_for)

    def _set_layers(self) -> None:
        """Give each operator the layers of the model that it is in."""
        nodes = list(self._reading.order)
        for operation in self._reading.operations:
            operation.layers = layer_calls(nodes[operation.place].meta.get("nn_module_stack"))

    def _set_stages(self, live: Set[fx.Node], needed: Set[Operation]) -> None:
        """Give each operator the number of strange parts that lie before it, at most, on any way to it.

        Args:
            live: nodes that run where all operators are calls.
            needed: operators whose results somebody reads.
        """
        stages: dict[fx.Node, int] = {}

        def of_tensor(tensor: TensorValue) -> int:
            return of_node(tensor.node) if tensor.made_by is None else tensor.made_by.stage

        def of_node(node: fx.Node) -> int:
            return stages.get(node, 0)

        by_place: dict[int, list[Operation]] = {}
        for operation in self._reading.operations:
            by_place.setdefault(operation.place, []).append(operation)
        for node, place in self._reading.order.items():
            for operation in by_place.get(place, ()):
                operation.stage = max((of_tensor(each.view.tensor) for each in operation.inputs), default=0)
            stage = 0
            for given in node.all_input_nodes:
                value = self._reading.values.get(given)
                if isinstance(value, View):
                    made = value.tensor.made_by
                    stage = max(stage, of_tensor(value.tensor) + (made is not None))
                else:
                    stage = max(stage, stages[given])
            stages[node] = stage
        self._raise_stages(stages, live, needed)

    def _raise_stages(self, stages: Mapping[fx.Node, int], live: Set[fx.Node], needed: Set[Operation]) -> None:
        """Move operators to the stage of their readers, where no strange part reads them before that."""
        bounds: dict[TensorValue, int] = {}
        for node in live:
            if not isinstance(self._reading.values.get(node), View):
                for given in node.all_input_nodes:
                    value = self._reading.values.get(given)
                    if isinstance(value, View):
                        tensor = value.tensor
                        bounds[tensor] = min(bounds.get(tensor, stages[node] - 1), stages[node] - 1)
        for operation in reversed([each for each in self._reading.operations if each in needed]):
            of_readers = [bounds[tensor] for tensor in operation.outputs if tensor in bounds]
            operation.stage = max(operation.stage, min(of_readers, default=operation.stage))
            for operand in operation.inputs:
                tensor = operand.view.tensor
                bounds[tensor] = min(bounds.get(tensor, operation.stage), operation.stage)

    def _handed_out(self, readers: Mapping[TensorValue, set[fx.Node]]) -> list[Taken]:
        """Return what is read of the tensors that must be handed out."""
        return [
            taken_by(self._reading.values[view])
            for tensor, nodes in readers.items()
            for view in self._views[tensor]
            if not nodes.isdisjoint(view.users)
        ]

    def _live(self, tuned: frozenset[Operation]) -> tuple[set[fx.Node], dict[TensorValue, set[fx.Node]]]:
        """Return the nodes that run where some operators are calls, and who reads the tensors that those hand out."""
        live: set[fx.Node] = set()
        demanded: dict[TensorValue, set[fx.Node]] = {}
        waiting = list(self._roots)
        while waiting:
            node = waiting.pop()
            if node in live:
                continue
            live.add(node)
            for given in node.all_input_nodes:
                value = self._reading.values.get(given)
                if isinstance(value, View) and value.tensor.made_by in tuned:
                    demanded.setdefault(value.tensor, set()).add(node)
                else:
                    waiting.append(given)
        return live, demanded

    def _needed(self, demanded: set[TensorValue]) -> set[Operation]:
        needed: set[Operation] = set()
        waiting = list(demanded)
        while waiting:
            operation = waiting.pop().made_by
            if operation is not None and operation not in needed:
                needed.add(operation)
                waiting += [operand.view.tensor for operand in operation.inputs]
        return needed

    def replace(self, calls: Mapping[Region, Call]) -> list[Region]:
        """Put calls in place of regions, and return those for which that was possible."""
        placed, seeds = self._placed(list(calls)), seeds_of(self.graph)
        for node, place in sorted(self._up.items(), key=lambda pair: (pair[1], self._reading.order[pair[0]])):
            self._reading.nodes[ceil(place)].prepend(node)
        stands_for: dict[TensorValue, tuple[fx.Node, tuple[Axis, ...]]] = {}
        for region, before in placed.items():
            with self.graph.inserting_before(before):
                fetched = []
                tensors = region.model.graph().tensors
                for source, port in zip(region.sources, (*region.inputs, *region.parameters), strict=True):
                    node, axes = stands_for.get(source.tensor) or self._holder(source.tensor)
                    if source.tensor.computed is not None:
                        place = self._reading.order[before]
                        node = self._computed(source.tensor, tensors[port.name].dtype, place)
                    wanted = [axis for dim in source.dims for axis in dim]
                    shape = [extent(dim) for dim in source.dims]
                    fetched.append(rearranged(self.graph, node, shape_of(node), axes, source.fixed, wanted, shape))
                count = len(region.inputs)
                made = calls[region](self.graph, fetched[:count], fetched[count:])
                for result, node in zip(region.results, made, strict=True):
                    tensor, taken = result.tensor, result.fixed
                    node.meta[EXAMPLE_SHAPE] = tuple(extent(dim) for dim in result.dims)
                    axes = tuple(axis for dim in result.dims for axis in dim)
                    if not taken:
                        stands_for[tensor] = node, axes
                    for view in self._views.get(tensor, ()):
                        value = self._reading.values[view]
                        if taken and taken_by(value) != (tensor, taken):
                            continue
                        wanted = [axis for dim in value.dims for axis in whole(dim)]
                        shape = [extent(whole(dim)) for dim in value.dims]
                        fixed = {} if taken else fixed_of(value.fixed)
                        shown = rearranged(self.graph, node, shape_of(node), axes, fixed, wanted, shape)
                        view.replace_all_uses_with(in_strides(self.graph, shown, view.meta[EXAMPLE]))
        self._annotate(placed)
        for node in reversed(list(self.graph.nodes)):
            if (node in self._reading.values or EXAMPLE_SHAPE in node.meta or node in seeds) and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return list(placed)

    def _annotate(self, placed: Mapping[Region, fx.Node]) -> None:
        """Give new nodes what users have noted at the calls that they stand for, as a budget for activations."""
        noted = next((node.meta[ANNOTATION] for node in placed.values() if ANNOTATION in node.meta), None)
        if noted is not None:
            for node in self.graph.nodes:
                if node not in self._reading.order:
                    node.meta.setdefault(ANNOTATION, noted)

    def _computed(self, tensor: TensorValue, dtype: str, place: int) -> fx.Node:
        """Write the call that computes a tensor, in a type, from others; what stands before a place is used again."""
        by = tensor.computed
        if by is None:
            return self._holder(tensor)[0]
        given = [self._computed(each, each.dtype, place) for each in by.of]
        key = by.function, *given, repr(by.arguments), dtype
        made, made_at = self._made.get(key, (None, 0))
        if made is None or made_at > place:
            made = self.graph.call_function(by.function, (*given, *by.arguments, getattr(torch, dtype)))
            made.meta[EXAMPLE_SHAPE] = tuple(extent(whole(dim)) for dim in tensor.dims)
            self._made[key] = made, place
        return made

    def _placed(self, regions: list[Region]) -> dict[Region, fx.Node]:
        """Return the node before which each region's call can stand: behind what it reads, before who reads it."""
        nodes = list(self._reading.order)
        while True:  # each turn but the last leaves out a region
            tuned = frozenset(operation for region in regions for operation in region.cut.operations)
            live, _ = self._live(tuned)
            self._up: dict[fx.Node, float] = {}  # nodes that are moved up, and to where
            at: dict[TensorValue, float] = {}
            found: dict[Region, fx.Node] = {}
            refused: Region | None = None
            for region in regions:
                try:
                    place = self._place(region, at, live)
                    if place is None and self._moved_up(region, tuned):
                        place = self._place(region, at, live)
                    if place is None:
                        raise UnknownError("other parts of the model lie between its own")
                except UnknownError as error:
                    self._refuse(region.cut, error)
                    refused = region
                    break
                found[region] = nodes[place]
                at |= dict.fromkeys((each.tensor for each in region.results if not each.fixed), place - 0.5)
            if refused is None:
                return found
            regions = [region for region in regions if region is not refused]

    def _place(self, region: Region, at: Mapping[TensorValue, float], live: Set[fx.Node]) -> int | None:
        """Return the place before which a region's call can stand; None where somebody reads its results before."""
        behind = max((self._position(source.tensor, at) for source in region.sources), default=-1.0)
        place = min((each.place for each in region.cut.operations if each.place > behind), default=None)
        users = {
            user for result in region.results for view in self._views.get(result.tensor, ()) for user in view.users
        }
        if place is None or any(self._reading.order[user] < place for user in users & live):
            return None
        return place

    def _moved_up(self, region: Region, tuned: Set[Operation]) -> bool:
        """Have what a region reads stand before all of it, as a mask that is made in the midst of it.

        Returns:
            Whether that is possible: it has no state, and follows from nothing that a region makes.
        """
        first = min(each.place for each in region.cut.operations)
        moved: set[fx.Node] = set()
        waiting = [node for source in region.sources for node in self._read_by(source.tensor)]
        while waiting:
            node = waiting.pop()
            value = self._reading.values.get(node)
            if node in moved or self._at(node) < first:
                continue
            if isinstance(value, View) and value.tensor.made_by in tuned:
                return False
            if not self._reading.may_stand_at(node, first):
                return False
            moved.add(node)
            waiting += node.all_input_nodes
        self._up |= dict.fromkeys(moved, first - 0.75)  # before the calls that stand there
        return bool(moved)

    def _read_by(self, tensor: TensorValue) -> list[fx.Node]:
        """Return the nodes of a tensor that is no operator's: itself, or what it is computed from."""
        if tensor.computed is not None:
            return [node for each in tensor.computed.of for node in self._read_by(each)]
        return [tensor.node] if tensor.made_by is None else []

    def _at(self, node: fx.Node) -> float:
        return self._up.get(node, float(self._reading.order[node]))

    def _position(self, tensor: TensorValue, at: Mapping[TensorValue, float]) -> float:
        if tensor.computed is not None:
            return max(self._position(each, at) for each in tensor.computed.of)
        return at[tensor] if tensor in at else self._at(self._holder(tensor)[0])

    def _holder(self, tensor: TensorValue) -> tuple[fx.Node, tuple[Axis, ...]]:
        """Return a node that is a tensor, whole, and its axes in order.

        Raises:
            UnknownError: there is none.
        """
        if tensor.made_by is None:
            return tensor.node, tuple(whole(axis for dim in tensor.dims for axis in dim))
        own = set(whole(axis for dim in tensor.dims for axis in dim))
        for node in self._views.get(tensor, ()):
            value = self._reading.values[node]
            axes = tuple(whole(axis for dim in value.dims for axis in dim))
            if not value.fixed and set(axes) == own:
                return node, axes
        raise UnknownError("no node is what it reads")
