"""A graph of dynamo's, node by node, read as operators of ours where that is possible."""

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.kernels.torch.programs import refusal
from autotuner.runtime.capture import operators  # noqa: F401  (registers its rules)
from autotuner.runtime.capture.axes import UnknownError, fresh, whole
from autotuner.runtime.capture.calls import EXAMPLE, is_node
from autotuner.runtime.capture.changed_in_place import name_of, storages_of
from autotuner.runtime.capture.constants import Constants
from autotuner.runtime.capture.deferred import CASTS, VIEWS, Calls, Deferred, check_example, is_value, shape_of
from autotuner.runtime.capture.out_of_place import AUTOCAST, out_of_place
from autotuner.runtime.capture.program import Expression, Operation, TensorValue, View
from autotuner.runtime.capture.reader import RULES, Reader, fits
from autotuner.runtime.capture.unread import INLINED, Unread
from autotuner.runtime.capture.views import sliced
from autotuner.runtime.capture.written_out import is_named

log = logging.getLogger("autotuner.capture")

OF_SLICES = (torch.ops.aten.neg.default, torch.ops.aten.cat.default)
"""Calls whose rules know slices; others get a slice as a view."""
OF_CASTS = (
    torch.ops.aten.to.dtype, torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.other,
    torch.ops.aten._to_copy.default, torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.mul.Tensor,
    torch.ops.aten.add.Tensor,
)  # fmt: skip
"""Calls whose rules know casts; for others, a cast becomes an operator."""
PARTS = frozenset((
    *VIEWS, *CASTS, torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar, torch.ops.aten.div.Tensor,
    torch.ops.aten.div.Scalar, torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.neg.default,
    torch.ops.aten.cat.default, torch.ops.aten.mean.dim, torch.ops.aten.tanh.default, torch.ops.aten.rsqrt.default,
    torch.ops.aten.__and__.Tensor, torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.logical_and.default,
))  # fmt: skip
"""Calls that become a part of an expression or a program where they read one: they need no operator before them."""
CONTEXTS = ("_enter_", "_exit_", "__enter__", "__exit__", "_saved_tensors_hooks", "_vmap_", "_grad_increment", "_jvp_",
            "_functorch", "_push_", "_pop_")  # fmt: skip
"""Beginnings of the names of functions by which a graph enters and leaves contexts other than of gradients."""
FAULTS_RAISE = False
"""Raise errors of rules, as in tests; otherwise they are logged, and the call stays torch's."""
NO_OPERATORS = (torch._C._set_grad_enabled, torch._C._log_api_usage_once)


