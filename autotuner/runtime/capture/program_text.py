"""The text of a program: calls of values, numbered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isinf, isnan
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotuner.ir.program import GETITEM, Program, ProgramCall, ProgramInput, parse_program
from autotuner.ir.programmed import CHOICE, PLACES, WITH_SHAPES
from autotuner.kernels.torch.programs import check_calls, differentiated, function_of
from autotuner.runtime.capture.axes import Axis, UnknownError, extent, whole
from autotuner.runtime.capture.calls import flop_counter
from autotuner.runtime.capture.deferred import CASTS, COPIES, Calls, Deferred, is_value, shape_of
from autotuner.runtime.capture.program import View, fixed_of
from autotuner.runtime.capture.reader import learned

_DROPPED = ("device", "layout", "memory_format", "pin_memory", "non_blocking", "copy", "implicit", "generator")
"""Keywords of which no result depends in numbers."""


@dataclass(frozen=True)
class _Value:
    """A value of a program that is written: an input, or a call."""

    of_input: bool
    number: int


class ProgramText:
    """Writes a program; inputs come first."""

    def __init__(self, calls: Sequence[Deferred], known: Calls, kind: str) -> None:
        self._members, self._known, self._kind = calls, known, kind
        self._inputs: list[ProgramInput] = []
        self._calls: list[tuple[str, list[Any], dict[str, Any]]] = []
        self._views: dict[View, _Value] = {}
        self._made: dict[Deferred, _Value] = {}
        self._cast: dict[tuple[_Value, str], _Value] = {}

    def read(self, view: View, shape: Sequence[int], dtype: str) -> _Value:
        """Add an input; one that is boolean comes as numbers of a type, and places come as numbers."""
        is_bool, places = view.dtype == "bool", view.tensor.places
        wanted = not is_bool and self._kind != CHOICE and learned(view)
        self._inputs.append(ProgramInput(dtype if is_bool else view.dtype, tuple(shape), wanted))
        value = _Value(True, len(self._inputs) - 1)
        if is_bool:
            value = self._call("ne.Scalar", [value, 0], {})
        elif places:  # clamped: the text says what they may be, and whatever is given, they are in bounds
            value = self._call("_to_copy.default", [value], {"dtype": "dtype:int64"})
            value = self._call("clamp.default", [value, 0, places - 1], {})
        self._views[view] = value
        return value

    def read_parts(self, views: Sequence[View], axes: Sequence[Axis], dtype: str) -> None:
        """Add a tensor in the order of its memory as an input, and what makes views of it.

        Args:
            views: what the program reads of the tensor.
            axes: those of the tensor, without those that all views take at one place.
        """
        as_it_is = [view for view in views if _flat(view) == list(axes)]
        value = self.read(as_it_is[0], shape := shape_of(as_it_is[0]), dtype) if as_it_is else None
        if value is None:
            shape = tuple(extent(run) for run in _runs(views[0], axes))
            value = self.read(View(views[0].tensor, views[0].dims, views[0].fixed), shape, dtype)
        for view in views:
            if view not in self._views:
                self._views[view] = self._seen(view, value, shape, axes)

    def _seen(self, view: View, value: _Value, shape: Sequence[int], axes: Sequence[Axis]) -> _Value:
        """Write the view of an input that has some shape, and these axes in memory."""
        fixed = {axis: place for axis, place in fixed_of(view.fixed).items() if axis in set(axes)}
        runs = _runs(view, axes)
        sizes = [extent(run) for run in runs]

        def call(name: str, made: Sequence[int], *arguments: Any) -> None:
            nonlocal value, shape
            value, shape = self._call(name, [value, *arguments], {}), list(made)

        if list(shape) != sizes:
            call("reshape.default", sizes, sizes)
        for place in reversed(range(len(runs))):
            if runs[place][0] in fixed:
                sizes = sizes[:place] + sizes[place + 1 :]
                call("select.int", sizes, place, fixed[runs[place][0]])
        left = [run for run in runs if run[0] not in fixed]
        first = {run[0]: place for place, run in enumerate(left)}
        flat = whole(axis for dim in view.dims for axis in dim)
        order = [first[axis] for axis in flat if axis in first]
        if order != sorted(order):
            sizes = [sizes[place] for place in order]
            call("permute.default", sizes, order)
        own = {axis for run in left for axis in run}
        if any(axis not in own for axis in flat):
            items = [(axis.extent if axis not in own else extent(left[first[axis]]), axis in own)
                     for axis in flat if axis in first or axis not in own]  # fmt: skip
            ones = [elements if is_own else 1 for elements, is_own in items]
            sizes = [elements for elements, _ in items]
            if ones != list(shape):
                call("reshape.default", ones, ones)
            call("expand.default", sizes, sizes)
        if list(shape) != list(shape_of(view)):
            call("reshape.default", shape_of(view), list(shape_of(view)))
        return value

    def program(self, sink: Deferred, seen: Mapping[Any, View], order: Sequence[int] = ()) -> Program:
        """Return the program whose result is a call's, its dimensions in some order; its inputs are written."""
        for call in self._members:
            self._made[call] = self._written(call, seen)
        result = self._made[sink]
        if result.of_input:  # a cast that changes nothing, or the like
            result = self._call("clone.default", [result], {})
        if self._kind == CHOICE:
            result = self._call("_to_copy.default", [result], {"dtype": f"dtype:{PLACES}"})
        shape = sink.shape if self._kind in WITH_SHAPES else ()
        if list(order) != sorted(order):
            result, shape = (
                self._call("permute.default", [result, list(order)], {}),
                tuple(shape[each] for each in order),
            )
        calls = tuple(
            ProgramCall(name, tuple(self._named(each) for each in arguments),
                        {key: self._named(each) for key, each in keywords.items()})
            for name, arguments, keywords in self._calls
        )  # fmt: skip
        dtype = PLACES if self._kind == CHOICE else sink.dtype
        return Program(tuple(self._inputs), calls, self._named(result), (dtype, shape), ())

    def _named(self, part: Any) -> Any:
        if isinstance(part, _Value):
            return f"%{part.number + (0 if part.of_input else len(self._inputs))}"
        return [self._named(each) for each in part] if isinstance(part, list) else part

    def _call(self, name: str, arguments: list[Any], keywords: dict[str, Any]) -> _Value:
        self._calls.append((name, arguments, keywords))
        return _Value(False, len(self._calls) - 1)

    def _written(self, call: Deferred, seen: Mapping[Any, View]) -> _Value:
        if call.target in COPIES:
            return self._part(call.args[0], call, seen)  # type: ignore[no-any-return]
        if call.target in CASTS:
            return self._to(self._part(call.args[0], call, seen), self._known.dtype_of(call.args[0]), call.dtype)
        arguments = [self._part(each, call, seen) for each in call.args]
        if isinstance(call.target, torch._ops.OpOverload):
            name = str(call.target).removeprefix("aten.")
            name = "reshape.default" if name in ("view.default", "_unsafe_view.default") else name
            keywords = {key: self._part(each, call, seen) for key, each in call.kwargs.items() if key not in _DROPPED}
            return self._call(name, arguments, {key: each for key, each in keywords.items() if each is not None})
        return self._call(GETITEM, arguments, {})

    def _to(self, value: _Value, dtype: str, wanted: str) -> _Value:
        if dtype == wanted:
            return value
        if (value, wanted) not in self._cast:
            self._cast[value, wanted] = self._call("_to_copy.default", [value], {"dtype": f"dtype:{wanted}"})
        return self._cast[value, wanted]

    def _part(self, part: Any, call: Deferred, seen: Mapping[Any, View]) -> Any:
        if is_value(part):
            value = self._views[seen[part]] if part in seen else self._made[_known(self._known.call_of(part))]
            dtype = self._known.dtype_of(part)
            is_cast = call.cast_to and dtype not in ("", "bool", call.cast_to) and not dtype.startswith(("int", "uint"))
            return self._to(value, dtype, call.cast_to) if is_cast else value
        if isinstance(part, list | tuple):
            return [self._part(each, call, seen) for each in part]
        if isinstance(part, torch.dtype):
            return f"dtype:{str(part).removeprefix('torch.')}"
        if isinstance(part, float) and (isnan(part) or isinf(part)):
            return "float:nan" if isnan(part) else "float:inf" if part > 0 else "float:-inf"
        if part is None or isinstance(part, bool | int | float):
            return part
        if isinstance(part, str) and not part.startswith(("%", "dtype:", "float:")):
            return part
        raise UnknownError(f"{call.target} of a {type(part).__name__}")


