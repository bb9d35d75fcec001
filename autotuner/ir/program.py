"""Programs: short lists of ATen calls as text, which operators of the kinds `program` and `pointwise` compute.

Value `%0` is the first input; behind the inputs comes one value for each call, in order. This one is 2 * tanh(x / 2):

>>> text = '''{"calls": [["div.Tensor", ["%0", 2.0], {}], ["tanh.default", ["%1"], {}],
...                      ["mul.Tensor", ["%2", 2.0], {}]],
...            "inputs": [["float32", [], true]], "output": ["float32", []], "result": "%3", "saved": [0]}'''
>>> program = parse_program(text)
>>> program.calls[0].name, program.calls[0].reads, program.is_pointwise
('div.Tensor', (0,), True)

A call is a functional, deterministic overload of the namespace aten. Which there are, only torch knows:
`autotuner.kernels.torch.programs` checks that, and runs programs.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite, prod
from typing import Any

from autotuner.errors import GraphError
from autotuner.ir.records import ELEMENT_BYTES, canonical_json

CALLS_MAX = 512
TEXT_MAX = 2**18
"""Characters of a program."""
GETITEM = "getitem"
"""The one call that is none of aten's: it takes one of several results."""
SHAPE_MAX = 2**31 - 1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*")
_VALUE = re.compile(r"%(0|[1-9][0-9]*)")
_FLOATS = ("float:inf", "float:-inf", "float:nan")
_DTYPE = "dtype:"
_DTYPES = (*ELEMENT_BYTES, "bool", "uint8", "int8", "int16", "int32", "int64")
_NOT_GIVEN = ("device", "layout", "memory_format", "pin_memory", "generator", "out")
_KEYS = ("calls", "inputs", "output", "result", "saved")


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An input of a program: element type, shape, and whether a gradient of it is wanted."""

    dtype: str
    shape: tuple[int, ...]
    wanted: bool


@dataclass(frozen=True)
class ProgramCall:
    """A call of a program: overload, arguments and keywords, as the text has them."""

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Values that it reads, in order; one that is read twice occurs twice."""
        return tuple(value_number(each) for each in _leaves((self.arguments, self.keywords)) if is_value(each))


@dataclass(frozen=True)
class Program:
    """A list of ATen calls; its shapes are empty where it acts element by element, whatever the extents.

    Args:
        saved: inputs that the gradient reads.
    """

    inputs: tuple[ProgramInput, ...]
    calls: tuple[ProgramCall, ...]
    result: str
    output: tuple[str, tuple[int, ...]]
    saved: tuple[int, ...]

    @cached_property
    def text(self) -> str:
        """The canonical text: equal programs have equal texts."""
        return canonical_json(
            {
                "calls": [[call.name, list(call.arguments), dict(call.keywords)] for call in self.calls],
                "inputs": [[each.dtype, list(each.shape), each.wanted] for each in self.inputs],
                "output": [self.output[0], list(self.output[1])],
                "result": self.result,
                "saved": list(self.saved),
            }
        )

    @property
    def wanted(self) -> tuple[int, ...]:
        """Inputs whose gradient is wanted."""
        return tuple(number for number, each in enumerate(self.inputs) if each.wanted)

    @property
    def is_pointwise(self) -> bool:
        """True where it states no shapes, so that it acts element by element."""
        return not self.output[1] and not any(each.shape for each in self.inputs)

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """Floating-point types of its inputs, of its result, and of casts inside."""
        named = {each.removeprefix(_DTYPE) for call in self.calls
                 for each in _leaves((call.arguments, call.keywords)) if is_dtype(each)}  # fmt: skip
        return frozenset((named | {self.output[0]} | {each.dtype for each in self.inputs}) & set(ELEMENT_BYTES))

    @cached_property
    def largest(self) -> int:
        """Elements of its largest input, or of its result."""
        return max(prod(shape) for shape in (self.output[1], *(each.shape for each in self.inputs)))

    def readers(self, value: int) -> tuple[ProgramCall, ...]:
        """Return the calls that read a value."""
        return tuple(call for call in self.calls if value in call.reads)


def is_value(argument: Any) -> bool:
    """Tell whether an argument stands for a value of the program."""
    return isinstance(argument, str) and argument.startswith("%")


def value_number(argument: str) -> int:
    return int(argument[1:])


def is_dtype(argument: Any) -> bool:
    """Tell whether an argument stands for an element type."""
    return isinstance(argument, str) and argument.startswith(_DTYPE)