class GraphReading:
    """The knowledge of a graph: the operators, and a value for each node that they make or view.

    Attributes:
        values: by node; a view of a tensor, a tuple of views, or an expression. A node without one is torch's.
        reasons: how many nodes are torch's, by why.
        refused: why a node is torch's.
        order: the place of each node in the graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._changed = out_of_place(graph)
        self.graph = graph
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.values: dict[fx.Node, Any] = {}
        self.reasons: Counter[str] = Counter()
        self.refused: dict[fx.Node, str] = {}
        self._reader = Reader(self._is_causal, self._hides_nothing)
        self._calls = Calls()
        self._nodes_of: dict[Any, list[fx.Node]] = {}
        self._factories: dict[fx.Node, Deferred] = {}
        self._outside: dict[fx.Node, TensorValue] = {}
        self._fragments: dict[str, fx.GraphModule] = {}
        self._autocast: dict[fx.Node, torch.autocast] = {}
        self._constants = Constants(self.order, self._is_changed)
        self._read()

    @property
    def operations(self) -> list[Operation]:
        return self._reader.operations

    def _read(self) -> None:
        named = (name_of(node) for node in self.graph.nodes if node.target not in AUTOCAST)
        entered = next((name for name in named if name.startswith(CONTEXTS)), None)
        if entered is not None:
            reason = f"{entered}: the model computes in a context that is not known"
            self.reasons[reason] += 1
            self.refused = dict.fromkeys(self.graph.nodes, reason)
            return
        recording = True
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
                recording = bool(node.args[0])
            if node.op not in ("call_function", "call_method") or self._is_autocast(node):
                continue
            self._reader.place = self._reader.place_read = self.order[node]
            mark = self._reader.mark()
            try:
                if not recording:
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

    def _is_autocast(self, node: fx.Node) -> bool:
        """Say whether a node enters or leaves a context of autocast, and follow it there."""
        if node.target is AUTOCAST[0]:
            self._autocast[node] = torch.autocast(*node.args, **node.kwargs)  # type: ignore[arg-type]
        elif node.target is AUTOCAST[1]:
            self._autocast.pop(node.args[0], None)  # type: ignore[arg-type]
        return node.target in AUTOCAST

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

    def _read_as(self, node: fx.Node, given: Sequence[fx.Node]) -> Any:
        """Return what a node is, by the calls that it makes of ATen."""
        if len(_devices([node, *given])) > 1:
            raise UnknownError("it has tensors on several devices")
        fragment = self._fragment(node, given)
        if fragment is None:
            raise UnknownError("torch cannot trace it by itself")
        rules = _Rules(fragment, self._reader, self._calls, self._is_read_elsewhere, bool(self._autocast))
        found = rules.value(*(self.value_of(each) for each in given))
        check_example(found, node.meta.get(EXAMPLE))
        return found

    def _note_factory(self, node: fx.Node, given: Sequence[fx.Node]) -> None:
        """Keep how positions and numbers follow from nothing, so that programs can make them themselves."""
        example = node.meta.get(EXAMPLE)
        if not isinstance(example, Tensor) or not _is_factory(example) or set(given) - self._factories.keys():
            return
        with suppress(UnknownError):
            self._keep_factory(node, self._read_as(node, given))

    def _keep_factory(self, node: fx.Node, found: Any) -> None:
        if isinstance(found, Deferred) and _is_factory(node.meta[EXAMPLE]):
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

    def _mask(self, mask: Any) -> Tensor | None:
        """Return where a mask that is a constant hides nothing, as the node has it that it comes from.

        It is boolean, or additive and of 0 and -inf.
        """
        if isinstance(mask, View) and mask.tensor.computed is not None:
            return None
        node = mask.tensor.node if isinstance(mask, View) else mask
        value = self._constants.value(node) if isinstance(node, fx.Node) else None
        if value is None or value.dtype == torch.bool:
            return value
        shows = value == 0
        return shows if value.is_floating_point() and bool((shows | (value == -torch.inf)).all()) else None

    def _hides_nothing(self, mask: Any) -> bool:
        value = self._mask(mask)
        return value is not None and bool(value.all())

    def _is_causal(self, mask: Any) -> bool:
        value = self._mask(mask)
        if value is None or value.ndim < 2 or (isinstance(mask, View) and not _is_as_it_comes(mask)):
            return False
        rows, columns = value.shape[-2:]
        return bool(rows == columns and (value == torch.ones_like(value).tril()).all())

    def _fragment(self, node: fx.Node, given: Iterable[fx.Node]) -> fx.GraphModule | None:
        """Return what a node asks of ATen, before autograd and autocast, as a graph over the nodes that it is given.

        The calls have the results that they have under autocast, if it is on.
        """
        examples = [each.meta.get(EXAMPLE) for each in given]
        places = iter(range(len(examples)))
        flat, tree = pytree.tree_flatten((node.args, node.kwargs), is_leaf=is_node)
        numbered = [next(places) if isinstance(part, fx.Node) else None for part in flat]
        contexts = [(each.device, each.fast_dtype, each._enabled) for each in self._autocast.values()]
        given_as = [_signature(example) for example in examples]
        constants = [part for part in flat if not isinstance(part, fx.Node)]
        key = repr((str(node.target), node.op, contexts, numbered, constants, tree, given_as))
        if key not in self._fragments:
            if not all(isinstance(example, Tensor) for example in examples):
                return None

            def called(*tensors: Tensor) -> Any:
                parts = [part if place is None else tensors[place] for part, place in zip(flat, numbered, strict=True)]
                args, kwargs = pytree.tree_unflatten(parts, tree)
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]

            try:
                with ExitStack() as entered:
                    entered.enter_context(_constants_allowed(examples))
                    for context in self._autocast.values():
                        entered.enter_context(context)
                    self._fragments[key] = make_fx(called, pre_dispatch=True)(*examples)
            except Exception:  # whatever a function does that cannot be traced
                return None
        return self._fragments[key]


STRIDED = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter", "aten::_reinterpret_tensor")
"""Calls that see how a tensor lies in memory, and not only its numbers."""


class _RuleError(UnknownError):
    """A rule has a defect, so its call stays torch's."""


