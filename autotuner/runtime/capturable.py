"""Optimizers in a CUDA graph: which can be captured, and learning rates that reach the graph.

A captured step has its hyperparameters as constants. A learning rate is a tensor instead, where the optimizer takes
one: it is filled before each replay with what a scheduler has written to the parameter group.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def refusal(optimizer: Optimizer) -> str | None:
    """Say why an optimizer's step cannot be captured, or return None if it can."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, SGD) and not all("capturable" in group for group in optimizer.param_groups):
        return f"{name} has no option capturable, so its state may be kept on the host: use AdamW(..., fused=True), say"
    if has_hooks(optimizer):
        return f"hooks of {name} run Python in each step"
    return None


def has_hooks(optimizer: Optimizer) -> bool:
    """Say whether an optimizer has hooks on its steps."""
    return any(getattr(optimizer, f"_optimizer_step_{when}_hooks", ()) for when in ("pre", "post"))


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Set `capturable` in all groups, and move the counters of steps to the device."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            for parameter in group["params"]:
                counter = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
                if isinstance(counter, Tensor) and counter.device != device:
                    optimizer.state[parameter]["step"] = counter.to(device)


def takes_tensor(group: dict[str, Any]) -> bool:
    """Say whether the learning rate of a group may be a tensor on the device."""
    return "capturable" in group or bool(group.get("fused"))


def hyperparameters(optimizer: Optimizer) -> Hashable:
    """Return what a captured step has as constants: all values in the groups except those learning rates."""
    return tuple(
        tuple(
            (name, _comparable(value))
            for name, value in group.items()
            if name != "params" and not (name == "lr" and takes_tensor(group))
        )
        for group in optimizer.param_groups
    )


def _comparable(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value), value._version if value.is_cpu else 0
    return value if isinstance(value, Hashable) else repr(value)


class RateTensors:
    """The learning rates of an optimizer's groups as tensors, by the number of the group."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._tensors: dict[int, Tensor] = {}
        self._values: dict[int, float] = {}

    def follow(self) -> None:
        """Fill the tensors with what the groups say now."""
        for number, group in self._groups():
            rate = group["lr"]
            if number not in self._tensors:
                self._tensors[number] = torch.zeros((), dtype=torch.float32, device=self._device)
            if isinstance(rate, Tensor) and not rate.is_cpu:  # reading it would wait for the device
                self._tensors[number].copy_(rate.detach().reshape(()))
                self._values.pop(number, None)
            elif self._values.get(number) != float(rate):
                self._values[number] = float(rate)
                self._tensors[number].fill_(float(rate))

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Have the groups hold the tensors for a while, so that the optimizer's step reads these."""
        self.follow()
        groups = dict(self._groups())
        before = {number: group["lr"] for number, group in groups.items()}
        try:
            for number, group in groups.items():
                group["lr"] = self._tensors[number]
            yield
        finally:
            for number, group in groups.items():
                group["lr"] = before[number]

    def _groups(self) -> list[tuple[int, dict[str, Any]]]:
        return [(number, group) for number, group in enumerate(self._optimizer.param_groups) if takes_tensor(group)]
