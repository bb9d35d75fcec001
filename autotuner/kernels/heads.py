"""Axes of attention: what each letter of its two products stands for, with heads that share a key or without."""

from dataclasses import dataclass

from autotuner.ir.records import Node, Subgraph
from autotuner.kernels.geometry import operand_letters


@dataclass(frozen=True, slots=True)
class HeadAxes:
    """Letters of one of attention's two products.

    Args:
        batch: of all operands.
        shared: heads of keys and values.
        group: heads of queries for each of these; "" where there are as many heads of keys as of queries.
        rows: of queries.
        columns: of keys and values.
        features: of one head.
    """

    batch: str
    shared: str
    group: str
    rows: str
    columns: str
    features: str

    @property
    def heads(self) -> str:
        """Heads of queries: one axis, or two."""
        return self.shared + self.group

    @property
    def weights(self) -> str:
        """Axes of scores and weights, in the only order that attention as one kernel takes."""
        return self.batch + self.heads + self.rows + self.columns

    @property
    def query(self) -> str:
        """Axes of query and output, heads first."""
        return self.batch + self.heads + self.rows + self.features

    @property
    def key(self) -> str:
        """Axes of key and value, heads first."""
        return self.batch + self.shared + self.columns + self.features

    @property
    def query_rows_first(self) -> str:
        return self.batch + self.rows + self.heads + self.features

    @property
    def key_rows_first(self) -> str:
        return self.batch + self.columns + self.shared + self.features


def head_axes(query: str, key: str, weights: str) -> HeadAxes | None:
    """Return what the letters of a product of attention stand for, or None where it does not run over batch and heads.

    Args:
        query: the operand or result with rows and features.
        key: the operand with columns and features.
        weights: the operand or result with rows and columns; in the order batch, heads, rows, columns.

    >>> head_axes("bqgrp", "bkgp", "bgrqk").heads
    'gr'
    """
    both = [letter for letter in weights if letter in query and letter in key]
    own = [letter for letter in weights if letter in query and letter not in key]
    columns = [letter for letter in weights if letter not in query]
    features = [letter for letter in query if letter not in weights]
    if (len(both), len(columns), len(features)) != (2, 1, 1) or len(own) not in (1, 2):
        return None
    if query.index(both[0]) > query.index(both[1]):
        return None
    *group, rows = own
    found = HeadAxes(both[0], both[1], "".join(group), rows, columns[0], features[0])
    fits = weights == found.weights and sorted(query) == sorted(found.query) and sorted(key) == sorted(found.key)
    return found if fits else None


def score_axes(subgraph: Subgraph) -> HeadAxes:
    """Return the axes of the first product of attention, forward or backward, in its own letters.

    Raises:
        ValueError: it is no attention.
    """
    query, key, scores = operand_letters(subgraph.nodes[0])
    return _found(head_axes(query, key, scores))


def context_axes(context: Node) -> HeadAxes:
    """Return the axes of the second product of attention, in its own letters.

    Raises:
        ValueError: it is no attention.
    """
    weights, value, out = operand_letters(context)
    return _found(head_axes(out, value, weights))


def _found(axes: HeadAxes | None) -> HeadAxes:
    if axes is None:
        raise ValueError("a product that does not run over batch and heads is none of attention's")
    return axes
