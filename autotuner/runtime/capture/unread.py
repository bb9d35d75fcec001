"""Operators in place of calls that no rule reads: an expression element by element, or a program.

Calls that nobody else reads are merged into the one that is asked for, so that a rotary embedding in eight calls is one
operator. A value that several read is made once; views, numbers and comparisons are made again by each reader.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autotuner.errors import AutotunerError
from autotuner.ir.kinds import KINDS
from autotuner.ir.programmed import CHOICE, PLACES
from autotuner.runtime.capture.axes import Axis, Dim, UnknownError, extent, fresh, whole
from autotuner.runtime.capture.choices import is_choice, places_of
from autotuner.runtime.capture.deferred import CASTS, COPIES, Calls, Deferred, is_named, shape_of
from autotuner.runtime.capture.equal_calls import GROUPED
from autotuner.runtime.capture.program import BoundView, Computed, Expression, TensorValue, View, fixed_of, source_of
from autotuner.runtime.capture.program_text import ProgramText, flop_of, written
from autotuner.runtime.capture.reader import RULES, Reader, as_numbers, has_parts, held, in_order, learned
from autotuner.runtime.capture.views import sliced
from autotuner.runtime.capture.written_out import rms_norm


class _NotByElement(Exception):
    """A cone of calls does not act element by element."""


class Unread:
    """Makes operators of deferred calls."""

    def __init__(self, reader: Reader, calls: Calls, is_read_elsewhere: Callable[[Any], bool]) -> None:
        """Begin.

        Args:
            is_read_elsewhere: says whether a value is read by others than the calls that are known so far.
        """
        self._reader, self._calls, self._is_read_elsewhere = reader, calls, is_read_elsewhere
        self._numbers: dict[TensorValue, TensorValue] = {}

    def view_of(self, value: Any) -> Any:
        """Return a view of a tensor in place of a value: of what an operator makes, which is appended.

        Raises:
            UnknownError: it is nothing that an operator makes.
        """
        if isinstance(value, View):
            return value
        call = self._calls.call_of(value)
        if call is None:
            raise UnknownError("it is no tensor that is known")
        if call in self._reader.results_of_calls:
            return self._reader.results_of_calls[call]
        if not call.is_floating:
            raise UnknownError(f"a tensor of {call.dtype or 'no type'} is no operand of an operator")
        if not call.made and not call.learned:
            raise UnknownError("it follows from constants alone")
        if call in self._calls.refused:
            raise UnknownError(self._calls.refused[call])
        try:
            return self._found(value, call)
        except UnknownError as error:
            self._calls.refused[call] = str(error)
            raise

    def _found(self, value: Any, call: Deferred) -> View:
        place, dtype = self._reader.place, self._reader.dtype
        self._reader.place, self._reader.dtype = call.place, call.dtype
        try:
            view = self._tried("named", call, lambda: self._named(value))
            view = view or self._tried("seen", call, lambda: self._seen(call))
            view = view or self._tried("pointwise", call, lambda: self._pointwise(call)) or self._program(call)
        finally:
            self._reader.place, self._reader.dtype = place, dtype
        if (shape_of(view), view.dtype) != (call.shape, call.dtype):
            raise UnknownError(f"it is read as {view.dtype} {shape_of(view)}, and torch says otherwise")
        self._reader.results_of_calls[call] = view
        return view

    def _places(self, call: Deferred) -> View:
        """Return a view of the places that a choice finds: numbers between operators, and integers inside of them."""
        if call not in self._reader.choices:
            places, place = places_of(call, self._calls), self._reader.place
            self._reader.place = call.place
            try:
                view = self._program(call, CHOICE)
            finally:
                self._reader.place = place
            view.tensor.places = places
            self._reader.choices[call] = view
        return self._reader.choices[call]

    def _named(self, value: Any) -> View | None:
        """Return what an expression is by itself, where a known operator computes it."""
        if is_named(value, "normalised"):
            return rms_norm(self._reader, value.operands[0], None, value.operands[1])
        if is_named(value, "cast") and isinstance(value.operands[0], View):
            return self._reader.cast(*value.operands)
        if is_named(value, "slice"):
            return self._or_none(lambda: sliced(self._reader, *value.operands))  # type: ignore[no-any-return]
        return None

    def _tried(self, how: str, call: Deferred, found: Callable[[], View | None]) -> View | None:
        """Return what is found in some way, or None; a way that failed once is not tried again."""
        if (how, call) in self._calls.failed:
            return None
        view: View | None = self._or_none(found)
        if view is None:
            self._calls.failed.add((how, call))
        return view

    def _or_none(self, found: Callable[[], Any]) -> Any:
        mark = self._reader.mark()
        try:
            return found()
        except UnknownError:
            self._reader.take_back(mark)
            return None

    def _seen(self, call: Deferred) -> View | None:
        """Return a view of what another call makes, where a rule knows that view."""
        base, *rest = call.args or (None,)
        if call.target in CASTS and isinstance(base, Deferred) and base.dtype == call.dtype:
            return self._or_none(lambda: self.view_of(base))  # type: ignore[no-any-return]
        if not call.is_view:
            return None
        of = self._calls.call_of(base)
        if of is None or isinstance(base, View):
            return None
        if not of.dtype:  # one of several results
            inner = self._seen_parts(of)
            return None if inner is None else self._or_none(lambda: self.resolved(inner[rest[0]]))
        if (of.is_view and not of.is_floating) or self._is_merged_copy(call, of):
            return None
        rule = RULES[call.target]

        def found() -> Any:
            return self.resolved(rule(self._reader, self.view_of(base), *rest, **call.kwargs))

        return self._or_none(found)  # type: ignore[no-any-return]

    def _is_merged_copy(self, call: Deferred, of: Deferred) -> bool:
        """Say whether a view merges dimensions of what a program makes, for nobody else: it can make them as they are
        merged, so that the positions of a window are one axis, and the features of a head whose pairs are turned."""
        is_alone = of not in self._reader.results_of_calls and len(self._calls.readers.get(of, ())) == 1
        kept = len(call.shape) - 1
        is_copy = of.is_view or (not of.is_pointwise and call.shape[:kept] == of.shape[:kept])
        if not (is_alone and is_copy and len(call.shape) < len(of.shape)):
            return False
        mark = self._reader.mark()
        is_seen = self._tried("seen", of, lambda: self._seen(of)) is not None
        self._reader.take_back(mark)
        return not is_seen

    def _seen_parts(self, call: Deferred) -> tuple[Any, ...] | None:
        rule = RULES.get(call.target) if call.is_view else None
        base, *rest = call.args
        if rule is None or isinstance(base, View) or self._calls.call_of(base) is None:
            return None
        made: tuple[Any, ...] | None = self._or_none(
            lambda: rule(self._reader, self.view_of(base), *rest, **call.kwargs)
        )
        return made

    def resolved(self, value: Any) -> View:
        """Return the view that a rule's result is."""
        if is_named(value, "slice"):
            return sliced(self._reader, *value.operands)
        if not isinstance(value, View):
            raise UnknownError("it is no view")
        return value

    # Cones of calls ---------------------------------------------------------------------------------------------------

    def _cone(self, sink: Deferred, by_element: bool) -> tuple[list[Deferred], dict[Any, View]]:
        """Return the calls that make a value, in order, and the views that they read, by the values in the calls.

        Raises:
            UnknownError: one reads what is no tensor that is known.
            _NotByElement: calls that act element by element were asked for, and one does not.
        """
        inside: dict[Deferred, bool] = {sink: True}  # whether nobody outside reads it
        views: dict[Any, View] = {}
        waiting = {sink}
        while waiting:  # each turn takes the last call that is left, so that all of its readers are known
            call = max(waiting, key=lambda each: each.number)
            waiting.remove(call)
            if by_element and call is not sink and not call.is_pointwise and call.target not in COPIES:
                raise _NotByElement
            for value in call.operands:
                of = self._calls.call_of(value)
                if value in views or (of is not None and of in inside):
                    continue
                owned = of is not None and self._is_owned(value, inside)
                if isinstance(value, View):
                    if of is None or not owned or sink.target is GROUPED or not self._is_inlined(value, of):
                        views[value] = value
                        continue
                elif of is None:
                    raise UnknownError(f"it reads what is no tensor that is known: {_said(value)}")
                elif of in self._reader.results_of_calls:
                    views[value] = self._reader.results_of_calls[of]
                    continue
                elif is_choice(of, self._calls):
                    views[value] = self._places(of)
                    continue
                elif self._is_apart(of, owned, sink) or (by_element and of.is_view and of.target not in COPIES):
                    seen = self._or_none(lambda value=value: self.view_of(value))  # type: ignore[misc]
                    if seen is not None:
                        views[value] = seen
                        continue
                    if by_element:
                        raise _NotByElement
                assert of is not None
                inside[of] = owned
                waiting.add(of)
        return sorted(inside, key=lambda each: each.number), views

    def _is_apart(self, call: Deferred, owned: bool, sink: Deferred) -> bool:
        """Say whether a call is made by an operator of its own: others read its result too, or it is a product, or what
        such a one reads, which no gradient should compute again."""
        is_cut = call.target is GROUPED or (sink.target is GROUPED and call.is_pointwise)
        return (not owned or is_cut) and call.is_floating and not call.is_view and call.learned

    def _is_owned(self, value: Any, inside: dict[Deferred, bool]) -> bool:
        """Say whether all that read a value are calls of a cone that nobody else reads."""
        of = self._calls.call_of(value)
        readers = [*self._calls.readers.get(value, ()), *(self._calls.readers.get(of, ()) if of is not value else ())]
        return all(inside.get(each, False) for each in readers) and not self._is_read_elsewhere(value)

    def _is_inlined(self, view: View, call: Deferred) -> bool:
        made = view.tensor.made_by
        return made is not None and KINDS[made.kind].inlined and call.is_pointwise and not view.fixed

    # Operators --------------------------------------------------------------------------------------------------------

    def _pointwise(self, sink: Deferred) -> View:
        """Append an operator that acts element by element, over the axes of its operands.

        Raises:
            UnknownError: the calls do not act so, or their operands are not over the same axes.
        """
        try:
            calls, seen = self._cone(sink, by_element=True)
        except _NotByElement:
            raise UnknownError("it does not act element by element") from None
        if not sink.is_pointwise:
            raise UnknownError("it does not act element by element")
        views = self._in_order(seen.values())
        x = next((view for view in views if shape_of(view) == sink.shape and _is_whole(view)), None)
        if x is None:
            raise UnknownError("no operand has all axes of the result")
        operands = []
        for view in views:
            if len(view.dims) > len(x.dims) or not whole(axis for dim in view.dims for axis in dim):
                raise UnknownError("an operand of one element")
            if view is x:
                operands.append(BoundView(x))
                continue
            own = set(held(view)) - set(fixed_of(view.fixed))
            if not own <= set(whole(axis for dim in view.dims for axis in dim)):
                raise UnknownError("a part of an operand")
            bound = self._reader.united(x.dims, self._as_number(view))
            if own and shape_of(view) == sink.shape and _is_whole(view):
                in_order(x, bound)
            operands.append(bound)
        text = ProgramText(calls, self._calls, "pointwise")
        for view in views:
            text.read(view, (), sink.dtype)
        return self._appended("pointwise", sink, text, seen, operands, list(_memory(x)), x.dims, calls)

    def _program(self, sink: Deferred, kind: str = "program") -> View:
        """Append an operator that runs calls on contiguous tensors."""
        calls, seen = self._cone(sink, by_element=False)
        views = self._in_order(seen.values())
        text, operands = ProgramText(calls, self._calls, kind), []
        tensors: dict[TensorValue, list[View]] = {}
        for view in views:
            tensors.setdefault(view.tensor, []).append(view)
        for tensor, parts in tensors.items():
            common = frozenset.intersection(*(frozenset(fixed_of(part.fixed).items()) for part in parts))
            if not has_parts(View(tensor, (), tuple(common))):
                common = frozenset()
            axes = [axis for axis in held(parts[0]) if axis not in dict(common)]
            if not axes:
                raise UnknownError("an operand of one element")
            whole_view = self._as_number(View(tensor, (tuple(axes),), tuple(common)))
            operands.append(BoundView(whole_view))
            text.read_parts(parts, axes, sink.dtype)
        if not operands:
            raise UnknownError("it follows from constants alone")
        dims = _labelled(sink.shape, views)
        if not whole(axis for dim in dims for axis in dim):
            raise UnknownError("its result is one element")
        order = _order_in_memory(dims, operands[0].view)
        axes = whole(axis for place in order for axis in dims[place])
        return self._appended(kind, sink, text, seen, operands, axes, dims, calls, order)

    def _appended(
        self, kind: str, sink: Deferred, text: ProgramText, seen: dict[Any, View], operands: Sequence[BoundView],
        axes: Sequence[Axis], dims: tuple[Dim, ...], calls: Sequence[Deferred], order: Sequence[int] = (),
    ) -> View:  # fmt: skip
        try:
            program = written(text.program(sink, seen, order), kind)
            flop = flop_of(program)
        except AutotunerError as error:
            raise UnknownError(str(error).partition("\n")[0]) from error
        dtype = PLACES if kind == CHOICE else sink.dtype
        made = self._reader.make(kind, operands, [axes], {"program": program}, dtype)
        operation = made[0].made_by
        assert operation is not None
        operation.flop, operation.places = flop, frozenset(each.place for each in calls)
        return View(made[0], dims)

    def _in_order(self, views: Iterable[View]) -> list[View]:
        """Return distinct views: first those of what flows through the program, and parameters and others behind.

        What comes from outside and has a gradient flows as well, so that the first layer is like those behind it.
        """
        distinct: list[View] = []
        for view in views:
            if not any(view is other for other in distinct):
                distinct.append(view)
        return sorted(distinct, key=lambda view: not self._is_flowing(view))

    def _is_flowing(self, view: View) -> bool:
        if view.tensor.places:
            return False
        source = source_of(view.tensor)
        return self._calls.is_made(view) or (source.made_by is None and not source.parameter and learned(view))

    def _as_number(self, view: View) -> View:
        """Return 0.0 and 1.0 in place of a boolean tensor from outside."""
        tensor = view.tensor
        if tensor.dtype != "bool":
            return view
        if tensor.computed is not None:
            raise UnknownError("a mask that is computed for attention")
        if tensor not in self._numbers:
            by = Computed(as_numbers, (tensor,), ())
            self._numbers[tensor] = TensorValue(tensor.dims, "bool", tensor.node, computed=by)
        return View(self._numbers[tensor], view.dims, view.fixed)


