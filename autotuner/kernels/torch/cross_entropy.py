"""Cross entropy of rows of logits, and its gradient in the memory of the logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CrossEntropy:
    """The loss that a model makes of logits: scores are factor * logits, or cap * tanh(factor * logits).

    Args:
        ignored: a label whose row counts nothing.
        mean: the loss is the mean of the rows that count; else their sum.
        smoothing: share of the target that is spread over all words.
        factor: of the logits.
        cap: of the scores; 0 for none.
    """

    ignored: int = -100
    mean: bool = True
    smoothing: float = 0.0
    factor: float = 1.0
    cap: float = 0.0

    @staticmethod
    def wide(dtype: torch.dtype) -> torch.dtype:
        """Return the type in which scores of logits are computed."""
        return torch.float64 if dtype is torch.float64 else torch.float32


def rows_of_cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor | None, settings: CrossEntropy, *, gradient: bool,
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return each row's loss, and its log-sum-exp squared times `squares`, in float32 or wider.

    The logits are overwritten: their memory is used.

    Args:
        logits: (rows, words).
        labels: (rows,), int64, each below the number of words, or the one that is ignored.
        weight: one number of the losses' type, by which gradients are multiplied; None for 1.
        settings: of the loss.
        gradient: whether the logits are overwritten by the gradient of all that is returned, summed up.
        squares: (rows,), of the losses' type: by which the square of each row's log-sum-exp is multiplied, of rows
            that are ignored too; None where squares count nothing.
    """
    words = logits.shape[1]
    scores = logits.to(CrossEntropy.wide(logits.dtype))
    if settings.factor != 1:
        scores.mul_(settings.factor)
    slope = None
    if settings.cap:
        scores.tanh_()
        slope = torch.addcmul(scores.new_ones(()), scores, scores, value=-1) if gradient else None
        scores.mul_(settings.cap)
    counts = labels != settings.ignored
    places = labels.where(counts, 0)[:, None]
    of_label = scores.gather(1, places)[:, 0]
    spread = scores.mean(1) if settings.smoothing else 0.0
    highest = scores.amax(1, keepdim=True)
    total = scores.sub_(highest).exp_().sum(1, keepdim=True)
    whole = total.log().add_(highest)[:, 0]
    losses = (whole - (1 - settings.smoothing) * of_label - settings.smoothing * spread).where(counts, 0)
    squared = None if squares is None else whole.square().mul_(squares)
    if not gradient:
        return losses, squared
    share = counts[:, None].to(scores.dtype)
    if weight is not None:
        share = (share * weight).where(counts[:, None], 0)  # of a mean over no rows, the weight is infinite
    of_total = share if squares is None else share + (2 * squares * whole)[:, None]
    scores.mul_(of_total / total)
    if settings.smoothing:
        scores.sub_(share * (settings.smoothing / words))
    scores.scatter_add_(1, places, share * (settings.smoothing - 1))
    if slope is not None:
        scores.mul_(slope).mul_(settings.factor * settings.cap)
    elif settings.factor != 1:
        scores.mul_(settings.factor)
    if scores is not logits:
        logits.copy_(scores)
    return losses, squared
