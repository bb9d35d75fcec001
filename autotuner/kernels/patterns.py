"""Patterns: sets of operators that a kernel covers, as its rule declares them; `autotuner.space.fusion` finds them.

A set must be convex: no path leaves it and comes back. Patterns are values, so that kernels may share one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from autotuner.ir.records import Subgraph


@dataclass(frozen=True, slots=True)
class Operators:
    """One operator; a product, the operator that alone reads it and perhaps one that reads what this makes; or two
    siblings that share their first two inputs."""

    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Scores, what is done to them, softmax and context, in one; `kinds` in graph order.

    Query, key and value have batch, heads, rows and features each, as libraries take them. Where several heads of
    queries share one of keys, the query has an axis more.
    """

    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttentionGrad:
    """The backward operators of an `Attention` of kinds `forward`; the kernel makes the weights again.

    It reads the forward output, the log-sum-exp, a mask of dropped weights and an added one, or a bias of the scores.
    """

    kinds: tuple[str, ...]
    forward: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Siblings:
    """Products of one input with parameters of one shape (query, key and value, say), or operators that go with each.

    `kinds` are those of one member: the product, its bias, both, or their gradients.
    """

    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two operators of which the second reads the first input of the first, where `fits` says so of their subgraph."""

    kinds: tuple[str, str]
    fits: Callable[[Subgraph], bool]


@dataclass(frozen=True, slots=True)
class Connected:
    """Largest connected sets of operators of some kinds and one phase, up to the search space's `max_operators`.

    Args:
        kinds: of the members.
        alone: kinds of operators that are a set by themselves as well.
        without: kinds that are left out in turn, so that each yields sets of its own; the first may be empty.
    """

    kinds: frozenset[str]
    alone: frozenset[str]
    without: tuple[frozenset[str], ...] = (frozenset(),)


@dataclass(frozen=True, slots=True)
class Draws:
    """All operators of kinds that draw masks at once, but for masks that drop what a softmax makes."""

    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParameterCasts:
    """The casts of all parameters at once, or of all their gradients; or only of those
    that products read or make, or of the others."""


Pattern = Operators | Attention | AttentionGrad | Siblings | Pair | Connected | Draws | ParameterCasts
