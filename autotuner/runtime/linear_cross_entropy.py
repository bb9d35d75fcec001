"""The head of a model and its loss as one operator, torch.ops.autotuner.linear_cross_entropy: logits are never whole.

Rows are taken in chunks. A chunk's logits become their own gradient at once, and what follows from it, the gradients of
the operands, is added up in forward: no product is repeated. Backward multiplies them by the gradient of the loss.

Source:
    Hsu, Dai, Kothapalli, Song, Tang, Zhu, Shimizu, Sahni, Ning, Chen: Liger Kernel: Efficient Triton Kernels for LLM
    Training (2024), section 3.2: the fused linear cross entropy.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, library
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from autotuner.kernels.torch import cross_entropy
from autotuner.kernels.torch.cross_entropy import CrossEntropy
from autotuner.runtime.devices import device_runtime

ROWS_MIN = 1024
"""Of a chunk: fewer rows make slow products."""


def rows_of_chunk(rows: int, features: int) -> int:
    """Return the rows of a chunk: all are about alike, and logits in 16 bits take no more than the weight in float32.

    Below `ROWS_MIN` rows there is one chunk.
    """
    most = max(ROWS_MIN, 2 * features)  # logits in 16 bits, of as many rows, take 4 bytes an element of the weight
    return ceil(rows / ceil(rows / most)) if rows else 1


def empty_words(words: int, device: torch.device) -> int:
    """Return how many words are added whose logits are zeros and count for nothing."""
    return -words % device_runtime(device).columns_multiple


@library.custom_op("autotuner::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    dtype: torch.dtype,
    of_loss: torch.dtype,
    wanted: Sequence[bool],
    settings: Sequence[float],
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the gradients of x, weight and bias where they are wanted, and the two parts of the loss.

    Where `squares` are given, the sum of squares * logsumexp(scores)**2 is added to the cross entropy (a z-loss), and
    the parts are both. Otherwise the parts have no elements, like gradients that are not wanted.

    Args:
        x: (rows, features).
        weight: (words, features).
        bias: (words,).
        labels: (rows,), int64.
        dtype: in which products are made.
        of_loss: type of the loss.
        wanted: whether gradients of x, weight and bias are.
        settings: those of `CrossEntropy`, in order; a flag is 0 or 1.
        squares: (rows,), of a floating-point type; rows whose label is ignored count, too.

    Raises:
        IndexError: a label is no word, and not the one that is ignored; on CUDA, the device asserts it.
    """
    ignored, mean, *numbers = settings
    with torch._C._DisableAutocast():
        told = CrossEntropy(int(ignored), bool(mean), *numbers)
        loss, *made = _computed(x, weight, bias, labels, dtype, wanted, told, squares)
    return loss.to(of_loss), made[0], made[1], made[2], made[3]


