"""The making of operators: what rules of ATen calls share."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature, signature
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, fx

from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.programmed import CHOICE, WITH_SHAPES
from autotuner.ir.records import Scalar
from autotuner.runtime.capture.axes import Axes, Axis, Dim, UnknownError, whole
from autotuner.runtime.capture.known_masks import KnownMasks
from autotuner.runtime.capture.program import BoundView, Operation, TensorValue, View, source_of, taken_by, taken_of

aten: Any = torch.ops.aten

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register the rule of ATen operators."""

    def registered(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return registered


def fits(function: Rule, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Say whether a call's arguments are those that a rule is for, by the types in its signature."""
    signature, hints = _signature_of(function)
    try:
        bound = signature.bind(*args, **named)
    except TypeError:  # more arguments than the rule knows
        return False
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY) and not _is_a(value, hints.get(name, Any)):
            return False
    return True


@cache
def _signature_of(function: Rule) -> tuple[Signature, dict[str, Any]]:
    return signature(function), get_type_hints(function)


def _is_a(value: Any, hint: Any) -> bool:
    """Say whether a value has a type that rules write: a class, a union of some, or a sequence."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, each) for each in get_args(hint))
    if origin is Sequence:
        (of,) = get_args(hint)
        return isinstance(value, list | tuple) and all(_is_a(each, of) for each in value)
    if hint is float:
        return isinstance(value, int | float)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


class Reader:
    """Makes operators; what one node of the program asked for can be taken back.

    Attributes:
        place: of the node for which operators are made.
        place_read: of the node that is read, whose operands may be made late, for an earlier place.
        dtype: of the result of the ATen call that is read, as torch has it, autocast and promotion included.
        results_of_calls: views of what operators make in place of calls that no rule reads, by the call.
        choices: the same of choices, whose results are integers for all but programs.
        numbers_of: views of bounds of packed tokens as numbers, by the node that computes the bounds.
        masks: what is known of masks.
    """

    def __init__(self, masks: KnownMasks) -> None:
        """Begin a program; `masks`: what is known of masks."""
        self.axes = Axes()
        self.operations: list[Operation] = []
        self.place = self.place_read = 0
        self.dtype = ""
        self.results_of_calls: dict[Any, View] = {}
        self.choices: dict[Any, View] = {}
        self.numbers_of: dict[fx.Node, View] = {}
        self.masks = masks

    def mark(self) -> tuple[int, int, int, int]:
        """Return how much is known, for `take_back`."""
        return self.axes.mark(), len(self.operations), len(self.results_of_calls), len(self.choices)

    def take_back(self, mark: tuple[int, int, int, int]) -> None:
        """Forget what was read since a mark."""
        axes, operations, results, choices = mark
        self.axes.take_back(axes)
        del self.operations[operations:]
        for known, count in ((self.results_of_calls, results), (self.choices, choices)):
            for call in list(known)[count:]:
                del known[call]

    def make(
        self,
        kind: str,
        inputs: Sequence[View | BoundView],
        made: Sequence[Sequence[Axis]],
        attributes: dict[str, Scalar | Axis] | None = None,
        dtype: str = "",
    ) -> tuple[TensorValue, ...]:
        """Append an operator, and return what it makes: `made` has the axes of each output, as in its memory."""
        operands = tuple(each if isinstance(each, BoundView) else BoundView(each) for each in inputs)
        for operand in operands:
            if not has_parts(operand.view):
                raise UnknownError("a part is taken of what a program makes")
            axes = held(operand.view)
            if len(set(axes)) < len(axes):  # as where a matrix is added to its transpose
                raise UnknownError("a tensor that has one axis twice")
        dims = [tuple((axis,) for axis in axes) for axes in made]
        outputs = tuple(TensorValue(each, dtype or operands[0].view.dtype) for each in dims)
        operation = Operation(kind, operands, outputs, attributes or {}, self.place)
        for tensor in outputs:
            tensor.made_by = operation
            if kind not in ("cast", "program", CHOICE):  # the axes of a parameter stay as free as they are
                self.axes.bind(tensor.dims)
        self.operations.append(operation)
        return outputs

    def mapped(self, kind: str, x: View, *others: View | BoundView, **attributes: Scalar | Axis) -> View:
        """Append an operator that makes one element of each of x's, and return a view like x of what it makes."""
        (made,) = self.make(kind, (x, *others), [memory(x)], attributes)
        return View(made, x.dims)

    def cast(self, x: View, dtype: str) -> View:
        """Append a cast to a type, or return the view itself if it has that type.

        Raises:
            UnknownError: it is no tensor of numbers.
        """
        if x.dtype == dtype:
            return x
        if not {x.dtype, dtype} <= ELEMENT_BYTES.keys():
            raise UnknownError(f"a cast from {x.dtype} to {dtype}")
        taken = {axis for axis, _ in x.fixed for axis in whole([axis])}
        (made,) = self.make("cast", (x,), [[axis for axis in held(x) if axis not in taken]], {"dtype": dtype}, dtype)
        return View(made, x.dims)

    def typed(self, x: View) -> View:
        """Return an operand in the type of the call's result: what autocast and promotion make of it."""
        return self.cast(x, self.dtype) if self.dtype else x

    def united(self, dims: Sequence[Dim], view: View) -> BoundView:
        """Return a view as an operand that lies along the last of these dimensions; what it repeats is left out."""
        renamed: list[tuple[Axis, Axis]] = []
        own_axes = set(held(view))
        for mine, other in zip(reversed(dims), reversed(view.dims), strict=False):
            own = whole(other)
            if own and not set(own) & own_axes:
                continue  # repeated along this dimension
            if own:
                renamed += self.axes.unite(mine, other)
        return BoundView(view, tuple(renamed))


def has_parts(view: View) -> bool:
    """Say whether operators can make the part of a tensor that a view shows, without the rest: no program can, and none
    reads a single element."""
    waiting = [taken_by(view)]
    seen = set(waiting)
    while waiting:  # each turn takes one of the tensors, at one of its places
        tensor, taken = waiting.pop()
        if taken and len(taken) == len(whole(axis for dim in tensor.dims for axis in dim)):
            return False  # one element is no operand
        if not taken or tensor.made_by is None:
            continue
        if tensor.made_by.kind in WITH_SHAPES:
            return False
        read = {(operand.view.tensor, taken_of(operand, dict(taken))) for operand in tensor.made_by.inputs}
        waiting += read - seen
        seen |= read
    return True


def memory(view: View) -> list[Axis]:
    """Return the axes of a view in the order of its memory.

    Raises:
        UnknownError: the view repeats some.
    """
    taken = {axis for axis, _ in view.fixed for axis in whole([axis])}
    axes = [axis for axis in held(view) if axis not in taken]
    if set(whole(axis for dim in view.dims for axis in dim)) != set(axes):
        raise UnknownError("an operand that is repeated")
    return axes


def in_order(x: View, other: BoundView) -> None:
    """Check that two operands of an element-wise operator have their axes in one order of memory.

    Raises:
        UnknownError: they have not.
    """
    pairs = [(whole([a]), whole([b])) for a, b in other.renamed]
    if any(len(mine) != len(theirs) for mine, theirs in pairs):
        raise UnknownError("two dimensions that are split in different ways")
    renaming = {one: to for mine, theirs in pairs for one, to in zip(mine, theirs, strict=True)}
    if [renaming.get(axis, axis) for axis in memory(other.view)] != memory(x):
        raise UnknownError("operands whose memory is in different orders")


def held(view: View) -> list[Axis]:
    """Return the axes that a view's tensor has."""
    return whole(axis for dim in view.tensor.dims for axis in dim)


def plain(value: Any, what: str) -> View:
    """Return a value that is a view.

    Raises:
        UnknownError: it is none.
    """
    if not isinstance(value, View):
        raise UnknownError(f"{what} is a {type(value).__name__}, no tensor that is known")
    return value


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 where a boolean tensor is true, and 0 elsewhere: so programs read one that comes from outside."""
    return mask.to(dtype)


def learned(view: View) -> bool:
    """Say whether a gradient may be wanted of a tensor."""
    if view.tensor.places:
        return False
    node = source_of(view.tensor).node
    return node is None or bool(node.meta["example_value"].requires_grad)
