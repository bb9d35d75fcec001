"""The optimizer's updates in backward: a parameter is updated once its gradient is complete, and the gradient goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autotuner.errors import InputError
from autotuner.runtime.early_gradients import alike_over
from autotuner.runtime.handed_over import HandedOver, Ready
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
        self._handed = HandedOver(self._take_over)
        self._taken: dict[int, Tensor | None] = {}
        self._scratch: Tensor | None = None

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
        handles: list[Any] = []
        try:
            with self._handed.of(parameters):
                handles += [parameter.register_post_accumulate_grad_hook(self._collect) for parameter in parameters]
                yield
            self._updated.clear()
        finally:
            for handle in handles:
                handle.remove()
            self._pending.clear()
            self._taken.clear()
            self._scratch = None

    def _collect(self, parameter: Tensor) -> None:
        """Take a parameter whose gradient has come, and update those that wait where they are a part.

        Raises:
            InputError: its gradient goes on after it was updated.
        """
        is_taken = id(parameter) in self._taken
        if self._handed.has_come(parameter) and is_taken:  # what has come is memory that others share
            parameter.grad = self._taken[id(parameter)]
            return
        if id(parameter) in self._updated or is_taken:
            raise InputError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} comes in parts, as in reentrant "
                "checkpoints, or has a part that it had not in earlier steps, and optimizer_in_backward has taken the "
                "first one for all, which spoils the model: load it again, and leave optimizer_in_backward out, or "
                "checkpoint with use_reentrant=False"
            )
        self._add(parameter)

    def _take_over(self, ready: Ready) -> list[Tensor | None]:
        """Take gradients over that regions have made, and hand out memory that all of them share.

        So these are not there until the end of backward, where torch hands out all gradients of a compiled model.
        """
        for parameters, made in ready:
            for parameter, gradient in zip(parameters, made.gradients, strict=True):
                self._taken[id(parameter)] = gradient
                self._add(parameter)
        return [alike_over(self._shared(made.whole), made.whole) for _, made in ready]

    def _shared(self, like: Tensor) -> Tensor:
        """Return memory of as many bytes as a tensor has, or more."""
        if self._scratch is None or self._scratch.numel() < like.nbytes:
            self._scratch = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        return self._scratch

    def _add(self, parameter: Tensor) -> None:
        """Add a parameter whose gradient is there to those that wait, and update these where they are a part."""
        self._pending[id(parameter)] = parameter
        if sum(each.nbytes for each in self._pending.values()) >= self._part_bytes:
            self._update()

    def _update(self) -> None:
        for key, parameter in self._pending.items():
            if key in self._taken:
                parameter.grad = self._taken[key]
        update_only(self._optimizer, self._pending.values())
        for key, parameter in self._pending.items():
            parameter.grad = None
            if key in self._taken:
                self._taken[key] = None
        self._updated.update(self._pending)
        self._pending.clear()