@lru_cache(maxsize=4096)
def parse_program(text: str) -> Program:
    """Read and check a program; its calls are not looked up.

    Raises:
        GraphError: it is no program; the message says what is wrong and what would be valid.
    """
    if len(text) > TEXT_MAX:
        raise GraphError(f"a program has {len(text)} characters; at most {TEXT_MAX} are possible")
    try:
        content = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GraphError(f"a program is JSON, and this one is not: {error}") from None
    if not isinstance(content, dict) or set(content) != set(_KEYS):
        given = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise GraphError(f"a program has the keys {', '.join(_KEYS)}, not {given}")
    inputs = tuple(_input(number, each) for number, each in enumerate(_list(content, "inputs")))
    if not inputs:
        raise GraphError("a program has one input at least; this one has none")
    calls = tuple(_call(number, each) for number, each in enumerate(_list(content, "calls")))
    if not 1 <= len(calls) <= CALLS_MAX:
        raise GraphError(f"a program has 1 to {CALLS_MAX} calls, not {len(calls)}")
    for number, call in enumerate(calls):
        for read in call.reads:
            if read >= len(inputs) + number:
                raise GraphError(
                    f"call {number} of a program, {call.name}, reads %{read}; it may read what comes before it, "
                    f"%0 to %{len(inputs) + number - 1}"
                )
    result, last = content["result"], len(inputs) + len(calls) - 1
    if not is_value(result) or not _VALUE.fullmatch(result) or not len(inputs) <= value_number(result) <= last:
        raise GraphError(f"the result of a program is one of its calls, %{len(inputs)} to %{last}, not {result!r}")
    saved = content["saved"]
    valid = range(len(inputs))
    if not isinstance(saved, list) or saved != sorted({each for each in saved if type(each) is int and each in valid}):
        raise GraphError(f"`saved` of a program lists inputs in order, of {list(valid)}, not {saved!r}")
    program = Program(inputs, calls, result, _output(content["output"]), tuple(saved))
    _check_shapes(program)
    return program


def _no_constant(name: str) -> float:
    raise ValueError(f'{name} is written as a text: "float:inf", "float:-inf" or "float:nan"')


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    found = content[key]
    if not isinstance(found, list):
        raise GraphError(f"`{key}` of a program is a list, not {found!r}")
    return found


def _typed(what: str, dtype: Any, shape: Any) -> tuple[str, tuple[int, ...]]:
    if dtype not in ELEMENT_BYTES:
        raise GraphError(f"{what} of a program has the dtype {dtype!r}; known: {', '.join(ELEMENT_BYTES)}")
    if not isinstance(shape, list) or not all(type(each) is int and 1 <= each <= SHAPE_MAX for each in shape):
        raise GraphError(f"{what} of a program has the shape {shape!r}; a shape is a list of integers above 0")
    return dtype, tuple(shape)


def _input(number: int, given: Any) -> ProgramInput:
    if not isinstance(given, list) or len(given) != 3 or not isinstance(given[2], bool):
        raise GraphError(
            f"input {number} of a program is {given!r}; write dtype, shape, and whether its gradient is wanted, as in "
            '["float32", [2, 16], true]'
        )
    return ProgramInput(*_typed(f"input {number}", *given[:2]), given[2])


def _output(given: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(given, list) or len(given) != 2:
        raise GraphError(f'the output of a program is {given!r}; write dtype and shape, as in ["float32", [2, 16]]')
    return _typed("the output", *given)


def _call(number: int, given: Any) -> ProgramCall:
    if (not isinstance(given, list) or len(given) != 3 or not isinstance(given[0], str)
            or not isinstance(given[1], list) or not isinstance(given[2], dict)):  # fmt: skip
        raise GraphError(
            f"call {number} of a program is {given!r}; write overload, arguments and keywords, as in "
            '["mul.Tensor", ["%0", 2.0], {}]'
        )
    name, arguments, keywords = given
    if name != GETITEM and not _NAME.fullmatch(name):
        raise GraphError(f"call {number} of a program is of {name!r}; write an overload of aten, such as mul.Tensor")
    for keyword in keywords:
        if keyword in _NOT_GIVEN:
            raise GraphError(
                f"call {number} of a program, {name}, has the keyword {keyword!r}: leave it out, since results follow "
                "from the inputs alone and lie where these do"
            )
    for each in _leaves((arguments, keywords)):
        _check_leaf(f"call {number} of a program, {name},", each)
    if name == GETITEM:
        one, place = (*arguments, None, None)[:2]
        if len(arguments) != 2 or keywords or not is_value(one) or type(place) is not int or place < 0:
            raise GraphError(f'call {number} of a program, getitem, takes a value and a place, as in ["%5", 0]')
    return ProgramCall(name, tuple(arguments), keywords)


def _check_leaf(where: str, each: Any) -> None:
    if isinstance(each, str):
        if is_value(each) and not _VALUE.fullmatch(each):
            raise GraphError(f"{where} reads {each!r}; write a value as %0, %1, ...")
        if is_dtype(each) and each.removeprefix(_DTYPE) not in _DTYPES:
            raise GraphError(f"{where} names {each!r}; known dtypes: {', '.join(_DTYPES)}")
        if each.startswith("float:") and each not in _FLOATS:
            raise GraphError(f"{where} names {each!r}; valid: {', '.join(_FLOATS)}")
    elif isinstance(each, float) and not isfinite(each):
        raise GraphError(f"{where} has a number that no double holds")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _check_shapes(program: Program) -> None:
    several = len({bool(shape) for shape in (program.output[1], *(each.shape for each in program.inputs))}) > 1
    if several and not program.output[1]:
        raise GraphError("a program that reads shapes makes one: its output has none; write [1] for one element")
