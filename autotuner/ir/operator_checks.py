"""Checks of operators against their kinds: attributes, specs, extents and element types."""

from collections import Counter
from collections.abc import Callable, Mapping

from autotuner.errors import GraphError
from autotuner.ir import packed_attention, programmed
from autotuner.ir.graph import Operator
from autotuner.ir.kinds import Kind, kind_of, types_made
from autotuner.ir.records import names_axis


def check_operator(operator: Operator) -> None:
    """Check that an operator's kind, spec and attributes fit together.

    Raises:
        GraphError: they do not; the message names operator, axis, and what would fit.
    """
    kind = kind_of(operator)
    _check_attributes(operator, kind)
    for axes in operator.input_axes + operator.output_axes:
        if not axes.isascii() or not axes.isalpha():
            raise _misfit(operator, kind, f"axes {axes!r} must be letters a-z or A-Z")
        repeated = [axis for axis, times in Counter(axes).items() if times > 1]
        if repeated:
            raise _misfit(operator, kind, f"axis {repeated[0]!r} occurs twice in {axes!r}")
    if kind.name in programmed.PROGRAMMED:
        programmed.of_operator(operator)
    if kind.name == "contraction":
        _check_contraction(operator, kind)
    elif kind.name == "packed_attention":
        packed_attention.check_axes(operator)
    elif not any(symbol in kind.pattern for symbol in "AD"):
        _check_pattern(operator, kind)


def check_sizes(operator: Operator, extents: Mapping[str, int]) -> None:
    """Check the extents of an operator, by the letters of its spec: those that it halves, and those of a program.

    Raises:
        GraphError: one is odd that is halved, or an operand has not as many elements as its program says.
    """
    kind = kind_of(operator)
    if kind.name in programmed.PROGRAMMED:
        programmed.check_shapes(operator, extents)
    if kind.name == "packed_attention":
        packed_attention.check_extents(operator, extents)
    if kind.even and extents[str(operator.attribute("axis"))] % 2:
        axis = operator.attribute("axis")
        raise GraphError(
            f"operator {operator.name!r}: a {kind.name} turns the halves of axis {axis!r} into each other, so its "
            f"extent is even, not {extents[str(axis)]}"
        )


def check_types(operator: Operator, dtype_of: Callable[[str], str]) -> None:
    """Check that an operator's inputs have one type, and its outputs the types that follow from it.

    Raises:
        GraphError: they have not.
    """
    if not operator.inputs:
        return
    made = types_made(operator, [dtype_of(tensor) for tensor in operator.inputs])
    for tensor, wanted in zip(operator.outputs, made, strict=True):
        if dtype_of(tensor) != wanted:
            raise GraphError(f"operator {operator.name!r} makes {tensor!r} in {wanted}, not in {dtype_of(tensor)}")


def _check_attributes(operator: Operator, kind: Kind) -> None:
    given = dict(operator.attributes)
    if set(given) != set(kind.attributes):
        raise GraphError(
            f"operator {operator.name!r}: a {kind.name} has the attributes {sorted(kind.attributes)}, "
            f"not {sorted(given)}"
        )
    for name, wanted in kind.attributes.items():
        if type(given[name]) is not wanted:
            raise GraphError(
                f"operator {operator.name!r}: attribute {name} of a {kind.name} is a {wanted.__name__}, "
                f"not {given[name]!r}"
            )


def _check_contraction(operator: Operator, kind: Kind) -> None:
    operands = operator.input_axes + operator.output_axes
    if len(operator.input_axes) != 2 or len(operator.output_axes) != 1:
        raise _misfit(operator, kind, "it needs two inputs and one output")
    for axis, times in Counter("".join(operands)).items():
        if times == 1:
            raise _misfit(operator, kind, f"axis {axis!r} occurs in one operand only; each belongs to two or three")


def _check_pattern(operator: Operator, kind: Kind) -> None:
    sides = kind.sides(operator.input_axes, operator.output_axes)
    if (len(sides[0]), len(sides[1])) != (len(operator.input_axes), len(operator.output_axes)):
        raise _misfit(operator, kind, f"it needs {len(sides[0])} inputs and {len(sides[1])} outputs")
    written = ("X" if symbol in ("M", "N") else symbol for symbol in sides[0] + sides[1])
    symbols = list(zip(written, operator.input_axes + operator.output_axes, strict=True))
    whole = next(axes for symbol, axes in symbols if symbol == "X")
    unread = [axis for axis in "".join(operator.output_axes) if axis not in "".join(operator.input_axes)]
    if "*" in kind.pattern and unread:
        raise _misfit(operator, kind, f"axis {unread[0]!r} of its output is in none of its inputs")
    bound = {"X": whole}
    named = {name: str(operator.attribute(name)) for name in kind.attributes if names_axis(name)}
    for name, axis in named.items():
        if len(axis) != 1 or axis not in whole:
            raise _misfit(operator, kind, f"attribute {name} {axis!r} is none of the axes {whole!r}")
    if len(set(named.values())) < len(named):
        raise _misfit(operator, kind, f"its attributes {' and '.join(named)} name one axis; each wants its own")
    if "axis" in named:
        bound["H"] = named["axis"]
    elif "H" not in sides[0] + sides[1] and "R" in sides[0] + sides[1]:
        rest = next(axes for symbol, axes in symbols if symbol == "R")
        bound["H"] = "".join(axis for axis in whole if axis not in rest)
        if not bound["H"]:
            raise _misfit(operator, kind, f"axes {rest!r} leave none of the axes {whole!r} to normalise")
    # H before R, which follows from it.
    for symbol, axes in sorted(symbols, key=lambda pair: pair[0] == "R"):
        if symbol == "R":
            bound["R"] = "".join(axis for axis in whole if axis not in bound["H"])
        if axes != (axes if symbol == "S" and "*" in kind.pattern else bound.setdefault(symbol, axes)):
            raise _misfit(operator, kind, f"axes {axes!r} must be {bound[symbol]!r}")
        foreign = [axis for axis in axes if axis not in whole]
        if foreign:
            raise _misfit(operator, kind, f"axis {foreign[0]!r} is none of the axes {whole!r}")


def _misfit(operator: Operator, kind: Kind, reason: str) -> GraphError:
    return GraphError(
        f"operator {operator.name!r}: spec {operator.spec!r} does not fit a {kind.name}: {reason}; "
        f'write it like "{kind.example}"'
    )
