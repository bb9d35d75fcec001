"""A made-up depth: the problem of many equal layers, from that of a few; for benchmarks and tests."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from autotuner.errors import ProblemError
from autotuner.solve.problem.factors import Factor, Problem, Row

T = TypeVar("T")

# Two ends, one layer in the middle, and one that shows how two layers of the middle meet.
CUT_FROM = 4
LAYER = re.compile(r"L(\d+)_")


def equal_layers(problem: Problem, layers: int) -> Problem:
    """Return the problem of more layers, by repeating what the second of `CUT_FROM` has of its own and with the third.

    What belongs to layer 2 is named so, `L2_`, in the names of variables and factors and in states; what names no layer
    belongs to layer 1. In the result, states name layers relative to that of their variable, `L-1_` the one before, so
    that equal layers have equal states and share their tables: each is held in memory once.

    Args:
        problem: of `CUT_FROM` layers, of which 2 and 3 differ in nothing but names.
        layers: `CUT_FROM` or more.

    Raises:
        ProblemError: fewer layers, another number of layers in the problem, or a factor over layers that are no
            neighbours.
    """
    found = {layer for name in problem.variables for layer in _layers(name)}
    if found != set(range(1, CUT_FROM + 1)) or layers < CUT_FROM:
        raise ProblemError(
            f"{layers} layers from a problem of layers {sorted(found)}: it must have 1 to {CUT_FROM}, the result "
            "as many or more"
        )
    names = _relative_names(problem)
    groups: dict[str, list[Factor]] = defaultdict(list)
    for factor in problem.factors:
        touched = {layer for name in factor.variables for layer in _layers(name) or (1,)}
        if touched and max(touched) - min(touched) > 1:
            raise ProblemError(f"factor {factor.name!r} is over layers {sorted(touched)}, which are no neighbours")

        def renamed(rows: Mapping[Row, T], variables: tuple[str, ...] = factor.variables) -> dict[Row, T]:
            return {
                tuple(names[name][state] for name, state in zip(variables, row, strict=True)): value
                for row, value in rows.items()
            }

        moved = (renamed(factor.table), renamed(factor.held_bytes), renamed(factor.transient_bytes))
        groups[_where(touched)].append(Factor(factor.name, factor.variables, *moved))
    more = layers - CUT_FROM
    middle = [_moved(factor, by) for by in range(more + 1) for factor in groups["middle"]]
    factors = (*groups["front"], *middle, *(_moved(factor, more) for factor in groups["rear"]))
    chain: dict[str, list[str]] = defaultdict(list)
    for name in problem.chain:
        chain[_where(_layers(name))].append(name)
    path = [_shifted(name, by) for by in range(more + 1) for name in chain["middle"]]
    return Problem(factors, (*chain["front"], *path, *(_shifted(name, more) for name in chain["rear"])))


def _layers(text: str) -> list[int]:
    return [int(number) for number in LAYER.findall(text)]


def _where(layers: Iterable[int]) -> str:
    first = min(layers, default=1)
    return "front" if first == 1 else "middle" if first == 2 else "rear"


def _shifted(text: str, by: int) -> str:
    return LAYER.sub(lambda match: f"L{int(match[1]) + by}_", text)


def _moved(factor: Factor, by: int) -> Factor:
    variables = tuple(_shifted(name, by) for name in factor.variables)
    return Factor(_shifted(factor.name, by), variables, factor.table, factor.held_bytes, factor.transient_bytes)


def _relative_names(problem: Problem) -> dict[str, dict[str, str]]:
    """Return each variable's states with the names that are relative to its layer, the last one that it names."""
    names: dict[str, dict[str, str]] = {name: {} for name in problem.variables}
    for factor in problem.factors:
        for variable, column in zip(factor.variables, zip(*factor.table, strict=True), strict=False):
            known = names[variable]
            known |= {state: _relative(state, max(_layers(variable), default=1)) for state in set(column) - set(known)}
    return names


def _relative(state: str, own: int) -> str:
    return LAYER.sub(lambda match: f"L{int(match[1]) - own:+d}_", state)
