"""Attention with sinks: scores beside one more, which no key has, so that a query's weights sum to less than 1.

Models put the sink of each head beside its scores, subtract the largest of them, and leave the sink's own weight out
behind the softmax. The rules of these calls say what they are part of, as in `written_out`.
"""

from typing import Any

from autotuner.runtime.capture.axes import UnknownError, extent, whole
from autotuner.runtime.capture.deferred import is_named
from autotuner.runtime.capture.program import Expression, View
from autotuner.runtime.capture.reader import Reader, aten, rule
from autotuner.runtime.capture.scores import is_of_activations

SCORES, LARGEST, WEIGHTS = "scores beside sinks", "largest beside sinks", "weights beside sinks"


def beside_sinks(parts: Any, dim: int) -> Expression | None:
    """Return what scores and a sink for each of their rows are together; None of anything else."""
    if len(parts) != 2 or not all(isinstance(part, View) for part in parts):
        return None
    scores, sinks = parts
    last = len(scores.dims) - 1
    if dim % len(scores.dims) != last or extent(whole(sinks.dims[-1])) != 1 or not is_of_activations(scores):
        return None
    return Expression(SCORES, (scores, sinks))


@rule(aten.max.dim)
def _max(reader: Reader, x: Any, dim: int, keepdim: bool = False) -> tuple[Expression, Expression]:  # noqa: ARG001
    if not is_named(x, SCORES) or not keepdim or dim % len(x.operands[0].dims) != len(x.operands[0].dims) - 1:
        raise UnknownError("a largest number of what is not scores beside sinks")
    return Expression(LARGEST, x.operands), Expression("place of the " + LARGEST)


@rule(aten.sub.Tensor)
def _less_the_largest(reader: Reader, x: Any, other: Any, *, alpha: float = 1) -> Expression:  # noqa: ARG001
    """Return the scores: a number that is subtracted from all scores of a row changes no weight."""
    if not is_named(x, SCORES) or not is_named(other, LARGEST) or x.operands != other.operands or alpha != 1:
        raise UnknownError("a difference that is not of scores and the largest of them")
    return Expression(SCORES, x.operands)


def without_sinks(x: Any, dim: int, start: int | None, end: int | None, step: int) -> View:
    """Return the weights of keys, which are all but the last.

    Raises:
        UnknownError: another slice is taken.
    """
    (weights,) = x.operands
    keys = extent(whole(weights.dims[-1]))
    if dim % len(weights.dims) != len(weights.dims) - 1 or slice(start, end, step).indices(keys + 1) != (0, keys, 1):
        raise UnknownError("a slice of weights other than that of all keys")
    return weights  # type: ignore[no-any-return]
