"""z-losses in a graph of dynamo's: what is added to a cross entropy for the squares of its logits' log-sum-exps.

Source:
    Chowdhery et al.: PaLM: Scaling Language Modeling with Pathways (2022), section 5: 1e-4 * log(Z)**2.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import fx

from autotuner.runtime.capture.changed_in_place import called
from autotuner.runtime.capture.plain_nodes import CASTS, SUMS, TYPES, VIEWS, example, is_plain, keeps_rows


@dataclass(frozen=True, eq=False)
class ZLoss:
    """A number times the sum over all rows of logsumexp(logits)**2, each times a factor of its own.

    Args:
        total: the sum of a cross entropy and of it.
        calls: what makes it, in order; the first reads logits that others read, too.
        number: the constant factors together, with the number of rows for a mean.
        factors: tensors that multiply it, of one element or one a row, without gradients.
        divisors: tensors of one element that divide it.
    """

    total: fx.Node
    calls: tuple[fx.Node, ...]
    number: float
    factors: tuple[fx.Node, ...]
    divisors: tuple[fx.Node, ...]

    @property
    def logits(self) -> fx.Node:
        """The logits of its log-sum-exps, before casts and views of its own."""
        return self.calls[0].all_input_nodes[0]

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """All that it reads beside the logits."""
        return (*self.factors, *self.divisors)


def z_loss_of(loss: fx.Node) -> ZLoss | None:
    """Return what the graph adds to a cross entropy, if it is a z-loss and only their sum gets a gradient."""
    sums = [user for user in loss.users if called(user) in SUMS]
    if len(sums) != 1 or sums[0].kwargs or len(sums[0].args) != 2 or set(map(type, sums[0].args)) != {fx.Node}:
        return None
    total, given = sums[0], sums[0].args
    added: Any = given[1] if given[0] is loss else given[0]
    parts = (total, added, loss)
    is_of_numbers = all(is_plain(each) and example(each).ndim == 0 and example(each).dtype in TYPES for each in parts)
    if added is loss or not is_of_numbers:
        return None
    found = _before(added)
    if found is None:
        return None
    changes_it = called(total) != "add" and len(given[0].users) > 1  # type: ignore[union-attr]
    if changes_it or not _reads_values_alone(loss, total) or not _reads_values_alone(added, total):
        return None
    calls, number, factors, divisors = found
    device = example(loss).device
    is_usual = isfinite(number) and all(is_plain(each) and example(each).device == device for each in (*calls, total))
    return ZLoss(total, tuple(calls), number, tuple(factors), tuple(divisors)) if is_usual else None


def _before(node: fx.Node) -> tuple[list[fx.Node], float, list[fx.Node], list[fx.Node]] | None:
    """Return the calls that make a z-loss, its number, its factors and its divisors.

    From its end to its beginning, these are factors, a mean or a sum, factors of rows, a square, and log-sum-exps.
    """
    calls: list[fx.Node] = []
    number, factors, divisors = 1.0, list[fx.Node](), list[fx.Node]()
    is_of_rows = False
    while not _is_square(node):
        if (calls and len(node.users) != 1) or not is_plain(node):
            return None
        calls.insert(0, node)
        read = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if called(node) in ("mean", "sum") and not is_of_rows and is_plain(read):
            is_of_rows, node = True, read
            number /= (example(read).numel() or 1) if called(calls[0]) == "mean" else 1
            continue
        scaled = _scaled(node)
        if scaled is None:
            return None
        node, by, factor, divisor = scaled
        number *= by
        factors += factor
        divisors += divisor
    (before,) = node.all_input_nodes
    calls[:0] = [before, node]
    if not is_of_rows or len(node.users) != 1 or set(before.users) != {node} or not _is_of_last_axis(before):
        return None
    (before,) = before.all_input_nodes
    while len(before.users) == 1 and is_plain(before) and called(before) in (*CASTS, *VIEWS):
        (source, *others) = before.all_input_nodes
        if others or not is_plain(source) or not keeps_rows(before, example(source)):
            break
        calls.insert(0, before)
        before = source
    return calls, number, factors, divisors


def _scaled(node: fx.Node) -> tuple[fx.Node, float, list[fx.Node], list[fx.Node]] | None:
    """Return what a product or quotient scales, and by what: a number, factors and divisors."""
    name, args = called(node), node.args
    if name not in ("mul", "truediv", "div") or len(args) != 2 or node.kwargs:
        return None
    one, other = args if isinstance(args[0], fx.Node) or name != "mul" else args[::-1]
    if is_plain(one) and isinstance(other, int | float) and other:
        return one, float(other) if name == "mul" else 1 / float(other), [], []
    if not is_plain(one) or not is_plain(other) or not is_plain(node):
        return None
    shape = example(node).shape
    if name != "mul":
        return (one, 1.0, [], [other]) if _is_constant(other) and example(other).ndim == 0 else None
    for scaled, factor in ((other, one), (one, other)) if _has_squares(other) else ((one, other), (other, one)):
        if _is_constant(factor) and example(factor).shape in (shape, ()) and example(scaled).shape == shape:
            return scaled, 1.0, [factor], []
    return None


def _has_squares(node: fx.Node) -> bool:
    """Say whether a node makes what a z-loss is made of, and no factor of it."""
    while called(node) in ("mean", "sum", "mul", "truediv", "div") and not _is_square(node):
        if any(_has_squares(each) for each in node.all_input_nodes[1:]):
            return True
        node = node.all_input_nodes[0]
    return _is_square(node) and called(node.all_input_nodes[0]) == "logsumexp"


def _is_square(node: fx.Node) -> bool:
    name, args = called(node), node.args
    if node.kwargs or len(node.all_input_nodes) != 1 or not isinstance(args[0], fx.Node):
        return False
    if name == "square":
        return len(args) == 1
    if name in ("pow", "__pow__"):
        return len(args) == 2 and isinstance(args[1], int | float) and args[1] == 2
    return name == "mul" and args[0] is args[1]


def _is_of_last_axis(node: fx.Node) -> bool:
    """Say whether a call makes log-sum-exps over the last axis, which it leaves out."""
    if called(node) != "logsumexp" or len(node.all_input_nodes) != 1 or not is_plain(node.all_input_nodes[0]):
        return False
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    read, dim = given.get("input"), given.get("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    is_usual = isinstance(read, fx.Node) and given.keys() <= {"input", "dim", "keepdim"} and not given.get("keepdim")
    return is_usual and type(dim) is int and dim in (-1, example(read).ndim - 1)  # type: ignore[arg-type]


def _is_constant(node: fx.Node) -> bool:
    return not example(node).requires_grad


def _reads_values_alone(node: fx.Node, total: fx.Node) -> bool:
    """Say whether who reads a part beside the sum wants its value, without a gradient."""
    return not example(node).requires_grad or all(called(user) == "detach" for user in node.users if user is not total)
