"""The steps of Adam and AdamW in a captured step: all parameters in one pass over the device's memory.

torch's fused step does the same arithmetic. On an H200, where a plain pass moves 4.2 TB/s, it moves 2.8 with parameters
in bfloat16, and 3.5 in float32. Gradients that are clipped are scaled in that pass, too.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from autotuner.runtime.bucket_clipping import coefficient
from autotuner.runtime.capturable import RateTensors, has_hooks, make_capturable
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.loop_budget import optimizer_has_stepped

if TYPE_CHECKING:
    from autotuner.kernels.triton.adam import AdamTables

log = logging.getLogger("autotuner.training_step")

UNKNOWN = ("amsgrad", "maximize", "differentiable")
"""Options of groups that are left to torch."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE = ("exp_avg", "exp_avg_sq")


class OnePassUpdates:
    """Steps of an optimizer whose kernels are captured, and read tables that are written behind the capture.

    Compiles, and reserves the tables' memory: neither is possible while a step is captured.

    Args:
        optimizer: whose hyperparameters and state are read when a step is captured.
        device: of its parameters.
        max_norm: gradients are scaled down where their norm is larger.
        is_allowed: whether steps may be rounded otherwise than torch rounds; else they are all the optimizer's own.

    Attributes:
        is_in_use: whether the last step was taken in one pass.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, max_norm: float | None = None, is_allowed: bool = True
    ) -> None:
        self._optimizer, self._device, self._max_norm = optimizer, device, max_norm
        is_known_one = is_allowed and device_runtime(device).has_triton and is_known(optimizer)
        self._tables = _tables(optimizer, device, max_norm is not None) if is_known_one else None
        self._rates = RateTensors(optimizer, device)
        self.is_in_use = False

    @property
    def is_possible(self) -> bool:
        """True where there can be steps in one pass."""
        return self._tables is not None

    def step(self, norm: Tensor | None = None) -> None:
        """Take a step as the optimizer does, in one pass where that is known to be the same.

        Args:
            norm: of all gradients, which are scaled by it; None where they are not.
        """
        self._step(norm, is_captured=True)

    def step_now(self, norm: Tensor | None = None) -> None:
        """Take a step that is not captured, with the same values."""
        if self._tables is None:
            own_step(self._optimizer, norm, self._max_norm)
        else:
            make_capturable(self._optimizer, self._device)
            with self._rates.in_groups():
                self._step(norm, is_captured=False)
            self._tables.clear()

    def _step(self, norm: Tensor | None, *, is_captured: bool) -> None:
        tables = self._tables
        self.is_in_use = tables is not None and is_known(self._optimizer) and _has_added(tables, self._optimizer)
        if tables is None or not self.is_in_use:
            if tables is not None:
                tables.clear()
            own_step(self._optimizer, norm, self._max_norm)
            return
        if not is_captured:
            tables.write()
        limit = self._max_norm
        tables.launch(None if norm is None or limit is None else coefficient(limit, norm).float())

    def written(self) -> "OnePassUpdates":
        """Write the tables of the step that was captured, before it is replayed; its graph needs them from then on."""
        if self._tables is not None:
            self._tables.write()
            self._tables.clear()
        return self


def own_step(optimizer: Optimizer, norm: Tensor | None, max_norm: float | None) -> None:
    """Take an optimizer's own step, its gradients scaled down where their norm is larger than `max_norm`."""
    if norm is not None and max_norm is not None:
        clip_grads_with_norm_(trained(optimizer), max_norm, norm)
    optimizer.step()


def trained(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _tables(optimizer: Optimizer, device: torch.device, is_scaled: bool) -> "AdamTables | None":
    """Return tables for an optimizer's parameters; None where their programs cannot be compiled."""
    groups = optimizer.param_groups
    moved = [each for each in trained(optimizer) if each.requires_grad]
    kinds = {(each.dtype, _is_decoupled(group)) for group in groups for each in group["params"]}
    try:
        from autotuner.kernels.triton.adam import AdamTables, chunks, compile_for

        for dtype, is_decoupled in kinds:
            if dtype in TYPES:
                compile_for(dtype, device, is_decoupled=is_decoupled, is_scaled=is_scaled)
        return AdamTables(len(moved), sum(chunks(each.numel()) for each in moved), device)
    except Exception:  # whatever a compiler that is not there, or not whole, ends with
        log.warning("the optimizer's step in one pass cannot be compiled: torch's own is used", exc_info=True)
        return None


def is_known(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer is torch's own Adam or AdamW, and nothing else looks at its steps."""
    return (
        type(optimizer) in (Adam, AdamW)
        and _steps_as_made(optimizer)
        and not has_hooks(optimizer)
        and not hasattr(optimizer, "grad_scale")
        and not any(group.get(name) for group in optimizer.param_groups for name in UNKNOWN)
        and not any(isinstance(beta, Tensor) for group in optimizer.param_groups for beta in group["betas"])
    )


def _steps_as_made(optimizer: Optimizer) -> bool:
    """Tell whether a step does what its class says: schedules put a counter of calls around it, and no more."""
    own: Any = vars(optimizer).get("step")
    is_counted = getattr(own, "_wrapped_by_lr_sched", False) and own.__wrapped__ is type(optimizer).step
    behind = [hook for hook in _global_optimizer_post_hooks.values() if hook is not optimizer_has_stepped]
    return (own is None or is_counted) and not _global_optimizer_pre_hooks and not behind


def _is_decoupled(group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay"))


def _has_added(tables: "AdamTables", optimizer: Optimizer) -> bool:
    """Add what a step moves, and say whether that is all; not where some of it is moved otherwise by torch."""
    from autotuner.kernels.triton.adam import Moved, Numbers

    tables.clear()
    for group in optimizer.param_groups:
        rate, found = group["lr"], defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state.get(parameter, {})
            moved = Moved(parameter.detach(), parameter.grad, *(state.get(name) for name in (*STATE, "step")))
            is_known = (
                _are_alike((moved.value, moved.gradient, moved.first, moved.second))
                and all(_is_one_number(each, parameter.device) for each in (rate, moved.counter))
                # By other implementations, torch rounds what is between to the parameter's type.
                and (parameter.dtype == torch.float32 or bool(group.get("fused")))
            )
            if not is_known:
                return False
            found[parameter.dtype].append(moved)
        numbers = Numbers(tuple(group["betas"]), group["eps"], group["weight_decay"], _is_decoupled(group))
        if not all(tables.add(moved, rate, numbers) for moved in found.values()):
            return False
    return True


def _are_alike(tensors: Sequence[Any]) -> bool:
    """Tell whether tensors have one type, shape and order in memory, without holes."""
    value = tensors[0]
    return value.dtype in TYPES and all(
        type(each) is Tensor
        and each.layout == torch.strided
        and (each.dtype, each.device, each.shape, each.stride())
        == (value.dtype, value.device, value.shape, value.stride())
        for each in tensors
    ) and _has_no_holes(value)  # fmt: skip


def _has_no_holes(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements lie one behind the other, in any order of its axes."""
    step = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _is_one_number(given: Any, device: torch.device) -> bool:
    return isinstance(given, Tensor) and given.device == device and given.dtype == torch.float32 and given.numel() == 1
