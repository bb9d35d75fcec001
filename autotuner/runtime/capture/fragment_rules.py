"""The calls of ATen that one node of a graph makes, each read by its rule."""

import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autotuner.ir.kinds import KINDS
from autotuner.kernels.torch.programs import refusal
from autotuner.runtime.capture import operators, packed  # noqa: F401  (they register their rules)
from autotuner.runtime.capture.axes import UnknownError
from autotuner.runtime.capture.calls import is_node
from autotuner.runtime.capture.choices import counted, values_chosen
from autotuner.runtime.capture.deferred import (
    CASTS,
    VIEWS,
    Calls,
    Deferred,
    check_example,
    is_named,
    is_value,
    shape_of,
)
from autotuner.runtime.capture.equal_calls import equal_call
from autotuner.runtime.capture.program import Expression, View
from autotuner.runtime.capture.reader import RULES, Reader, fits
from autotuner.runtime.capture.unread import Unread
from autotuner.runtime.capture.views import sliced

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
    torch.ops.aten.max.dim, torch.ops.aten.sub.Tensor,
))  # fmt: skip
"""Calls that become a part of an expression or a program where they read one: they need no operator before them."""
STRIDED = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter", "aten::_reinterpret_tensor")
"""Calls that see how a tensor lies in memory, and not only its numbers."""
FAULTS_RAISE = False
"""Raise errors of rules, as in tests; otherwise they are logged, and the call stays torch's."""


class _RuleError(UnknownError):
    """A rule has a defect, so its call stays torch's."""


class FragmentRules(fx.Interpreter):
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
        target, args, kwargs = equal_call(target, args, kwargs, self._node.meta.get("val"))
        if target is torch.ops.aten.histc.default:
            args = (self._counted(args[0]), *args[1:])
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
        return x.tensor.made_by is None or not KINDS[x.tensor.made_by.kind].inlined

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
        if not isinstance(result, tuple | list):
            return call
        parts = [self._part(call, place) for place in range(len(result))]
        if parts[1:] and parts[1] is not None:
            parts[0] = values_chosen(self._reader, self._calls, call, parts[1], result[0]) or parts[0]
        return tuple(parts)

    def _counted(self, x: Any) -> Any:
        """Return what a call counts in place of the same numbers in order, which nobody then need sort."""
        cast = self._calls.call_of(x)
        if cast is None or cast.target not in CASTS:
            return counted(x, self._calls)
        of = counted(cast.args[0], self._calls)
        if of is cast.args[0]:
            return x
        made = replace(cast, args=(of, *cast.args[1:]), number=self._calls.count)
        self._calls.count += 1
        self._calls.note(made)
        return made

    def _resolved(self, value: Any, target: Any) -> Any:
        """Return a slice or a cast as a view, where it is no part of anything."""
        if is_named(value, "slice") and target not in OF_SLICES:
            return sliced(self._reader, *value.operands)
        return self._reader.cast(*value.operands) if is_named(value, "cast") and target not in OF_CASTS else value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return one number that a call holds, as a call that makes it."""
        constant = super().get_attr(target, args, kwargs)
        if not isinstance(constant, Tensor) or constant.numel() != 1 or not is_factory(constant):
            raise UnknownError("it holds a constant")
        if isinstance(constant, FakeTensor):
            raise UnknownError("it holds a constant that is not known")
        given = {"dtype": constant.dtype}
        call = self._calls.new(self._reader, torch.ops.aten.full.default, (list(constant.shape), constant.item()),
                               given, constant)  # fmt: skip
        self._calls.note(call)
        return call


def is_factory(example: Tensor) -> bool:
    """Say whether a tensor is of integers, or one number: others are computed once for all layers, outside."""
    if any(type(size) is not int for size in example.shape) or example.is_complex():
        return False
    return example.numel() == 1 or not (example.is_floating_point() or example.dtype == torch.bool)


def _is_usual(tensor: Tensor) -> bool:
    """Say whether a tensor has a type and a shape that a program can hold."""
    return tensor.numel() > 0 and not tensor.is_complex() and all(type(size) is int for size in tensor.shape)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Have torch not log, as an error with its traceback, what a call without memory raises."""
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    before, torchs.disabled = torchs.disabled, True
    try:
        yield
    finally:
        torchs.disabled = before


_PRODUCTS = (
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d", "conv3d", "convolution",
    "linear", "matmul", "mm", "mv",
)  # fmt: skip
"""Calls that take operands of one type. Of fake tensors, torch may take several, and torch 2.11 always does."""


def cast_by_autocast(node: fx.Node) -> str | None:
    """Return to which type autocast casts a call's operands, "" where to none, and None where that is not known.

    Its result says so: without autocast, it has another type, or the call fails.
    """
    wanted = node.meta["val"].dtype
    given = {each.meta["val"].dtype for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)}
    is_of_one_type = getattr(node.target, "_opname", "") in _PRODUCTS
    is_mixed = is_of_one_type and len({each for each in given if each.is_floating_point}) > 1

    def found(cast_to: torch.dtype | None) -> Any:
        def operand(part: Any) -> Any:
            example = part.meta.get("val") if isinstance(part, fx.Node) else part
            is_cast = cast_to is not None and isinstance(example, Tensor) and example.is_floating_point()
            return example.to(cast_to) if is_cast and isinstance(example, Tensor) else example

        args, kwargs = pytree.tree_map(operand, (node.args, node.kwargs), is_leaf=is_node)
        device = node.meta["val"].device.type
        with torch.autocast(device, enabled=False), torch.no_grad():
            return node.target(*args, **kwargs).dtype  # type: ignore[operator]

    for cast_to in (wanted,) if is_mixed else (None, wanted):
        with suppress(Exception), _unlogged():  # whatever torch says of operands of several types
            if found(cast_to) == wanted:
                return "" if cast_to is None else str(wanted).removeprefix("torch.")
    return None
