"""A graph of dynamo's, node by node, read as operators of ours where that is possible."""

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotuner.ir.kinds import ELEMENT_BYTES, KINDS
from autotuner.runtime.capture import operators  # noqa: F401  (registers its rules)
from autotuner.runtime.capture.aliases import AUTOCAST, Contexts, autocast_of
from autotuner.runtime.capture.axes import UnknownError, fresh
from autotuner.runtime.capture.calls import EXAMPLE, is_node
from autotuner.runtime.capture.changed_in_place import name_of, storages_of
from autotuner.runtime.capture.constants import STATELESS, Constants, is_pure
from autotuner.runtime.capture.deferred import Calls, Deferred, check_example, is_named, is_value
from autotuner.runtime.capture.fragment_rules import FragmentRules, is_factory
from autotuner.runtime.capture.fragments import Fragments, autocast_outside
from autotuner.runtime.capture.known_masks import Band, KnownMasks
from autotuner.runtime.capture.out_of_place import out_of_place
from autotuner.runtime.capture.packed import gather_bounds
from autotuner.runtime.capture.program import Expression, Operation, TensorValue, View
from autotuner.runtime.capture.reader import Reader, aten

log = logging.getLogger("autotuner.capture")

CONTEXTS = ("_enter_", "_exit_", "__enter__", "__exit__", "_saved_tensors_hooks", "_vmap_", "_grad_increment", "_jvp_",
            "_functorch", "_push_", "_pop_")  # fmt: skip
"""Beginnings of the names of functions by which a graph enters and leaves contexts other than of gradients."""
VMAP = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
"""Functions that enter and leave `torch.vmap`, whose calls stay torch's: tensors have a hidden dimension there."""
NO_OPERATORS = (torch._C._set_grad_enabled, torch._C._log_api_usage_once)

OF_RESIDUALS = ("add", "iadd", "add_", "layer_norm", "rms_norm")
"""Functions and methods by which layers read what other layers add to."""


@dataclass(frozen=True)
class Called:
    """A body's call: its contexts, and what is known of the inputs there.

    Args:
        within: the contexts of autocast that the call is in.
        constants: values of inputs.
        bands, bands_and_keys: inputs that are masks which hide what is outside of a band; see `KnownMasks`.
    """

    within: tuple[fx.Node, ...] = ()
    constants: Mapping[fx.Node, Tensor] = field(default_factory=dict)
    bands: Mapping[fx.Node, Band] = field(default_factory=dict)
    bands_and_keys: Mapping[fx.Node, Band] = field(default_factory=dict)


NOT_CALLED = Called()
"""Nothing is known of the inputs of a whole graph."""


SCALES = ("div", "mul", "truediv")
"""Names of calls to which a tensor of one number is that number, where it follows from constants alone."""


