"""Models that several processes train, each with batches of its own: which this package exchanges gradients of."""

from dataclasses import dataclass
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from autotuner.runtime.processes import are_several


@dataclass(frozen=True)
class Together:
    """A model as a step sees it.

    Args:
        model: without DistributedDataParallel, where the step exchanges gradients in its place.
        group: of the processes that exchange them; None where the step exchanges nothing.
        is_equal: whether all processes have the same values already.
        refused: why gradients are left to the model's own way, and a step is not captured; None where they are not.
    """

    model: nn.Module
    group: Any = None
    is_equal: bool = False
    refused: str | None = None


def together(model: nn.Module, group: Any = None) -> Together:
    """Say how a step exchanges the gradients of a model.

    Args:
        model: perhaps in DistributedDataParallel.
        group: of torch; by default that of DistributedDataParallel, or all processes.
    """
    if isinstance(model, DistributedDataParallel):
        group = model.process_group if group is None else group
        if not are_several(group):
            return Together(model.module)
        if getattr(model, "_comm_hooks", None):
            return Together(model, refused="a communication hook of DistributedDataParallel exchanges gradients")
        return Together(model.module, group, is_equal=True)
    if not are_several(group):
        return Together(model)
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        return Together(model, refused="a part of the model is in DistributedDataParallel: have it be the outermost")
    if any(hasattr(p, "device_mesh") for p in model.parameters()) or any(_is_sharded(m) for m in model.modules()):
        return Together(model, refused="the parameters are sharded over several processes")
    return Together(model, distributed.group.WORLD if group is None else group)


def _is_sharded(module: nn.Module) -> bool:
    return any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(module).__mro__)
