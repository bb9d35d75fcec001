"""Scores of attention, as programs change them by element: scaled, capped by c tanh(x / c), added to, or hidden."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeGuard

from autotuner.ir.program import Program, ProgramCall, ProgramInput, parse_program


def soft_cap(cap: float, dtype: str) -> Program:
    """Return the program of a soft cap.

    >>> found = pieces_of(soft_cap(50.0, "float32"))
    >>> found.cap, found.factor, found.added
    (50.0, 1.0, ())
    """
    calls = (("div.Tensor", ("%0", cap)), ("tanh.default", ("%1",)), ("mul.Tensor", ("%2", cap)))
    return Program(
        (ProgramInput(dtype, (), True),),
        tuple(ProgramCall(name, arguments, {}) for name, arguments in calls),
        "%3",
        (dtype, ()),
        (0,),
    )


@dataclass(frozen=True, slots=True)
class Hidden:
    """An input that says which keys are hidden.

    Args:
        number: of the input.
        where_zero: they are where it is 0, and else where it is not.
        by_infinity: their scores become -inf, and else a number: then a query that sees no key weighs all alike.
    """

    number: int
    where_zero: bool
    by_infinity: bool = False


@dataclass(frozen=True, slots=True)
class Pieces:
    """Changes that a program makes to the scores of attention: a scale, a cap, and then sums, and keys that it hides.

    Args:
        factor: that its first input is multiplied with.
        cap: of the result, None where it has none.
        added: numbers of the inputs that are added behind that.
        hidden: inputs that say where the result is a large negative number.
    """

    factor: float
    cap: float | None
    added: tuple[int, ...]
    hidden: tuple[Hidden, ...] = ()


HIDES = -1e4
"""A score that is set to this, or to less, has no weight."""


def cap_of(text: str) -> float | None:
    """Return c of a program that is c tanh(x / c), and nothing else; None of any other."""
    found = pieces_of(parse_program(text))
    return None if found is None or found.added or found.hidden or found.factor != 1.0 else found.cap


def pieces_of(program: Program) -> Pieces | None:
    """Return what a program does to its first input, or None where that is something else.

    >>> text = '''{"calls": [["mul.Tensor", ["%0", 0.5], {}], ["add.Tensor", ["%2", "%1"], {}]],
    ...            "inputs": [["float32", [], true], ["float32", [], false]], "output": ["float32", []],
    ...            "result": "%3", "saved": []}'''
    >>> pieces_of(parse_program(text))
    Pieces(factor=0.5, cap=None, added=(1,), hidden=())
    """
    value, added, hidden = "%0", list[int](), list[Hidden]()
    says: dict[str, Hidden] = {}
    inputs = [f"%{place}" for place in range(1, len(program.inputs))]
    before = behind = 1.0
    has_cap = False
    for number, call in zip(count(len(program.inputs)), program.calls, strict=False):
        made = _said(call, inputs, says)
        if made is not None:
            says[f"%{number}"] = made
            continue
        beside = _beside(call, value)
        if call.name == "masked_fill.Scalar" and _hides(call, value, says):
            hidden.append(replace(says[call.arguments[1]], by_infinity=call.arguments[2] == "float:-inf"))
        elif call.name == "tanh.default" and beside == [] and not has_cap and not added + hidden:
            has_cap = True
        elif call.name in ("mul.Tensor", "div.Tensor") and _is_number(beside) and not added + hidden:
            (other,) = beside
            by = other if call.name == "mul.Tensor" else 1 / other
            before, behind = (before, behind * by) if has_cap else (before * by, behind)
        elif call.name == "add.Tensor" and beside and beside[0] in inputs:
            added.append(int(beside[0][1:]))
        else:
            return None
        value = f"%{number}"
    read = sorted((*added, *(each.number for each in hidden)))
    is_known = program.result == value and read == list(range(1, len(program.inputs)))
    if not is_known or len(program.dtypes) != 1 or (has_cap and behind <= 0):
        return None
    return Pieces(before * behind, behind if has_cap else None, tuple(added), tuple(hidden))


def _said(call: ProgramCall, inputs: list[str], says: Mapping[str, Hidden]) -> Hidden | None:
    """Return what a call says of keys, where it makes a condition of an input or turns one round."""
    first, *rest = call.arguments or (None,)
    if call.name in ("ne.Scalar", "eq.Scalar") and first in inputs and rest == [0] and not call.keywords:
        return Hidden(int(first[1:]), call.name == "eq.Scalar")
    if call.name in ("logical_not.default", "bitwise_not.default") and isinstance(first, str) and first in says:
        return Hidden(says[first].number, not says[first].where_zero)
    return None


def _hides(call: ProgramCall, value: str, says: Mapping[str, Hidden]) -> bool:
    """Say whether a call sets a value to a large negative number where a condition holds."""
    if call.keywords or len(call.arguments) != 3:
        return False
    scores, condition, filled = call.arguments
    is_low = filled == "float:-inf" or (type(filled) in (int, float) and filled <= HIDES)
    return scores == value and isinstance(condition, str) and condition in says and is_low


def _beside(call: ProgramCall, value: str) -> list[Any] | None:
    """Return what a call reads beside a value, at most one operand; None where it does not read the value so."""
    rest = [argument for argument in call.arguments if argument != value]
    is_divisor = call.name == "div.Tensor" and call.arguments[:1] != (value,)
    if call.keywords or len(rest) != len(call.arguments) - 1 or len(rest) > 1 or is_divisor:
        return None
    return rest


def _is_number(operands: list[Any] | None) -> TypeGuard[list[int | float]]:
    """Say whether there is one operand, a number other than 0."""
    return operands is not None and len(operands) == 1 and type(operands[0]) in (int, float) and operands[0] != 0