class GraphReading:
    """The knowledge of a graph: the operators, and a value for each node that they make or view.

    Attributes:
        values: by node; a view of a tensor, a tuple of views, or an expression. A node without one is torch's.
        reasons: how many nodes are torch's, by why.
        refused: why a node is torch's.
        nodes: of the graph, in order.
        order: the place of each of them.
    """

    def __init__(self, graph: fx.Graph, called: Called = NOT_CALLED) -> None:
        """Read a graph; `called`: where, if it is a body."""
        self._changed = out_of_place(graph, called.within)
        gather_bounds(graph, self._is_changed)
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.values: dict[fx.Node, Any] = {}
        self.reasons: Counter[str] = Counter()
        self.refused: dict[fx.Node, str] = {}
        self._calls = Calls()
        self._nodes_of: dict[Any, list[fx.Node]] = {}
        self._factories: dict[fx.Node, Deferred] = {}
        self._outside: dict[fx.Node, TensorValue] = {}
        self._fragments = Fragments()
        self._contexts = Contexts(graph, called.within)
        self._mapped = mapped(graph)
        self._constants = Constants(self.order, self._is_changed, called.constants)
        self._masks = KnownMasks(self._constants, called.bands, called.bands_and_keys)
        self._reader = Reader(self._masks)
        self._read()

    @property
    def operations(self) -> list[Operation]:
        return self._reader.operations

    def _read(self) -> None:
        entered = unknown_context(self.graph)
        if entered:
            reason = f"{entered}: the model computes in a context that is not known"
            self.reasons[reason] += 1
            self.refused = dict.fromkeys(self.graph.nodes, reason)
            return
        for node in self.graph.nodes:
            if node.op not in ("call_function", "call_method") or node.target in AUTOCAST:
                continue
            self._reader.place = self._reader.place_read = self.order[node]
            mark = self._reader.mark()
            try:
                if node in self._mapped:
                    raise UnknownError("it runs inside of vmap")
                if node in self._contexts.unrecorded:
                    raise UnknownError("it runs without gradients inside of a forward that has them")
                self.values[node] = self._value(node)
                for value in _parts(self.values[node]):
                    self._nodes_of.setdefault(value, []).append(node)
            except UnknownError as error:
                self._reader.take_back(mark)
                self.refused[node] = f"{name_of(node)}: {str(error).partition(chr(10))[0]}"
                self.reasons[self.refused[node]] += 1
        self._reader.operations.sort(key=lambda operation: operation.place)
        for node, value in self.values.items():
            found = self._reader.results_of_calls.get(self._calls.call_of(value)) if is_value(value) else None
            if found is not None and not isinstance(value, View):
                self.values[node] = found

    def _is_read_elsewhere(self, value: Any) -> bool:
        """Say whether torch reads a value of the graph, or something behind the node that is read."""
        return any(
            self.order[user] > self._reader.place_read
            or (self.order[user] < self._reader.place_read and user not in self.values)
            for node in self._nodes_of.get(value, ())
            for user in node.users
        )

    def split_alike(self) -> None:
        """Split axes alike that operators bind to each other, wherever one of them was split later on.

        It goes on as long as an axis was split, and no axis can be split for ever; see `axes`.
        """
        axes = self._reader.axes
        mark = -1
        while axes.mark() > mark:
            mark = axes.mark()
            for operation in self._reader.operations:
                for one, other in (pair for operand in operation.inputs for pair in operand.renamed):
                    with suppress(UnknownError):
                        axes.pairs([one], [other])

    def _value(self, node: fx.Node) -> Any:
        if node.target in NO_OPERATORS:
            raise UnknownError("no operator")
        if node.target is torch.ops.higher_order.flex_attention:
            raise UnknownError("what its block mask skips is data, so it stays the other compiler's")
        for storage in storages_of(node) & self._changed.keys():
            raise UnknownError(self._changed[storage])
        if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), tuple):  # type: ignore[arg-type]
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if any(self._is_changed(each) for each in node.all_input_nodes):
            raise UnknownError("it reads what is changed in place")
        given = [each for each in pytree.tree_leaves((node.args, node.kwargs), is_leaf=is_node) if is_node(each)]
        if not any(self._is_of_ours(each) for each in given):
            self._note_factory(node, given)
            raise UnknownError("it computes neither numbers of ours nor a mask")
        found = self._read_as(node, given)
        self._check_unread(node, found)
        mean = self._calls.call_of(found) if is_named(found, "mean") else None
        found = mean if mean is not None else found
        if isinstance(found, Deferred) and not (found.made or found.learned):
            self._keep_factory(node, found)
            raise UnknownError("it follows from constants alone")
        self._check_own(node, found)
        self._check_order(node, found)
        return found

    def _check_own(self, node: fx.Node, found: Any) -> None:
        """Check that what several parts of the model read is a result of theirs.

        Raises:
            UnknownError: it is made of what comes from outside, as a bias of all layers' attention is, or the patches
                of an image: it is computed once, before all layers.
        """
        is_asked = isinstance(found, Deferred) or (
            isinstance(found, View) and found.tensor.made_by is not None and found.tensor.made_by.kind != "cast"
        )
        if is_asked and len(node.users) > 1 and not self._calls.is_computed(found):
            raise UnknownError("it is made of what comes from outside, for several parts")

    def _check_order(self, node: fx.Node, found: Any) -> None:
        """Check that what layers add to lies as they make what they add: the features innermost.

        Raises:
            UnknownError: it is turned, as convolutions before the first layer leave it. All layers would go by its
                order, with norms across memory and sums of two orders. As what comes from outside, it is copied once.
        """
        is_added_to = any(name_of(user) in OF_RESIDUALS for user in node.users)
        if is_added_to and isinstance(found, View | Deferred) and _is_turned(found) and _is_before_layers(found):
            raise UnknownError("features of what comes from outside do not lie side by side")

    def _read_as(self, node: fx.Node, given: Sequence[fx.Node]) -> Any:
        """Return what a node is, by the calls that it makes of ATen."""
        numbers = {each: self._constants.number(each) for each in given} if name_of(node) in SCALES else {}
        if len(_devices([node, *(each for each in given if numbers.get(each) is None)])) > 1:
            raise UnknownError("it has tensors on several devices")
        autocast = [autocast_of(each) for each in self._contexts.autocast[node]]
        fragment = self._fragments.of(node, given, autocast)
        if fragment is None:
            raise UnknownError("torch cannot trace it by itself")
        casts = bool(autocast_outside()) or any(each._enabled for each in autocast)
        rules = FragmentRules(fragment, self._reader, self._calls, self._is_read_elsewhere, casts)
        known = ((each, numbers.get(each)) for each in given)
        found = rules.value(*(self.value_of(each) if number is None else number for each, number in known))
        check_example(found, node.meta.get(EXAMPLE))
        return found

    def _note_factory(self, node: fx.Node, given: Sequence[fx.Node]) -> None:
        """Keep how positions and numbers follow from nothing, so that programs can make them themselves."""
        example = node.meta.get(EXAMPLE)
        if not isinstance(example, Tensor) or not is_factory(example) or set(given) - self._factories.keys():
            return
        with suppress(UnknownError):
            self._keep_factory(node, self._read_as(node, given))

    def _keep_factory(self, node: fx.Node, found: Any) -> None:
        if isinstance(found, Deferred) and is_factory(node.meta[EXAMPLE]):
            self._factories[node] = found

    def _check_unread(self, node: fx.Node, found: Any) -> None:
        """Check that nobody reads the weights of an attention that are averaged over its heads.

        Raises:
            UnknownError: somebody does; torch would compute them again, from other weights where some are dropped.
        """
        if not isinstance(found, tuple):
            return
        means = [place for place, part in enumerate(found) if is_named(part, "mean")]
        for user in node.users if means else ():
            if user.target is not operator.getitem or (user.args[1] in means and user.users):
                raise UnknownError("the weights of its attention are read: need_weights=False leaves them out")

    def _is_changed(self, node: fx.Node) -> bool:
        return bool(storages_of(node) & self._changed.keys())

    def _is_of_ours(self, node: fx.Node) -> bool:
        example = node.meta.get(EXAMPLE)
        is_read = isinstance(example, Tensor) and (example.is_floating_point() or example.dtype == torch.bool)
        return node in self.values or is_read

    def value_of(self, node: fx.Node) -> Any:
        """Return what a node is: as it was read, or a tensor from outside; what is neither is the node itself."""
        if node in self.values:
            return self.values[node]
        if node in self._factories:
            return self._factories[node]
        example = node.meta.get(EXAMPLE)
        if not isinstance(example, Tensor) or any(type(extent) is not int for extent in example.shape):
            return node
        dtype = str(example.dtype).removeprefix("torch.")
        if dtype not in (*ELEMENT_BYTES, "bool"):
            return node
        if not example.numel():
            return Expression("empty")
        if node not in self._outside:
            parameter = isinstance(example, nn.Parameter)
            dims = fresh(example.shape)
            if not parameter:  # so that the first layer, which reads what the others make, is like them
                self._reader.axes.bind(dims)
            self._outside[node] = TensorValue(dims, dtype, node, parameter)
        tensor = self._outside[node]
        return View(tensor, tensor.dims)

    def may_stand_at(self, node: fx.Node, place: int) -> bool:
        """Say whether a node computes the same at an earlier place: it has no state, and both are in one context."""
        contexts, other = self._contexts, self.nodes[place]
        return (
            is_pure(node, STATELESS)
            and not any(self._is_changed(each) for each in (node, *node.all_input_nodes))
            and self._mapped.isdisjoint((node, other))
            and contexts.autocast[node] == contexts.autocast[other]
            and (node in contexts.unrecorded) == (other in contexts.unrecorded)
        )

    def called(self, body: fx.Graph, given: Sequence[Any], within: tuple[fx.Node, ...]) -> Called:
        """Return what the graph's call of a body says of that.

        Args:
            given: what it is called with; none of it where it is called more than once.
            within: the contexts of autocast of the call.
        """
        inputs = (node for node in body.nodes if node.op == "placeholder")
        constants: dict[fx.Node, Tensor] = {}
        others: dict[fx.Node, fx.Node] = {}
        for place, node in zip(inputs, given, strict=False):
            value = self._constants.value(node) if isinstance(node, fx.Node) else None
            if value is not None:
                constants[place] = value
            elif isinstance(node, fx.Node):
                others[place] = node
        return Called(
            within,
            constants,
            _known(self._masks.band_of_node, others),
            _known(self._masks.band_beside_keys_of_node, others),
        )


