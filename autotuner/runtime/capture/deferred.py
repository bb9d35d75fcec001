"""Calls that no rule reads: values that become operators when a known operator reads them.

A deferred value is an ATen call of other values. What a rule reads as a part of something, an `Expression`, has its
call as well, so that it can be computed where the whole is not found.
"""

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotuner.ir.kinds import ELEMENT_BYTES, KINDS
from autotuner.runtime.capture.axes import UnknownError, extent, whole
from autotuner.runtime.capture.program import Expression, Operation, View, source_of
from autotuner.runtime.capture.reader import Reader, aten, learned

CASTS = frozenset((
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten._to_copy.default,
))  # fmt: skip
COPIES = frozenset((aten.contiguous.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default))
"""Calls that change no number of their first operand, nor the order of its dimensions."""
VIEWS = frozenset((
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.transpose.int, aten.swapaxes.default, aten.t.default,
    aten.numpy_T.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
    aten.unbind.int, *COPIES,
))  # fmt: skip
"""Calls that compute nothing: they are made again by each program that reads their result."""


@dataclass(eq=False, slots=True)
class Deferred:
    """An ATen call of values.

    Args:
        dtype: of its result as torch has it; "" where it has several results.
        place: of the node that asked for it.
        number: how many calls were read before it.
        made: whether it follows from what operators make.
        learned: whether a gradient may be wanted of what it follows from.
        cast_to: the type to which autocast casts its operands; "" for none.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: str
    place: int
    number: int
    made: bool
    learned: bool
    cast_to: str = ""

    @property
    def operands(self) -> Iterator[Any]:
        """The values that it reads, in order."""
        for each in pytree.tree_leaves((self.args, dict(self.kwargs)), is_leaf=is_value):
            if is_value(each):
                yield each

    @property
    def is_pointwise(self) -> bool:
        return self.target in CASTS or torch.Tag.pointwise in getattr(self.target, "tags", ())

    @property
    def is_view(self) -> bool:
        return self.target in VIEWS or self.target is operator.getitem

    @property
    def is_floating(self) -> bool:
        return self.dtype in ELEMENT_BYTES


def is_value(part: Any) -> bool:
    """Say whether a part of a call's arguments is a value."""
    return isinstance(part, View | Expression | Deferred)


def is_named(value: Any, name: str) -> bool:
    return isinstance(value, Expression) and value.name == name


@dataclass
class Calls:
    """The calls that are read so far, and who reads what.

    Attributes:
        of: the call that made a view or an expression.
        readers: the calls that read a value.
        refused: why no operator makes the result of a call.
        failed: ways to make an operator of a call that are not possible.
    """

    of: dict[View | Expression, Deferred] = field(default_factory=dict)
    readers: dict[Any, list[Deferred]] = field(default_factory=dict)
    refused: dict[Deferred, str] = field(default_factory=dict)
    failed: set[tuple[str, Deferred]] = field(default_factory=set)
    count: int = 0

    def call_of(self, value: Any) -> Deferred | None:
        """Return the call that a value is the result of; None for a tensor from outside."""
        return value if isinstance(value, Deferred) else self.of.get(value)

    def dtype_of(self, value: Any) -> str:
        """Return the type of a value; "" of several results. Places that a choice makes are integers."""
        if isinstance(value, View):
            return "int64" if value.tensor.places else value.dtype
        call = self.call_of(value)
        return "" if call is None else call.dtype

    def new(
        self, reader: Reader, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any,
        cast_to: str = "",
    ) -> Deferred:  # fmt: skip
        """Return a call of values; `result` is torch's example of what it makes."""
        shape, dtype = (tuple(result.shape), dtype_of(result)) if isinstance(result, Tensor) else ((), "")
        made = Deferred(target, args, kwargs, shape, dtype, reader.place, self.count, False, False, cast_to)
        for value in made.operands:
            made.made |= self.is_made(value)
            made.learned |= self.is_learned(value)
        self.count += 1
        return made

    def note(self, call: Deferred) -> None:
        """Note that a call is one of the program."""
        for value in call.operands:
            self.readers.setdefault(value, []).append(call)

    def is_made(self, value: Any) -> bool:
        """Say whether a value follows from what an operator makes; casts of what comes from outside are none."""
        if isinstance(value, View):
            return source_of(value.tensor).made_by is not None
        call = self.call_of(value)
        return call is not None and call.made

    def is_computed(self, value: Any) -> bool:
        """Say whether more than sums, scales and calls that no rule reads make a value of what comes from outside."""
        return any(isinstance(each, Operation) and not KINDS[each.kind].cheap for each in self._behind(value))

    def follows_from_parameters(self, value: Any) -> bool:
        """Say whether a value follows from parameters and numbers alone."""
        return all(isinstance(each, Operation) or each.tensor.parameter for each in self._behind(value))

    def _behind(self, value: Any) -> Iterator[View | Operation]:
        """Yield what a value follows from, the nearest first: operators, and views of tensors from outside."""
        waiting, seen = deque([value]), set[Any]()
        while waiting:  # each turn sees another value for the first time, or drops one
            value = waiting.popleft()
            if value in seen:
                continue
            seen.add(value)
            if not isinstance(value, View):
                call = self.call_of(value)
                waiting += [] if call is None else call.operands
            elif value.tensor.made_by is None:
                yield value
            elif value.tensor.made_by not in seen:
                seen.add(value.tensor.made_by)
                yield value.tensor.made_by
                waiting += [operand.view for operand in value.tensor.made_by.inputs]

    def is_learned(self, value: Any) -> bool:
        """Say whether a gradient may be wanted of a value; integers and booleans have none."""
        if isinstance(value, View):
            return learned(value)
        call = self.call_of(value)
        return call is not None and call.learned and (call.is_floating or not call.dtype)


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_example(value: Any, example: Any) -> None:
    """Check that a value has the shape and the type that torch gives it.

    Raises:
        UnknownError: it has not.
    """
    if isinstance(value, tuple):
        if not isinstance(example, tuple | list) or len(example) != len(value):
            raise UnknownError(f"it is read as {len(value)} values, and torch says otherwise")
        for each, of_torch in zip(value, example, strict=True):
            check_example(each, of_torch)
    elif isinstance(value, View | Deferred):
        shape = value.shape if isinstance(value, Deferred) else shape_of(value)
        if not isinstance(example, Tensor) or (shape, value.dtype) != (tuple(example.shape), dtype_of(example)):
            raise UnknownError(f"it is read as {value.dtype} {shape}, and torch says otherwise")


def shape_of(view: View) -> tuple[int, ...]:
    return tuple(extent(whole(dim)) for dim in view.dims)
