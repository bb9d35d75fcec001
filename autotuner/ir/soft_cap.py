"""Soft caps: c tanh(x / c), as a program that acts element by element, and found in one."""

from dataclasses import dataclass
from itertools import count
from typing import Any

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
class Pieces:
    """What a program does to the scores of attention: scaled, capped, and then added to.

    Args:
        factor: that its first input is multiplied with.
        cap: of the result, None where it has none.
        added: numbers of the inputs that are added behind that.
    """

    factor: float
    cap: float | None
    added: tuple[int, ...]


def cap_of(text: str) -> float | None:
    """Return c of a program that is c tanh(x / c), and nothing else; None of any other."""
    found = pieces_of(parse_program(text))
    return None if found is None or found.added or found.factor != 1.0 else found.cap


def pieces_of(program: Program) -> Pieces | None:
    """Return what a program does to its first input, or None where that is something else.

    >>> text = '''{"calls": [["mul.Tensor", ["%0", 0.5], {}], ["add.Tensor", ["%2", "%1"], {}]],
    ...            "inputs": [["float32", [], true], ["float32", [], false]], "output": ["float32", []],
    ...            "result": "%3", "saved": []}'''
    >>> pieces_of(parse_program(text))
    Pieces(factor=0.5, cap=None, added=(1,))
    """
    value, added = "%0", []
    before = behind = 1.0
    has_cap = False
    for number, call in zip(count(len(program.inputs)), program.calls, strict=False):
        other = _other(call, value)
        if call.name == "tanh.default" and other is None and not has_cap and not added:
            has_cap = True
        elif call.name in ("mul.Tensor", "div.Tensor") and type(other) in (int, float) and other and not added:
            by = other if call.name == "mul.Tensor" else 1 / other
            before, behind = (before, behind * by) if has_cap else (before * by, behind)
        elif call.name == "add.Tensor" and other in (f"%{place}" for place in range(1, len(program.inputs))):
            added.append(int(other[1:]))
        else:
            return None
        value = f"%{number}"
    is_known = program.result == value and sorted(added) == list(range(1, len(program.inputs)))
    if not is_known or len(program.dtypes) != 1 or (has_cap and behind <= 0):
        return None
    return Pieces(before * behind, behind if has_cap else None, tuple(added))


def _other(call: ProgramCall, value: str) -> Any:
    """Return the operand of a call beside a value: None where it has that alone, "" where it is no such call."""
    if call.keywords or call.reads.count(int(value[1:])) != 1:
        return ""
    rest = [argument for argument in call.arguments if argument != value]
    if len(rest) == len(call.arguments) or len(rest) > 1 or (call.name == "div.Tensor" and call.arguments[0] != value):
        return ""
    return rest[0] if rest else None
