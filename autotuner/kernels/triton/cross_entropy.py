"""Launches Triton's program of cross entropy."""

import torch
import triton
from torch import Tensor

from autotuner.kernels.torch.cross_entropy import CrossEntropy
from autotuner.kernels.triton.cross_entropy_program import row_of_cross_entropy

BLOCK = 2048
"""Logits of a row that are in registers at a time."""


def rows_of_cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor | None, settings: CrossEntropy, *, gradient: bool,
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As the function of this name in `autotuner.kernels.torch.cross_entropy`, for float32 and bfloat16."""
    rows, words = logits.shape
    losses = logits.new_empty(rows, dtype=CrossEntropy.wide(logits.dtype))
    squared = None if squares is None else torch.empty_like(losses)
    if rows:
        row_of_cross_entropy[(rows,)](
            logits, labels, labels if weight is None else weight, losses,
            labels if squares is None else squares, losses if squared is None else squared, logits.stride(0), words,
            IGNORED=settings.ignored, SMOOTHING=settings.smoothing, FACTOR=settings.factor, CAP=settings.cap,
            GRADIENT=gradient, WEIGHTED=weight is not None, SQUARED=squares is not None,
            BLOCK=min(BLOCK, triton.next_power_of_2(words)), num_warps=8,
        )  # fmt: skip
    return losses, squared