def _known(band: Callable[[fx.Node], Band | None], given: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, Band]:
    found = ((place, band(node)) for place, node in given.items())
    return {place: each for place, each in found if each is not None}


def unknown_context(graph: fx.Graph) -> str:
    """Return what enters or leaves a context of which nothing is known here, "" where nothing does."""
    named = (name_of(node) for node in graph.nodes if node.target not in AUTOCAST)
    return next((name for name in named if name.startswith(CONTEXTS) and name not in VMAP), "")


def mapped(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that run inside of `vmap`, with those that enter and leave it."""
    found, depth = set(), 0
    for node in graph.nodes:
        step = VMAP.get(name_of(node), 0)
        if depth or step:
            found.add(node)
        depth += step
    return found


def _is_turned(value: View | Deferred) -> bool:
    """Say whether a value has the axes of a tensor in another order, and another one of them last."""
    if isinstance(value, View):
        own = value.tensor.dims
        return len(own) > 2 and not value.tensor.parameter and set(own) == set(value.dims) and own[-1] != value.dims[-1]
    last = len(value.shape) - 1
    if value.target is aten.permute.default:
        return last > 1 and value.args[1][-1] % (last + 1) != last
    return value.target is aten.transpose.int and last > 1 and last in (each % (last + 1) for each in value.args[1:])


def _is_before_layers(value: View | Deferred) -> bool:
    """Say whether no product, norm or attention that is known makes a value, but calls of the framework at most."""
    waiting: list[Any] = [value]
    seen = set[TensorValue]()
    while waiting:  # each turn takes another value
        each = waiting.pop()
        if isinstance(each, Deferred):
            waiting += each.operands
            continue
        made_by = each.tensor.made_by if isinstance(each, View) and each.tensor not in seen else None
        if made_by is None:
            continue
        seen.add(each.tensor)
        if made_by.kind != "program" and not KINDS[made_by.kind].inlined:
            return False
        waiting += (operand.view for operand in made_by.inputs)
    return True


def _parts(value: Any) -> list[Any]:
    return [each for each in (value if isinstance(value, tuple) else (value,)) if is_value(each)]


def _devices(nodes: Iterable[fx.Node]) -> set[torch.device]:
    examples = [each for node in nodes for each in pytree.tree_leaves(node.meta.get(EXAMPLE))]
    return {each.device for each in examples if isinstance(each, Tensor)}
