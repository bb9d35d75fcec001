"""Factors, problems and solutions, as plain values. Imports nothing of transformers, kernels or tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum, inf
from typing import Any

from autotuner.errors import ProblemError

SCHEMA = 3

State = str
Row = tuple[State, ...]


@dataclass(frozen=True)
class Factor:
    """A table of costs over the states of some variables; a row that is not there is forbidden.

    Args:
        name: for messages and for the paper's chain; unique in a problem.
        variables: names, in the order of a row's states.
        table: row -> cost in microseconds, finite and not negative.
        held_bytes: row -> bytes that it holds from forward to backward; rows that are not there hold none. They add up.
    """

    name: str
    variables: tuple[str, ...]
    table: Mapping[Row, float]
    held_bytes: Mapping[Row, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.variables)) != len(self.variables):
            raise ProblemError(f"factor {self.name!r} names a variable twice: {self.variables}")
        costs = self.table.values()
        # Tables are long, and nearly all are right: rows are looked at one by one where there is something to tell.
        if not (set(map(len, self.table)) <= {len(self.variables)} and min(costs, default=0) >= 0 and sum(costs) < inf):
            self._check_rows()
        for row, count in self.held_bytes.items():
            if row not in self.table:
                raise ProblemError(f"factor {self.name!r}: row {row} holds {count} bytes, but the table lacks it")
            if count < 0 or count != int(count):
                raise ProblemError(f"factor {self.name!r}: row {row} holds {count} bytes; give a count, 0 or more")

    def _check_rows(self) -> None:
        for row, cost in self.table.items():
            if len(row) != len(self.variables):
                raise ProblemError(
                    f"factor {self.name!r}: row {row} has {len(row)} states, its variables are {len(self.variables)}"
                )
            if not 0 <= cost < inf:
                raise ProblemError(f"factor {self.name!r}: row {row} costs {cost}; a cost is finite and not negative")


@dataclass(frozen=True)
class Problem:
    """Factors whose costs add up; each variable takes one state, the same in every factor that names it.

    `chain` names variables in order: the layer graph's main path, residual edges left out. Only the baseline
    `shortest_path` reads it.
    """

    factors: tuple[Factor, ...]
    chain: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [factor.name for factor in self.factors]
        if len(set(names)) != len(names):
            raise ProblemError(f"factor names occur twice: {sorted({n for n in names if names.count(n) > 1})}")
        unknown = set(self.chain) - set(self.variables)
        if unknown:
            raise ProblemError(f"the chain names variables that no factor has: {sorted(unknown)}")

    @property
    def variables(self) -> tuple[str, ...]:
        """Every variable once, in order of first appearance."""
        return tuple(dict.fromkeys(name for factor in self.factors for name in factor.variables))

    def cost_us(self, states: Mapping[str, State]) -> float:
        """Return the total cost of a full assignment, rounded once: the order of factors makes no difference.

        Raises:
            ProblemError: a variable has no state, or some factor forbids the assignment; the message names which.
        """
        return fsum(factor.table[row] for factor, row in self._rows(states))

    def held_bytes(self, states: Mapping[str, State]) -> int:
        """Return the bytes that a full assignment holds from forward to backward.

        Raises:
            ProblemError: as `cost_us`.
        """
        return sum(factor.held_bytes.get(row, 0) for factor, row in self._rows(states))

    def _rows(self, states: Mapping[str, State]) -> list[tuple[Factor, Row]]:
        missing = [name for name in self.variables if name not in states]
        if missing:
            raise ProblemError(f"no state is given for {len(missing)} of the variables: {', '.join(missing[:8])}")
        rows = [(factor, tuple(states[name] for name in factor.variables)) for factor in self.factors]
        for factor, row in rows:
            if row not in factor.table:
                raise ProblemError(f"factor {factor.name!r} has no row {row}")
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "chain": list(self.chain),
            "factors": [
                {
                    "name": factor.name,
                    "variables": list(factor.variables),
                    "rows": [[*row, cost, *_held(factor, row)] for row, cost in factor.table.items()],
                }
                for factor in self.factors
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Problem":
        """Read a problem from its JSON value.

        Raises:
            ProblemError: another schema version, or not a problem at all; no row may occur twice.
        """
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            given = value.get("schema") if isinstance(value, dict) else type(value).__name__
            raise ProblemError(f"this is no problem of schema {SCHEMA}, its schema is {given!r}")
        try:
            return cls(tuple(map(_factor, value["factors"])), _names(value["chain"], "the chain"))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ProblemError(f"the problem is damaged: {error!r}") from error


def _held(factor: Factor, row: Row) -> tuple[int, ...]:
    """Return the bytes that a row holds, or nothing where it holds none."""
    count = factor.held_bytes.get(row, 0)
    return (count,) if count else ()


def _factor(value: Any) -> Factor:
    name = value["name"]
    if not isinstance(name, str):
        raise ProblemError(f"the problem is damaged: a factor's name is a text, not {name!r}")
    variables = _names(value["variables"], f"factor {name!r}")
    table: dict[Row, float] = {}
    held: dict[Row, int] = {}
    for given in value["rows"]:
        if not isinstance(given, list) or len(given) - len(variables) not in (1, 2):
            raise ProblemError(
                f"the problem is damaged: factor {name!r} has {given!r}; a row is {len(variables)} states and a cost, "
                "and then the bytes that it holds, if any"
            )
        row, (cost, *counts) = tuple(given[: len(variables)]), given[len(variables) :]
        if not all(isinstance(state, str) for state in row):
            raise ProblemError(f"the problem is damaged: factor {name!r}: row {given}: states are texts")
        if isinstance(cost, bool) or not isinstance(cost, int | float):
            raise ProblemError(f"the problem is damaged: factor {name!r}: row {row} costs {cost!r}, which is no number")
        if row in table:
            raise ProblemError(f"factor {name!r} has row {row} twice, at {table[row]} and {cost}: give it once")
        table[row] = float(cost)
        for count in counts:
            if isinstance(count, bool) or not isinstance(count, int):
                raise ProblemError(
                    f"the problem is damaged: factor {name!r}: row {row} holds {count!r}, no count of bytes"
                )
            if count:
                held[row] = count
    return Factor(name, variables, table, held)


def _names(value: Any, whose: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ProblemError(f"the problem is damaged: the variables of {whose} are a list of names, not {value!r}")
    return tuple(value)


@dataclass(frozen=True)
class Solution:
    """A state for each variable, and what is known about how good it is; all times in microseconds.

    `statistics` says what solving took, by names that are the solver's own; solutions are equal without it.
    `held_bytes` is told by solvers that look at it.
    """

    states: Mapping[str, State]
    total_us: float
    lower_bound_us: float
    solver: str
    statistics: Mapping[str, float] = field(default_factory=dict, compare=False)
    held_bytes: int = 0

    @property
    def gap(self) -> float:
        """The distance of the total above the bound, as a share of the bound; 0 when it is proven optimal."""
        if self.lower_bound_us <= 0:
            return 0.0 if self.total_us <= 0 else float("inf")
        return max(0.0, self.total_us / self.lower_bound_us - 1)
