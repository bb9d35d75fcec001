"""The optimizer's updates in backward: a parameter is updated once its gradient is complete, and the gradient goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autotuner.errors import InputError
from autotuner.runtime.optimizer_parts import refusal_of_parts, update_only
from autotuner.runtime.processes import are_several

PART_BYTES = 64 << 20
"""Gradients that are collected before their parameters are updated together: few enough to save memory, and enough for
one kernel of the optimizer to be worth its launch."""


class UpdatesInBackward:
    """Updates the parameters of an optimizer during a backward, part after part.

    Each part is a step of the optimizer itself, with the other parameters left out of its groups: so each parameter is
    moved as by one step with all of them, bit by bit, where an optimizer moves each for itself.

    Args:
        optimizer: one of torch's.
        part_bytes: of gradients, from which on a part is updated; `PART_BYTES` by default. What is left at the end is
            left to the caller.
        group: of torch, whose processes train the model; all of them by default.

    Raises:
        InputError: an optimizer that does more in a step than to move each parameter for itself.
    """

    def __init__(self, optimizer: Optimizer, part_bytes: int | None = None, group: Any = None) -> None:
        reason = refusal_of_parts(optimizer)
        if reason is not None:
            raise InputError(f"optimizer_in_backward moves parameters part by part, and {reason}, or leave it out")
        self._optimizer, self._part_bytes = optimizer, PART_BYTES if part_bytes is None else part_bytes
        self._group = group
        self._pending: dict[int, Tensor] = {}
        self._updated: set[int] = set()

    @property
    def has_updated(self) -> bool:
        """True where a backward has updated a part of the parameters, and did not come to its end."""
        return bool(self._updated)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Update parameters while a backward runs in it, the one that completes their gradients.

        Raises:
            InputError: several processes train one model.
        """
        if are_several(self._group):
            raise InputError(
                "optimizer_in_backward updates a parameter before several processes have exchanged its gradient: "
                "leave it out where they train one model"
            )
        self._updated.clear()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(self._collect) for parameter in parameters]
        try:
            yield
            self._updated.clear()
        finally:
            for handle in handles:
                handle.remove()
            self._pending.clear()

    def _collect(self, parameter: Tensor) -> None:
        """Take a parameter whose gradient has come, and update those that wait where they are a part.

        Raises:
            InputError: its gradient goes on after it was updated.
        """
        if id(parameter) in self._updated:
            raise InputError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} comes in parts, as in reentrant "
                "checkpoints, and optimizer_in_backward has updated the parameter behind the first, which spoils the "
                "model: load it again, and leave optimizer_in_backward out, or checkpoint with use_reentrant=False"
            )
        self._pending[id(parameter)] = parameter
        if sum(each.nbytes for each in self._pending.values()) >= self._part_bytes:
            self._update()

    def _update(self) -> None:
        update_only(self._optimizer, self._pending.values())
        for parameter in self._pending.values():
            parameter.grad = None
        self._updated.update(self._pending)
        self._pending.clear()