def _known(call: Deferred | None) -> Deferred:
    assert call is not None
    return call


def _flat(view: View) -> list[Axis]:
    """Return the axes of a view in order, or nothing that a tensor has where it takes one place of some."""
    return whole(axis for dim in view.dims for axis in dim)


def _runs(view: View, axes: Sequence[Axis]) -> list[list[Axis]]:
    """Return axes of memory in runs that follow each other in a view too, so that a permutation moves runs.

    Runs do not depend on how far axes were split when a view is read.
    """
    behind = dict(zip(_flat(view), _flat(view)[1:], strict=False))
    fixed = fixed_of(view.fixed)
    runs: list[list[Axis]] = []
    for axis in axes:
        if runs and axis not in fixed and behind.get(runs[-1][-1]) is axis:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


@lru_cache(maxsize=4096)
def _written(text: str, kind: str) -> str:
    program = parse_program(text)
    check_calls(program, kind)
    return differentiated(program).text


def written(program: Program, kind: str) -> str:
    """Return a program's text, with the inputs that its gradient reads.

    Raises:
        GraphError: it makes calls that are not possible, or not what it says.
    """
    return _written(program.text, kind)


@lru_cache(maxsize=4096)
def flop_of(text: str) -> int:
    """Return the floating-point operations of a program's matrix products, as torch counts them."""
    program = parse_program(text)
    if program.is_pointwise:
        return 0
    with FakeTensorMode(), flop_counter() as counter, torch.no_grad():
        function_of(program)(*(torch.empty(each.shape, dtype=getattr(torch, each.dtype)) for each in program.inputs))
    return int(counter.get_total_flops())
