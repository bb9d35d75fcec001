"""AdamW of matrices whose gradients and copies travel rounded, in one pass over memory.

By torch's fused AdamW, a rounded gradient is written as float32 before, and the weight is read again to be rounded
behind: three passes, of which the update itself is about half.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from autotuner.kernels.inductor.fused import Compiled, compiled_for

log = logging.getLogger("autotuner.layer_to_layer")

STATE = ("exp_avg", "exp_avg_sq")
UNKNOWN = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of groups that are left to torch."""
NUMBERS = 7
"""That one update takes; see `_numbers`."""


class RoundedAdam:
    """Updates of float32 matrices of one optimizer, from rounded gradients.

    Args:
        optimizer: whose hyperparameters and state are read at each update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._loops: dict[int, Compiled] = {}
        self._compiles = type(optimizer) in (Adam, AdamW)

    def prepare(self, parameters: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        """Compile what updates such matrices, in the thread of the caller; where that is not possible, none is known.

        Args:
            dtype: of gradients and copies, one for all; None where none is rounded.
        """
        if dtype is None or not self._compiles:
            return
        for count in sorted({parameter.numel() for parameter in parameters} - self._loops.keys()):
            dtypes = (torch.float32, dtype, torch.float32, torch.float32, dtype)
            operands = [torch.empty(count, dtype=each) for each in dtypes]
            operands.append(torch.empty(NUMBERS))
            try:
                self._loops[count] = compiled_for(f"rounded adam {count} {dtype}", _moved, operands)
            except Exception:  # whatever a compiler that is not there, or not whole, ends with
                log.warning("AdamW's loop for rounded gradients cannot be compiled: torch's own is used", exc_info=True)
                self._compiles = False
                return

    def groups(self, parameters: Iterable[nn.Parameter]) -> dict[int, Mapping[str, Any]]:
        """Return the groups of those parameters that can be updated here, by their `id`.

        All others are the optimizer's: those of other types and groups, and those that it has not updated before,
        whose state it makes.
        """
        group_of = {id(each): group for group in self._optimizer.param_groups for each in group["params"]}
        return {
            id(each): group_of[id(each)]
            for each in parameters
            if each.numel() in self._loops
            and id(each) in group_of
            and _is_known(each, group_of[id(each)], self._optimizer.state.get(each, {}))
        }

    def update(
        self, parameter: nn.Parameter, group: Mapping[str, Any], gradient: Tensor, rounded: Tensor, scale: float
    ) -> None:
        """Update a parameter that can be updated here.

        Args:
            gradient: rounded.
            rounded: gets the new values, rounded.
            scale: that the gradient is multiplied by first.
        """
        state = self._optimizer.state[parameter]
        state["step"] += 1
        numbers = torch.tensor(_numbers(group, float(state["step"]), scale))
        operands = [parameter.detach(), gradient, *(state[name] for name in STATE), rounded]
        loop = self._loops[parameter.numel()]
        loop([*(each.view(-1) for each in operands), numbers])


def _is_known(parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Tell whether the loop updates a parameter as torch does."""
    tensors = [parameter, *(state.get(name) for name in STATE)]
    return (
        not any(group.get(name) for name in UNKNOWN)
        and (bool(group.get("decoupled_weight_decay")) or not group["weight_decay"])
        and isinstance(state.get("step"), Tensor)
        and all(
            isinstance(each, Tensor) and each.dtype == torch.float32 and each.is_cpu and each.is_contiguous()
            for each in tensors
        )
    )


def _numbers(group: Mapping[str, Any], step: float, scale: float) -> Sequence[float]:
    """Return the numbers of one update, in the order in which the loop takes them."""
    (one, two), rate = group["betas"], float(group["lr"])
    return (
        scale, 1 - rate * group["weight_decay"], 1 - one, 1 - two, rate / (1 - one**step), 1 / sqrt(1 - two**step),
        group["eps"],
    )  # fmt: skip


def _moved(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, rounded: Tensor, numbers: Tensor
) -> tuple[()]:
    """Write what one update makes of a weight and its state, and the weight rounded; all of one dimension."""
    scale, kept, one, two, rate, root, epsilon = numbers.unbind()
    scaled = gradient.float() * scale
    new_mean = mean + one * (scaled - mean)
    new_square = square + two * (scaled * scaled - square)
    moved = weight * kept - rate * new_mean / (new_square.sqrt() * root + epsilon)
    # Whatever reads a tensor is written before that tensor.
    for target, value in ((rounded, moved), (weight, moved), (mean, new_mean), (square, new_square)):
        target.copy_(value)
    return ()