def _computed(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dtype: torch.dtype, wanted: Sequence[bool],
    settings: CrossEntropy, squares: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    (rows, features), words = x.shape, len(weight)
    labels = labels.contiguous()
    counts = labels != settings.ignored
    _check(labels, counts, words, settings.ignored)
    count = counts.sum() if settings.mean else None
    share = None if count is None else count.to(CrossEntropy.wide(dtype)).reciprocal()
    empty = empty_words(words, x.device)
    given, matrix, vector = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if empty:
        matrix, vector = pad(matrix, (0, 0, 0, empty)), None if vector is None else pad(vector, (0, empty))
    most = rows_of_chunk(rows, features)
    memory = torch.empty((min(most, rows), words + empty), dtype=dtype, device=x.device)
    losses = torch.empty(rows, dtype=CrossEntropy.wide(dtype), device=x.device)
    squares = None if squares is None else squares.to(losses.dtype).contiguous()
    squared = None if squares is None else torch.empty_like(losses)
    of_x = torch.empty((rows, features) if wanted[0] else 0, dtype=x.dtype, device=x.device)
    is_split = most < rows
    of_weight = _Sum(weight, is_split=is_split)
    of_bias = _Sum(bias if bias is not None else weight[:, 0], is_split=is_split)
    for start in range(0, rows, most):
        part = given[start : start + most]
        logits = memory[: len(part)]
        if vector is None:
            torch.mm(part, matrix.t(), out=logits)
        else:
            torch.addmm(vector, part, matrix.t(), out=logits)
        here = slice(start, start + len(part))
        of_part = None if squares is None else squares[here]
        losses[here], of_squares = _rows(logits[:, :words], labels[here], share, settings, any(wanted), of_part)
        if squared is not None:
            squared[here] = of_squares
        if wanted[0] and x.dtype is dtype:
            torch.mm(logits, matrix, out=of_x[here])
        elif wanted[0]:
            of_x[here] = logits @ matrix
        if wanted[1]:
            of_weight.add_product(logits.t(), part)
        if wanted[2]:
            of_bias.add(logits.sum(0, dtype=losses.dtype))
    loss = losses.sum() if count is None else losses.sum() / count
    parts = losses.new_empty(0)
    if squared is not None:
        parts = torch.stack([loss, squared.sum()])
        loss = parts.sum()
    return loss, of_x, of_weight.made(wanted[1]), of_bias.made(wanted[2]), parts


class _Sum:
    """Adds up chunks of a gradient, in float32 where there are several; the result is of the parameter's type."""

    def __init__(self, parameter: Tensor, *, is_split: bool) -> None:
        self._parameter, self._is_split = parameter, is_split
        self._sum: Tensor | None = None

    def add_product(self, one: Tensor, other: Tensor) -> None:
        wide = CrossEntropy.wide(one.dtype)
        if one.dtype is not wide and self._is_split and device_runtime(one.device).sums_wide:
            if self._sum is None:
                self._sum = torch.mm(one, other, out_dtype=wide)
            else:
                torch.addmm(self._sum, one, other, out_dtype=wide, out=self._sum)
        elif self._sum is not None and self._sum.dtype is one.dtype is wide:
            self._sum.addmm_(one, other)
        else:
            self.add(one @ other)

    def add(self, part: Tensor) -> None:
        if self._sum is None:
            self._sum = part
            return
        if self._sum.dtype is not CrossEntropy.wide(self._sum.dtype):
            self._sum = self._sum.to(CrossEntropy.wide(self._sum.dtype))
        self._sum.add_(part)

    def made(self, wanted: bool) -> Tensor:
        own = self._parameter
        if not wanted:
            return own.new_empty(0)
        return own.new_zeros(own.shape) if self._sum is None else self._sum[: len(own)].to(own.dtype)


def _rows(
    logits: Tensor, labels: Tensor, share: Tensor | None, settings: CrossEntropy, gradient: bool,
    squares: Tensor | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    runtime = device_runtime(logits.device)
    if runtime.has_triton and logits.dtype is not torch.float64:
        from autotuner.kernels.triton.cross_entropy import rows_of_cross_entropy

        with runtime.guard():
            return rows_of_cross_entropy(logits, labels, share, settings, gradient=gradient, squares=squares)
    return cross_entropy.rows_of_cross_entropy(logits, labels, share, settings, gradient=gradient, squares=squares)


def _check(labels: Tensor, counts: Tensor, words: int, ignored: int) -> None:
    """Check that each label is a word, or is ignored; where calls are queued, the device does, as the framework's."""
    right = ((labels >= 0) & (labels < words) | ~counts).all()
    valid = f"labels are 0 to {words - 1}, or {ignored}, which is ignored"
    if device_runtime(labels.device).has_graphs:
        torch._assert_async(right, f"a label is out of bounds: {valid}")
    elif not right:
        wrong = labels[counts & ((labels < 0) | (labels >= words))][0]
        raise IndexError(f"target {int(wrong)} is out of bounds: {valid}")


@linear_cross_entropy.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,  # noqa: ARG001
    dtype: torch.dtype,
    of_loss: torch.dtype,
    wanted: Sequence[bool],
    settings: Sequence[float],  # noqa: ARG001
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    made = [
        like.new_empty(like.shape if want else 0)
        for like, want in zip((x, weight, weight[:, 0] if bias is None else bias), wanted, strict=True)
    ]
    parts = x.new_empty(0 if squares is None else 2, dtype=CrossEntropy.wide(dtype))
    return x.new_empty((), dtype=of_loss), made[0], made[1], made[2], parts


@register_flop_formula(torch.ops.autotuner.linear_cross_entropy)
def _flop(x: tuple[int, int], weight: tuple[int, int], *_: Any, **__: Any) -> int:
    """Return the flop of the product that makes the logits."""
    return 2 * x[0] * x[1] * weight[0]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[6]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:4])


def _backward(ctx: Any, grad: Tensor | None, *of_others: Tensor | None) -> tuple[Tensor | None, ...]:
    if of_others[3] is not None:
        raise RuntimeError(
            "a derivative of one part of a loss with a z-loss: only their sum has gradients; detach a part that is told"
        )
    if any(each is not None for each in of_others):
        raise RuntimeError(
            "a second derivative through a head whose loss is computed in chunks: its gradients are made in forward, "
            "and cannot be differentiated again; compute what needs create_graph=True outside of what is compiled"
        )
    made = [
        _times(each, grad) if want and grad is not None else None
        for each, want in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]
    return made[0], made[1], made[2], *(None,) * 6


def _times(gradient: Tensor, number: Tensor) -> Tensor:
    """Return a gradient times a number, which is not rounded to the gradient's type before."""
    wide = CrossEntropy.wide(gradient.dtype)
    return (gradient.to(wide) * number.to(wide)).to(gradient.dtype)


linear_cross_entropy.register_autograd(_backward, setup_context=_remember)
