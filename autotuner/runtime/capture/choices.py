"""Choices: places along an axis that calls find by comparing numbers, as a router finds the experts of each token.

A choice is made once in a step, by an operator of its own, and read as places by whatever depends on it, gradients
among it. So no two kernels can decide a near tie in two ways, and what reads a choice is verified for given places. The
order of what has been chosen, as tokens are sorted by expert, is made once as well: a sort takes many kernels.
"""

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.programmed import PLACES_MAX
from autotuner.runtime.capture.axes import UnknownError
from autotuner.runtime.capture.deferred import Calls, Deferred, shape_of
from autotuner.runtime.capture.program import View
from autotuner.runtime.capture.reader import Reader, aten

_BOTH = frozenset((aten.topk.default, aten.sort.stable, aten.max.dim, aten.min.dim))
"""Calls that return values, and the places where these were found."""
_TAKEN = frozenset((aten.topk.default, aten.sort.stable))
_PLACES = frozenset((aten.argmax.default, aten.argmin.default, aten.argsort.stable))
_ORDERS = frozenset((aten.sort.stable, aten.argsort.stable))


def is_choice(call: Deferred, calls: Calls) -> bool:
    """Say whether a call's result are places that it has found by comparing floating-point numbers, or the order of a
    row of integers that follow from such."""
    by = _by(call)
    if by is None:
        return False
    (row, *_), shape = by.args, call.shape
    if calls.dtype_of(row) in ELEMENT_BYTES:
        return True
    if by.target not in _ORDERS or not calls.is_made(row) or not shape:
        return False
    count: int = shape[_argument(by, "dim")]
    return prod(shape) == count <= PLACES_MAX


def places_of(call: Deferred, calls: Calls) -> int:
    """Return how many places there are to choose from.

    Raises:
        UnknownError: there are more than a number between operators can tell apart.
    """
    by = _by(call)
    assert by is not None
    shape, dim = _shape(by.args[0], calls), _argument(by, "dim")
    count = prod(shape) if dim is None else shape[dim]
    if count > PLACES_MAX:
        raise UnknownError(f"a choice of {count} places: {PLACES_MAX} are possible")
    return count


def values_chosen(reader: Reader, calls: Calls, call: Deferred, places: Deferred, example: Any) -> Deferred | None:
    """Return the calls that take the values at the places that a call has found, so that all depends on the places.

    Args:
        call: one that returns values and places.
        example: torch's example of the values.

    Returns:
        None where it is no such call, or one that finds a largest number, which most read without its place.
    """
    if call.target not in _TAKEN or not is_choice(places, calls):
        return None
    made = calls.new(reader, aten.gather.default, (call.args[0], _argument(call, "dim"), places), {}, example)
    calls.note(made)
    return made


def _by(call: Deferred) -> Deferred | None:
    """Return the call that finds the places that another one returns, or None where it returns no places."""
    if call.target in _PLACES:
        return call
    by = call.args[0] if call.target is operator.getitem and call.args[1] == 1 else None
    return by if isinstance(by, Deferred) and by.target in _BOTH else None


def _argument(call: Deferred, name: str) -> Any:
    """Return an argument of a call, or what it is by default."""
    for place, each in enumerate(call.target._schema.arguments):
        if each.name == name:
            return call.kwargs.get(name, call.args[place] if place < len(call.args) else each.default_value)
    raise AssertionError(name)


def _shape(value: Any, calls: Calls) -> Sequence[int]:
    if isinstance(value, View):
        return shape_of(value)
    call = calls.call_of(value)
    assert call is not None
    return call.shape


def counted(x: Any, calls: Calls) -> Any:
    """Return what numbers are sorted from, or themselves: whoever only counts numbers needs no order."""
    call = calls.call_of(x)
    if call is None or call.target is not operator.getitem or call.args[1] != 0:
        return x
    (of, _) = call.args
    return of.args[0] if isinstance(of, Deferred) and of.target is aten.sort.stable else x
