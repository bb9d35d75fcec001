"""Operators that compute a program, or its gradient: what their text says of their operands, and checks of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import cast

from autotuner.errors import GraphError
from autotuner.ir.graph import Operator
from autotuner.ir.program import Program, parse_program
from autotuner.ir.records import Attributes

Typed = tuple[str, tuple[int, ...]]
"""Element type and shape of an operand."""

GRADIENTS = {"program": "program_grad", "pointwise": "pointwise_grad"}
CHOICE = "choice"
"""Kind of a program that makes a choice: its result are places along an axis, as numbers, and have no gradient."""
WITH_SHAPES = ("program", "program_grad", CHOICE)
"""Kinds whose programs state shapes."""
POINTWISE = ("pointwise", "pointwise_grad", "pointwise_sum")
PROGRAMMED = (*WITH_SHAPES, *POINTWISE)
"""Kinds whose operators carry a program."""
PLACES = "float32"
"""Type of places between operators: it holds all integers up to `PLACES_MAX`."""
PLACES_MAX = 2**24


@dataclass(frozen=True)
class Programmed:
    """The use that an operator makes of its program.

    Args:
        wrt: inputs of the program whose gradients it makes; () where it computes the program itself.
        reads, makes: its operands, as the text has them. A gradient reads the result's gradient, then what is saved.
    """

    program: Program
    wrt: tuple[int, ...]
    reads: tuple[Typed, ...]
    makes: tuple[Typed, ...]

    @property
    def steps(self) -> int:
        """Calls that it makes; a gradient makes those of the program again, and about as many of its own."""
        return len(self.program.calls) * (2 if self.wrt else 1)


def programmed(kind: str, attributes: Attributes) -> Programmed:
    """Return what an operator of one of these kinds does.

    Raises:
        GraphError: its text is no program, or one that does not fit the kind.
    """
    known = dict(attributes)
    program = parse_program(str(known["program"]))
    inputs = [(each.dtype, each.shape) for each in program.inputs]
    if kind in POINTWISE and not program.is_pointwise:
        raise GraphError(f"a {kind} acts element by element, so the inputs and the output of its program have the "
                         "shape []")  # fmt: skip
    if kind == CHOICE and program.wanted:
        raise GraphError(f"a choice has no gradient: its program wants none, not of input {program.wanted[0]}")
    if kind == CHOICE and program.output[0] != PLACES:
        raise GraphError(f"a choice makes places, as numbers in {PLACES}, not in {program.output[0]}")
    if kind in (*GRADIENTS, CHOICE):
        return Programmed(program, (), tuple(inputs), (program.output,))
    wrt = program.wanted if kind == "program_grad" else (cast(int, known["wrt"]),)
    if any(place not in program.wanted for place in wrt):
        raise GraphError(f"wrt is one of the inputs whose gradient the program wants, {list(program.wanted)}, "
                         f"not {wrt[0]}")  # fmt: skip
    reads = (program.output, *(inputs[place] for place in program.saved))
    return Programmed(program, wrt, reads, tuple(inputs[place] for place in wrt))


FLAG = (0.0, 1.0)
"""Ends of what stands for true or false."""
_POSITIVE = (0.5, 1.5)
_MOVES = [
    "_to_copy",
    "alias",
    "clone",
    "expand",
    "permute",
    "reshape",
    "select",
    "slice",
    "squeeze",
    "t",
    "transpose",
    "unsqueeze",
    "view",
]
_TESTED = ("ne.Scalar", "eq.Scalar")
_POSITIVE_IN = ["log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt", "sqrt", "xlogy"]


def ranges(found: Programmed) -> dict[int, tuple[float, float]]:
    """Return ends of the values that make sense for operands read, by place; other values may be anything.

    Those of a logarithm, a root, a power or a divisor are above 0; what is compared with 0 stands for true or false;
    what is made an integer and clamped stands for places between these ends.
    """
    program, inputs = found.program, range(len(found.program.inputs))
    stands = {value: value for value in inputs}
    known: dict[int, tuple[float, float]] = {}
    integers: set[int] = set()
    for value, call in enumerate(program.calls, start=len(inputs)):
        name, reads = call.name.partition(".")[0], [stands.get(each) for each in call.reads]
        if name in _MOVES and reads[:1] != [None]:
            stands[value] = cast(int, reads[0])
        divisor = reads[1:2] if name == "div" else reads[:1] if name in _POSITIVE_IN else []
        known |= {each: _POSITIVE for each in divisor if each is not None}
        if call.name in _TESTED and call.arguments[1] == 0:
            known |= {each: FLAG for each in reads if each is not None}
        if call.name == "_to_copy.default" and "int" in str(call.keywords.get("dtype")):
            integers.add(value)
        ends = call.arguments[1:]
        if call.name == "clamp.default" and integers.issuperset(call.reads) and [*map(type, ends)] == [int, int]:
            known |= {each: (ends[0], ends[1] + 1.0) for each in reads if each is not None}
    if not found.wrt:
        return known
    return {place: known[number] for place, number in enumerate(program.saved, start=1) if number in known}


def of_operator(operator: Operator) -> Programmed:
    """Return what an operator does with its program.

    Raises:
        GraphError: its text is no program, or does not fit its spec; the message names the operator.
    """
    try:
        found = programmed(operator.kind, operator.attributes)
    except GraphError as error:
        raise GraphError(f"operator {operator.name!r}: {error}") from None
    for word, stated, given in (("inputs", found.reads, operator.inputs), ("outputs", found.makes, operator.outputs)):
        if len(stated) != len(given):
            raise GraphError(
                f"operator {operator.name!r}: a {operator.kind} of its program has {len(stated)} {word}, not "
                f"{len(given)}"
            )
    return found


def check_shapes(operator: Operator, extents: Mapping[str, int]) -> None:
    """Check that operands have as many elements as a program's text says, by the extents of the spec's letters.

    Raises:
        GraphError: one has not.
    """
    if operator.kind in POINTWISE:
        return
    found = of_operator(operator)
    for (tensor, axes), (_, shape) in zip(operator.operands, found.reads + found.makes, strict=True):
        have, wanted = prod(extents[axis] for axis in axes), prod(shape)
        if have != wanted:
            raise GraphError(
                f"operator {operator.name!r}: {tensor!r} has {have} elements along {axes!r}; its program wants "
                f"{wanted}, as {list(shape)}"
            )


def types(operator: Operator, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the element types of an operator's outputs; those of its inputs are the text's.

    Raises:
        GraphError: an input has another type than its program says.
    """
    found = of_operator(operator)
    for tensor, dtype, (wanted, _) in zip(operator.inputs, dtypes, found.reads, strict=True):
        if dtype != wanted:
            raise GraphError(f"operator {operator.name!r}: its program reads {tensor!r} in {wanted}, not in {dtype}")
    return tuple(dtype for dtype, _ in found.makes)
