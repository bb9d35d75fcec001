"""Heads in a graph of dynamo's: a linear layer whose logits nobody but cross entropy reads, as one operator.

What lies between both, and acts row by row, is taken along: types, views and slices of the rows, a bias that is added,
a factor, a soft cap. A product with a matrix, as `x @ embedding.weight.t()`, is a linear layer, too.
"""

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autotuner.kernels.torch.cross_entropy import CrossEntropy
from autotuner.runtime.capture.changed_in_place import called
from autotuner.runtime.capture.plain_nodes import SUMS, TYPES, example, is_plain, keeps_rows
from autotuner.runtime.capture.z_losses import ZLoss, z_loss_of
from autotuner.runtime.linear_cross_entropy import rows_of_chunk

LOGITS_MIN = 2**22
"""Of a head: fewer are left to the other compiler, which makes them whole."""
GRADIENTS = 2
"""Logits are so many times as large as the gradients of x and the weight together, which are held until backward."""
PRODUCTS = ("matmul", "__matmul__", "mm")
_SIGNATURE = inspect.signature(functional.cross_entropy)


@dataclass(frozen=True, eq=False)
class Head:
    """A linear layer and the cross entropy of what it makes.

    Args:
        linear, loss: the two calls.
        between: calls on the way from one to the other, in order.
        x, weight, bias, labels: what they read.
        settings: of the loss.
        is_turned: whether the weight is (features, words), not (words, features).
        z_loss: what is added to the cross entropy.
    """

    linear: fx.Node
    loss: fx.Node
    between: tuple[fx.Node, ...]
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    labels: fx.Node
    settings: CrossEntropy
    is_turned: bool = False
    z_loss: ZLoss | None = None

    @property
    def end(self) -> fx.Node:
        """The call that makes the loss with all that is added."""
        return self.loss if self.z_loss is None else self.z_loss.total

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """All that one operator computes, each behind what it reads."""
        added = () if self.z_loss is None else (*self.z_loss.calls, self.z_loss.total)
        return (self.linear, *self.between, self.loss, *added)

    @property
    def readers(self) -> tuple[fx.Node, ...]:
        """Those who read one part of a loss with a z-loss, and want no gradient of it."""
        parts = () if self.z_loss is None else (self.loss, self.z_loss.calls[-1])
        return tuple(user for part in parts for user in part.users if user is not self.end)

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """All that must be the same at its end as at its beginning."""
        given = (self.x, self.weight, self.bias, *((self.labels, *self.z_loss.operands) if self.z_loss else ()))
        return tuple(node for node in given if node is not None)

    @property
    def logits(self) -> tuple[int, int]:
        """The rows of the loss, and the words of each."""
        return example(self.labels).numel(), example(self.weight).shape[int(self.is_turned)]

    def __str__(self) -> str:
        rows, words = self.logits
        most = rows_of_chunk(rows, example(self.x).shape[-1])
        return f"the loss of {rows:,} rows of {words:,} logits is computed with its head, {most:,} rows at a time"


