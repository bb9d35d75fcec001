"""Items that the loss of a batch is a mean of, so that losses of its micro-batches add up to it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.runtime.batches import IGNORED, structure_of

SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""Means over labels, by the names of transformers' functions: whether the first label of each row counts in none."""
INTEGERS = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class LossItems:
    """Counts what a loss is a mean of: labels that count, where it is known to be one of them, otherwise rows.

    Args:
        model: its name, for errors.
        shifts: whether the first label of each row counts in no loss; None where how labels count is not known.
        ignored: labels that count in no loss.
    """

    model: str
    shifts: bool | None
    ignored: tuple[int, ...] = (IGNORED,)

    def of_rows(self, batch: Any, rows: int) -> list[int]:
        """Return the number of items of each row.

        Raises:
            InputError: rows have different numbers of labels that count, and how the loss counts them is not known.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        of_labels = [key for key in batch if "label" in str(key)] if isinstance(batch, Mapping) else []
        if self.shifts is not None and of_labels == ["labels"] and isinstance(labels, Tensor) and _is_of(labels, rows):
            return self._counted(labels, self.shifts)
        tensors: list[Tensor] = []
        structure_of(batch, tensors)
        for tensor in tensors:
            found = self._counted(tensor, shifts=False) if _is_of(tensor, rows) else [0]
            if len(set(found)) > 1:
                raise InputError(
                    f"rows of this batch have {min(found)} to {max(found)} labels that count (not "
                    f"{' or '.join(map(str, self.ignored))}), and how the loss of {self.model} counts them is not "
                    "known: give loss_items, a function that returns how many things the loss of a micro-batch is a "
                    "mean of"
                )
        return [1] * rows

    def _counted(self, labels: Tensor, shifts: bool) -> list[int]:
        of_rows = labels.flatten(1)[:, int(shifts) :] if labels.dim() > 1 else labels[:, None]
        counts = torch.ones_like(of_rows, dtype=torch.bool)
        for each in self.ignored:
            counts &= of_rows != each
        found: list[int] = counts.sum(dim=1).tolist()
        return found


def _is_of(labels: Tensor, rows: int) -> bool:
    return labels.dtype in INTEGERS and labels.dim() > 0 and labels.shape[0] == rows


def items_of(model: nn.Module, has_own_loss: bool) -> LossItems:
    """Return what the loss of a model is a mean of.

    It is known of models of transformers whose forward calls one of its usual functions, or torch's CrossEntropyLoss.

    Args:
        has_own_loss: whether the caller's loss is another one than the model's.
    """
    name = "this step" if has_own_loss else type(model).__name__
    own: Any = next((module for module in model.modules() if hasattr(type(module), "loss_function")), None)
    if own is None or has_own_loss:
        return LossItems(name, None)
    other = getattr(own.config, "semantic_loss_ignore_index", None)
    ignored = (IGNORED,) if other is None else (IGNORED, int(other))
    code = inspect.unwrap(type(own).forward).__code__
    if "loss_function" in code.co_names:
        function = own.loss_function
        while isinstance(function, partial):
            function = function.func
        return LossItems(name, SHIFTS.get(getattr(function, "__name__", "")), ignored)
    losses = [each for each in code.co_names if each.endswith("Loss")]
    if losses == ["CrossEntropyLoss"] and "active_loss" not in code.co_varnames and other is None:
        return LossItems(name, "shift_labels" in code.co_varnames)
    return LossItems(name, None, ignored)


def shares(counts: Sequence[float]) -> list[float | None]:
    """Return what losses of micro-batches are divided by, by their items, so that they add up; None where one has none.

    Where none has any, the loss is what the model makes of nothing, by the first one.
    """
    total = sum(counts)
    if not total:
        return [1.0, *[None] * (len(counts) - 1)]
    return [total / count if count else None for count in counts]