def _said(value: Any) -> str:
    return value.name if isinstance(value, Expression) else type(value).__name__


def _memory(view: View) -> list[Axis]:
    taken = fixed_of(view.fixed)
    return [axis for axis in held(view) if axis not in taken]


def _is_whole(view: View) -> bool:
    """Say whether a view has each of its axes in memory, and no others are there."""
    try:
        return set(whole(axis for dim in view.dims for axis in dim)) == set(_memory(view))
    except UnknownError:
        return False


def _order_in_memory(dims: Sequence[Dim], view: View) -> list[int]:
    """Return the order in which a program's result lies: as what it reads does, where that has the same axes.

    So queries whose heads are put before positions, and then turned, lie as those that nothing turns.
    """
    try:
        memory = _memory(view)
        runs = [whole(dim) for dim in dims]
    except UnknownError:
        return list(range(len(dims)))
    order = sorted((place for place, run in enumerate(runs) if run and run[0] in memory),
                   key=lambda place: memory.index(runs[place][0]))  # fmt: skip
    is_alike = len(order) == len(runs) and [axis for place in order for axis in runs[place]] == memory
    return order if is_alike else list(range(len(dims)))


def _labelled(shape: Sequence[int], views: Sequence[View]) -> tuple[Dim, ...]:
    """Return dimensions of a program's result: those of an operand at the same places, as far as extents are equal.

    Nothing depends on that, but letters are few, and what is added to the result later on is along the same axes.
    """
    taken: set[Axis] = set()
    dims: list[Dim] = []
    for place, elements in enumerate(shape):
        found: Dim | None = None
        for view in views:
            if len(view.dims) != len(shape):
                continue
            own = set(held(view))
            axes = whole(view.dims[place])
            if extent(axes) == elements and set(axes) <= own and taken.isdisjoint(axes):
                found = tuple(axes)
                break
        dims.append(found if found is not None else fresh([elements])[0])
        taken.update(dims[-1])
    return tuple(dims)