class _Rules(fx.Interpreter):
    """Runs the rules of a fragment's ATen calls; what no rule reads is deferred."""

    def __init__(
        self,
        module: fx.GraphModule,
        reader: Reader,
        calls: Calls,
        is_read_elsewhere: Callable[[Any], bool],
        autocast: bool,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._reader, self._calls, self._is_autocast = reader, calls, autocast
        self._is_read_by_others = is_read_elsewhere
        self._unread = Unread(reader, calls, self._is_read_elsewhere)
        self._node: Any = None
        self._done: set[fx.Node] = set()

    def value(self, *given: Any) -> Any:
        """Return what the fragment makes of values."""
        found = self.run(*given, enable_io_processing=False)
        return tuple(found) if isinstance(found, list) else found

    def run_node(self, n: fx.Node) -> Any:
        result = n.meta.get("val")
        self._node = n
        self._reader.dtype = str(result.dtype).removeprefix("torch.") if isinstance(result, Tensor) else ""
        found = super().run_node(n)
        self._done.add(n)
        return found

    def _is_read_elsewhere(self, value: Any) -> bool:
        """Say whether somebody reads a value whom no call that is noted stands for."""
        here = [node for node, each in self.env.items() if each is value]
        behind = any(user not in self._done and user is not self._node for node in here for user in node.users)
        return (
            behind
            or self._is_read_by_others(value)
            or (self._node is not None and sum(self.env.get(each) is value for each in self._node.all_input_nodes) > 0)
        )

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        if target is torch.ops.aten.type_as.default:
            target, args, kwargs = torch.ops.aten._to_copy.default, args[:1], {"dtype": self._node.meta["val"].dtype}
        mark = self._reader.mark()
        try:
            found = self._by_rule(target, args, kwargs)
        except _RuleError:
            raise
        except UnknownError as error:
            self._reader.take_back(mark)
            found = self._by_operators(target, args, kwargs)
            if found is None:
                return self._deferred(target, args, kwargs, error)
        return self._noted(target, args, kwargs, found)

    def _by_rule(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in RULES:
            raise UnknownError(f"no rule for {target}")
        args = tuple(self._resolved(each, target) for each in args)
        rule = RULES[target]
        if not fits(rule, (self._reader, *args), kwargs):
            raise UnknownError(f"{target} of {', '.join(type(each).__name__ for each in args)}")
        try:
            return rule(self._reader, *args, **kwargs)
        except UnknownError:
            raise
        except Exception as error:
            if FAULTS_RAISE:
                raise
            log.exception("the rule of %s failed: please report this", target)
            raise _RuleError(f"the rule of {target} failed: {type(error).__name__}: {error}") from error

    def _by_operators(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what a rule reads once operators make what is deferred; None where it reads nothing then either."""
        deferred = [each for each in pytree.tree_leaves((args, kwargs), is_leaf=is_value)
                    if isinstance(each, Deferred | Expression)]  # fmt: skip
        if not deferred or target not in RULES or not self._asks_for_operators(target, args):
            return None
        mark = self._reader.mark()
        try:
            made_args, made_kwargs = pytree.tree_map(self._as_operand, (args, kwargs), is_leaf=is_value)
            return self._by_rule(target, made_args, made_kwargs)
        except UnknownError:
            self._reader.take_back(mark)
            return None

    def _as_operand(self, value: Any) -> Any:
        if isinstance(value, Expression) and value.name == "normalised":
            return value
        return self._unread.view_of(value) if isinstance(value, Deferred | Expression) else value

    def _asks_for_operators(self, target: Any, args: Any) -> bool:
        """Say whether a call computes more than element by element, or adds to what flows on beside it."""
        if target in PARTS:
            return any(is_named(each, "normalised") for each in args) and any(isinstance(e, Deferred) for e in args)
        if target is not torch.ops.aten.add.Tensor:
            return True
        x = next((each for each in args if isinstance(each, View)), None)
        other = next((self._calls.call_of(each) for each in args if isinstance(each, Deferred | Expression)), None)
        if x is None or other is None or shape_of(x) != other.shape:
            return False
        return x.tensor.made_by is None or x.tensor.made_by.kind not in INLINED

    def _noted(self, target: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """Return what a rule found, with the call that it stands for."""
        given = [each for each in pytree.tree_leaves((args, kwargs), is_leaf=is_value) if is_value(each)]
        if isinstance(found, Expression):
            found = Expression(found.name, found.operands)  # each call has its own
        parts = found if isinstance(found, tuple) else (found,)
        made = [each for each in parts if is_value(each) and all(each is not other for other in given)]
        if not made:
            return found
        call = self._new(target, args, kwargs)
        if call is None:
            return found
        self._calls.note(call)
        for place, value in enumerate(parts):
            if isinstance(value, View | Expression) and any(value is each for each in made):
                of = call if not isinstance(found, tuple) else self._part(call, place)
                if of is not None:
                    self._calls.of[value] = of
        return found

    def _part(self, call: Deferred, place: int) -> Deferred | None:
        result = self._node.meta.get("val")
        if not isinstance(result, tuple | list) or not isinstance(result[place], Tensor):
            return None
        part = self._calls.new(self._reader, operator.getitem, (call, place), {}, result[place])
        self._calls.note(part)
        return part

    def _new(self, target: Any, args: Any, kwargs: Any) -> Deferred | None:
        """Return a call of values as torch has it; None where autocast does to it what is not known."""
        result = self._node.meta.get("val")
        cast_to = ""
        if self._is_autocast and isinstance(result, Tensor) and result.is_floating_point():
            found = cast_by_autocast(self._node)
            if found is None:
                return None
            cast_to = found
        return self._calls.new(self._reader, target, tuple(args), kwargs, result, cast_to)

    def _deferred(self, target: Any, args: Any, kwargs: Any, error: UnknownError) -> Any:
        """Return a call that no rule reads as a value.

        Raises:
            UnknownError: it cannot be a part of a program, or reads nothing that is known.
        """
        if target is not operator.getitem:
            if not isinstance(target, OpOverload) or target.namespace != "aten":
                raise UnknownError(f"{target} is no operator of torch's own")
            reason = refusal(str(target).removeprefix("aten."))
            if target._schema.name in STRIDED:
                reason = "its result depends on strides"
            if reason is not None:
                raise UnknownError(f"{error}, and it stays torch's: {reason}")
        for node in self._node.all_input_nodes:
            value = self.env[node]
            if isinstance(value, fx.Node) or (isinstance(value, Expression) and self._calls.call_of(value) is None):
                raise error
            if isinstance(value, View) and not any(value.tensor.dims):
                raise UnknownError(f"{error}, and a tensor of one element has no axis")
            if isinstance(value, View | Deferred) and isinstance(node.meta.get("val"), Tensor):
                check_example(value, node.meta["val"])
        result = self._node.meta.get("val")
        results = result if isinstance(result, tuple | list) else (result,)
        if not all(isinstance(each, Tensor) and _is_usual(each) for each in results):
            raise error
        call = self._new(target, args, kwargs)
        if call is None:
            raise UnknownError(f"{error}, under autocast")
        is_inside = call.made or (call.learned and call.is_pointwise and self._calls.follows_from_parameters(call))
        if not is_inside and (call.learned or any(isinstance(each, View) for each in call.operands)):
            raise error  # constants, and what follows from parameters alone, are computed once for all layers
        self._calls.note(call)
        if isinstance(result, tuple | list):
            return tuple(self._part(call, place) for place in range(len(result)))
        return call

    def _resolved(self, value: Any, target: Any) -> Any:
        """Return a slice or a cast as a view, where it is no part of anything."""
        if is_named(value, "slice") and target not in OF_SLICES:
            return sliced(self._reader, *value.operands)
        return self._reader.cast(*value.operands) if is_named(value, "cast") and target not in OF_CASTS else value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return one number that a call holds, as a call that makes it."""
        constant = super().get_attr(target, args, kwargs)
        if not isinstance(constant, Tensor) or constant.numel() != 1 or not _is_factory(constant):
            raise UnknownError("it holds a constant")
        if isinstance(constant, FakeTensor):
            raise UnknownError("it holds a constant that is not known")
        given = {"dtype": constant.dtype}
        call = self._calls.new(self._reader, torch.ops.aten.full.default, (list(constant.shape), constant.item()),
                               given, constant)  # fmt: skip
        self._calls.note(call)
        return call


@contextmanager
def _constants_allowed(examples: Iterable[Any]) -> Iterator[None]:
    """Let a call mix tensors without memory with constants that it makes itself."""
    modes = {example.fake_mode for example in examples if isinstance(example, FakeTensor)}
    before = [(mode, mode.allow_non_fake_inputs) for mode in modes]
    try:
        for mode in modes:
            mode.allow_non_fake_inputs = True
        yield
    finally:
        for mode, allowed in before:
            mode.allow_non_fake_inputs = allowed


def _is_as_it_comes(view: View) -> bool:
    """Say whether the last two dimensions of a view are those of its tensor, and what is before them only repeated."""
    own = [whole(dim) for dim in view.tensor.dims]
    seen = [whole(dim) for dim in view.dims]
    return not view.fixed and len(own) >= 2 and len(seen) >= 2 and own[-2:] == seen[-2:]


def _parts(value: Any) -> list[Any]:
    return [each for each in (value if isinstance(value, tuple) else (value,)) if is_value(each)]


def _is_factory(example: Tensor) -> bool:
    """Say whether a tensor is of integers, or one number: others are computed once for all layers, outside."""
    if any(type(size) is not int for size in example.shape) or example.is_complex():
        return False
    return example.numel() == 1 or not (example.is_floating_point() or example.dtype == torch.bool)


def _is_usual(tensor: Tensor) -> bool:
    """Say whether a tensor has a type and a shape that a program can hold."""
    return tensor.numel() > 0 and not tensor.is_complex() and all(type(size) is int for size in tensor.shape)


def cast_by_autocast(node: fx.Node) -> str | None:
    """Return to which type autocast casts a call's operands, "" where to none, and None where that is not known.

    Its result says so: without autocast, it has another type.
    """
    wanted = node.meta["val"].dtype

    def found(cast_to: torch.dtype | None) -> Any:
        def operand(part: Any) -> Any:
            example = part.meta.get("val") if isinstance(part, fx.Node) else part
            is_cast = cast_to is not None and isinstance(example, Tensor) and example.is_floating_point()
            return example.to(cast_to) if is_cast and isinstance(example, Tensor) else example

        args, kwargs = pytree.tree_map(operand, (node.args, node.kwargs), is_leaf=is_node)
        device = node.meta["val"].device.type
        with torch.autocast(device, enabled=False), torch.no_grad():
            return node.target(*args, **kwargs).dtype  # type: ignore[operator]

    for cast_to in (None, wanted):
        with suppress(Exception):  # whatever torch says of operands of several types
            if found(cast_to) == wanted:
                return "" if cast_to is None else str(wanted).removeprefix("torch.")
    return None


def _signature(example: Any) -> Any:
    if not isinstance(example, Tensor):
        return type(example).__name__
    return tuple(example.shape), example.dtype, example.device, example.stride(), example.requires_grad


def _devices(nodes: Iterable[fx.Node]) -> set[torch.device]:
    examples = [each for node in nodes for each in pytree.tree_leaves(node.meta.get(EXAMPLE))]
    return {each.device for each in examples if isinstance(each, Tensor)}
