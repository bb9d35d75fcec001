"""Axes of attention: what each letter of its two products stands for, with heads that share a key or without."""

from dataclasses import dataclass

from autotuner.ir.records import Node, Subgraph
from autotuner.kernels.geometry import operand_letters


@dataclass(frozen=True, slots=True)
class HeadAxes:
    """Letters of one of attention's two products.

    Args:
        batch: of all operands: one axis, or two that follow each other.
        shared: heads of keys and values; "" where there is one for all heads of queries.
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


@dataclass(frozen=True, slots=True)
class HeadOperand:
    """Query, key, value or output of attention, or a gradient of one.

    Args:
        declared: letters of its axes, as it is declared: models have them in any order.
        heads_first: the same letters as batch, heads (one axis, or two), rows, features.
        rows_first: as batch, rows, heads, features.
        heads: the letters of its heads.
        batch: the letters of its batch.
    """

    declared: str
    heads_first: str
    rows_first: str
    heads: str
    batch: str

    @property
    def features(self) -> str:
        return self.heads_first[-1]

    @classmethod
    def of_query(cls, declared: str, axes: HeadAxes) -> "HeadOperand":
        return cls(declared, axes.query, axes.query_rows_first, axes.heads, axes.batch)

    @classmethod
    def of_key(cls, declared: str, axes: HeadAxes) -> "HeadOperand":
        return cls(declared, axes.key, axes.key_rows_first, axes.shared, axes.batch)


def head_axes(query: str, key: str, weights: str) -> HeadAxes | None:
    """Return what the letters of a product of attention stand for, or None where it does not run over batch and heads.

    Args:
        query: the operand or result with rows and features.
        key: the operand with columns and features.
        weights: the operand or result with rows and columns; in the order batch, heads, rows, columns.

    >>> head_axes("bqgrp", "bkgp", "bgrqk").heads, head_axes("bqrp", "bkp", "brqk").heads
    ('gr', 'r')
    >>> head_axes("bwqgp", "bwkgp", "bwgqk").batch
    'bw'
    """
    both = [letter for letter in weights if letter in query and letter in key]
    own = [letter for letter in weights if letter in query and letter not in key]
    columns = [letter for letter in weights if letter not in query]
    features = [letter for letter in query if letter not in weights]
    if (len(columns), len(features)) != (1, 1) or (len(both), len(own)) not in ((2, 1), (2, 2), (1, 2), (3, 1)):
        return None
    batches = 2 if len(both) == 3 else 1
    batch, shared = "".join(both[:batches]), "".join(both[batches:])
    *group, rows = own
    if batch not in query or batch not in key or query.index(batch) > min(map(query.index, (*shared, *group))):
        return None
    found = HeadAxes(batch, shared, "".join(group), rows, columns[0], features[0])
    fits = weights == found.weights and sorted(query) == sorted(found.query) and sorted(key) == sorted(found.key)
    return found if fits else None


def score_axes(subgraph: Subgraph) -> HeadAxes:
    """Return the axes of the first product of attention, forward or backward, in its own letters.

    Raises:
        ValueError: it is no attention.
    """
    query, key, scores = operand_letters(subgraph.nodes[0])
    return _found(head_axes(query, key, scores))


def head_operands(subgraph: Subgraph) -> dict[int, HeadOperand]:
    """Return query, key, value and output by number; in backward also the gradients of all, and first the output's.

    Backward reads no output by an operator: it is declared as its gradient is.

    Raises:
        ValueError: it is no attention.
    """
    scores = subgraph.nodes[0]
    first, (query, key, _) = score_axes(subgraph), operand_letters(scores)
    found = {scores.inputs[0]: HeadOperand.of_query(query, first), scores.inputs[1]: HeadOperand.of_key(key, first)}
    if "softmax_grad" not in subgraph.kinds:
        context = subgraph.nodes[-1]
        second, (_, value, out) = context_axes(context), operand_letters(context)
        return found | {
            context.inputs[1]: HeadOperand.of_key(value, second),
            context.outputs[0]: HeadOperand.of_query(out, second),
        }
    above, query_number, key_number, value_number, out_number = subgraph.inputs[:5]
    node = next(n for n in subgraph.nodes if n.kind == "contraction" and n.inputs == (above, value_number))
    gradient, value, weights = operand_letters(node)
    second = _found(head_axes(gradient, value, weights))
    of_out, of_value = HeadOperand.of_query(gradient, second), HeadOperand.of_key(value, second)
    of_each = {above: of_out, query_number: found[query_number], key_number: found[key_number],
               value_number: of_value, out_number: of_out}  # fmt: skip
    made = (found[query_number], found[key_number], of_value)
    return of_each | dict(zip(subgraph.outputs[:3], made, strict=True))


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
