"""Bounds of a model: what is larger could be neither enumerated nor run, and is refused before anything is tried."""

from collections.abc import Collection
from math import floor, log10, prod

from autotuner.errors import GraphError
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.operator_checks import check_sizes
from autotuner.ir.programmed import WITH_SHAPES

OPERATORS_MAX = 1024
"""Of a model: 34 encoder layers written out. Backward makes twice as many of them again."""

AXES_MAX = 8
"""Of a tensor. A transformer's have 4, or 5 where heads share keys, and up to 8 where windows split positions."""

EXTENT_MAX = 2**31 - 1
"""The largest index of 32 bits, as kernels of a device have it."""

ELEMENTS_MAX = 2**40
"""Of a tensor: 2 TiB at two bytes each, above any device's memory."""

STEPS_MAX = 2**60
"""Of an operator's loops, all its axes multiplied: minutes on the fastest device, and within 64 bits as flop."""


def check_count(operators: Collection[object]) -> None:
    """Check that a model has no more operators than can be enumerated.

    Raises:
        GraphError: it has.
    """
    if len(operators) > OPERATORS_MAX:
        raise GraphError(
            f"it has {len(operators):,} operators; at most {OPERATORS_MAX:,} are possible: tune one of the layers that "
            "repeat, whose configuration fits each of them"
        )


def check_axes(operator: Operator) -> None:
    """Check that no tensor of an operator has more axes than models need.

    Raises:
        GraphError: one has.
    """
    for tensor, axes in operator.operands:
        if len(axes) > AXES_MAX:
            raise GraphError(
                f"operator {operator.name!r}: spec {operator.spec!r} gives tensor {tensor!r} {len(axes)} axes; "
                f"at most {AXES_MAX} are possible: write those as one that no operator tells apart"
            )


def check_extents(graph: Graph) -> None:
    """Check that no tensor or operator is larger than any device could bear, and that axes with two halves are even.

    Raises:
        GraphError: one is not.
    """
    for name in graph.tensors:
        elements = graph.elements(name)
        if elements > ELEMENTS_MAX:
            raise GraphError(f"tensor {name!r} has {shown(elements)} elements; at most {ELEMENTS_MAX} are possible: "
                             "give smaller extents")  # fmt: skip
    for operator in graph.operators:
        check_sizes(operator, graph.letters(operator))
        if operator.kind in WITH_SHAPES:
            continue  # no loop over all of its axes: operands of a program may have none in common
        steps = prod(graph.letters(operator).values())
        if steps > STEPS_MAX:
            raise GraphError(f"operator {operator.name!r} takes {shown(steps)} steps; at most 2**60 are possible: "
                             "give smaller extents")  # fmt: skip


def shown(number: int) -> str:
    """Return a number for people: one of more than 18 digits by its magnitude."""
    if abs(number) < 10**18:
        return str(number)
    return f"about {'-' if number < 0 else ''}10**{floor(log10(abs(number)))}"