def head_of(loss: fx.Node) -> Head | None:
    """Return the head that a call of cross entropy ends, or None where it ends none that can be one operator."""
    if loss.target is not functional.cross_entropy or not is_plain(loss):
        return None
    try:
        given = _SIGNATURE.bind(*loss.args, **loss.kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    told = given.arguments
    logits, labels = told["input"], told["target"]
    usual = (told["weight"], told["size_average"], told["reduce"]) == (None, None, None)
    if not usual or told["reduction"] not in ("mean", "sum") or not _are_nodes(logits, labels):
        return None
    if not is_plain(labels) or example(labels).dtype is not torch.int64 or not is_plain(logits):
        return None
    if type(told["ignore_index"]) is not int or type(told["label_smoothing"]) not in (int, float):
        return None
    settings = CrossEntropy(told["ignore_index"], told["reduction"] == "mean", float(told["label_smoothing"]))
    z_loss = z_loss_of(loss)
    found = _linear_before(logits, example(labels), settings, z_loss)
    if found is None and z_loss is not None:  # it may be one of other logits, such as a router's
        z_loss = None
        found = _linear_before(logits, example(labels), settings, None)
    if found is None:
        return None
    linear, between, settings, added = found
    x, weight, bias, is_turned = _operands(linear)
    if not all(each is None or is_plain(each) for each in (x, weight, bias)):
        return None
    if example(weight).ndim != 2 or (bias is not None and added is not None):
        return None
    head = Head(linear, loss, between, x, weight, added if bias is None else bias, labels, settings, is_turned, z_loss)
    rows, words = head.logits
    if bias is not None and tuple(example(bias).shape) != (words,):  # it is broadcast
        return None
    dtype = example(linear).dtype
    is_wide = example(logits).dtype is torch.float64 and dtype is not torch.float64  # wider than scores are computed
    numbers = (settings.factor, settings.cap or 1.0)
    is_usual = dtype in TYPES and not is_wide and all(number and math.isfinite(number) for number in numbers)
    of_operands = example(x).shape[-1] * (rows + words)
    is_large = rows * words >= max(LOGITS_MIN, GRADIENTS * of_operands)
    return head if is_usual and is_large else None


def _linear_before(
    node: fx.Node, labels: Tensor, settings: CrossEntropy, z_loss: ZLoss | None
) -> tuple[fx.Node, tuple[fx.Node, ...], CrossEntropy, fx.Node | None] | None:
    """Return the linear layer that logits come from, calls between, settings with these, and a bias that one adds."""
    between: list[fx.Node] = []
    added: fx.Node | None = None
    words_last = example(node).ndim == labels.ndim + 1 and labels.ndim == 1
    own, is_met = settings, z_loss is None
    while True:
        if z_loss is not None and node is z_loss.logits:
            of_labels = math.prod(example(node).shape[:-1]) == labels.numel()
            if not words_last or not of_labels or settings != own or added is not None:
                return None
            is_met = True
        if len(set(node.users) - set(z_loss.calls[:1] if z_loss else ())) != 1:
            return None
        if _is_linear(node):
            return (node, tuple(between), settings, added) if words_last and is_met else None
        before, bias = _before(node)
        if not is_plain(node) or not is_plain(before):
            return None
        if not words_last:
            if not between and _moves_words(node, example(before)):
                words_last = True
            else:
                return None
        elif bias is not None:
            if added is not None:
                return None
            added = bias
        else:
            found = _with(settings, node, example(before))
            if found is None or (added is not None and found != settings):  # a factor would be one of the bias, too
                return None
            settings = found
        between.insert(0, node)
        node = before


def _before(node: fx.Node) -> tuple[Any, fx.Node | None]:
    """Return the only tensor that a call reads, or the logits and the bias that it adds to them."""
    read = node.all_input_nodes
    if len(read) == 1:
        return read[0], None
    given: Any = node.args
    is_sum = called(node) in SUMS and not node.kwargs and len(given) == 2
    if is_sum and all(map(is_plain, (node, *given))):
        of_sum = example(node)
        for before, bias in (given, given[::-1]):
            logits, row = example(before), example(bias)
            is_row = row.numel() == of_sum.shape[-1] and row.shape[-1:] == of_sum.shape[-1:]
            if is_row and logits.shape == of_sum.shape and row.device == logits.device == of_sum.device:
                return before, bias
    return None, None


def _with(settings: CrossEntropy, node: fx.Node, before: Tensor) -> CrossEntropy | None:
    """Return settings with a call in front of what they compute; None where it is none that acts row by row."""
    name, after = called(node), example(node)
    if after.device != before.device or not name:
        return None
    if keeps_rows(node, before):
        return settings
    if name in ("getitem", "__getitem__"):
        return settings if rows_of(node.args[1], before.ndim) is not None and after.ndim > 1 else None
    if name == "tanh":
        return None if settings.cap or not settings.factor else replace(settings, cap=settings.factor, factor=1.0)
    numbers = [each for each in node.args if type(each) in (int, float) and each]
    if node.kwargs or len(node.args) != 2 or len(numbers) != 1:
        return None
    if name == "mul":
        return replace(settings, factor=settings.factor * float(numbers[0]))  # type: ignore[arg-type]
    if name in ("truediv", "div") and node.args[1] is numbers[0]:
        return replace(settings, factor=settings.factor / float(numbers[0]))  # type: ignore[arg-type]
    return None


def _moves_words(node: fx.Node, before: Tensor) -> bool:
    """Say whether a call brings the words of logits (batch, positions, words) to the second axis."""
    name, given = called(node), node.args[1:]
    if before.ndim != 3 or node.kwargs:
        return False
    if name == "permute" and len(given) == 1 and isinstance(given[0], tuple | list):
        given = tuple(given[0])
    numbers = [each % 3 for each in given if type(each) is int]
    return (name == "transpose" and sorted(numbers) == [1, 2]) or (name == "permute" and numbers == [0, 2, 1])


def rows_of(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """Return an index that leaves the last axis whole, with no more than slices and numbers; None for any other."""
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [each for each in parts if not isinstance(each, fx.Node)]:
        place = parts.index(Ellipsis)
        parts = (*parts[:place], *[slice(None)] * (ndim - len(parts) + 1), *parts[place + 1 :])
    ends = [end for each in parts if isinstance(each, slice) for end in (each.start, each.stop, each.step)]
    if not all(isinstance(each, slice) or type(each) is int for each in parts):
        return None
    if not all(end is None or type(end) is int for end in ends):
        return None
    return parts if len(parts) < ndim or parts[-1] == slice(None) else None


def _is_linear(node: fx.Node) -> bool:
    """Say whether a node is a linear layer, or a product with one matrix."""
    if node.target is functional.linear:
        return True
    is_product = called(node) in PRODUCTS and not node.kwargs and len(node.args) == 2
    if not is_product or not all(map(is_plain, node.args)):
        return False
    x, matrix = map(example, node.args)  # type: ignore[arg-type]
    return x.ndim > 1 and matrix.ndim == 2


def _operands(linear: fx.Node) -> tuple[Any, Any, Any, bool]:
    """Return x, the weight and the bias, and whether the weight is (features, words)."""
    if linear.target is functional.linear:
        names = ("input", "weight", "bias")
        given = dict(zip(names, linear.args, strict=False)) | linear.kwargs
        return given.get("input"), given.get("weight"), given.get("bias"), False
    x, matrix = linear.args
    weight = _turned(matrix)
    return (x, matrix, None, True) if weight is None else (x, weight, None, False)


def _turned(matrix: Any) -> Any:
    """Return the matrix that a call turns rows and columns of; None where it does not."""
    name, given = called(matrix), matrix.args[1:]
    before: Any = matrix.all_input_nodes[0] if len(matrix.all_input_nodes) == 1 else None
    if not is_plain(before) or example(before).ndim != 2:
        return None
    if matrix.target is getattr:
        return before if given[0] in ("T", "mT") else None
    if matrix.kwargs:
        return None
    is_turned = name == "t" or (
        name == "transpose" and sorted(each % 2 for each in given if type(each) is int) == [0, 1]
    )
    return before if is_turned else None


def _are_nodes(*parts: Any) -> bool:
    return all(isinstance(part, fx.Node) for part in parts)
