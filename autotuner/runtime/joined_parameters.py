"""Parameters that move into one block of memory, as a plan reads them.

A plan may read several parameters as one, as query, key and value weights in one product. Where they lie apart, each
workspace copies them before its forward, and keeps the copies until its backward is over: 76 MiB for each layer of a
LLaMA with 1B parameters. A whole training step, which has the model and its optimizer to itself, moves such parameters
when the model is compiled. They stay the objects that they are, and each has a storage of its own, which is what is
saved of it.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._C import _to_dlpack
from torch.utils.dlpack import from_dlpack

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import Geometry, MemoryPlan
from autotuner.runtime.bound_parameters import copied_buffers
from autotuner.runtime.devices.storages import is_alone
from autotuner.runtime.parameter_memory import JOINED_PARAMETERS


def join_parameters(plan: MemoryPlan, lying: Sequence[Geometry], parameters: Sequence[Tensor | None]) -> int:
    """Move parameters of a region to where its plan reads them without a copy; return how many bytes have moved.

    Those of a buffer move together or not at all: not where one of them has its memory together with another tensor.

    Args:
        plan: of the region.
        lying: where it has each parameter.
        parameters: as the model holds them; None for what is no parameter of its own.
    """
    members: dict[int, list[tuple[Geometry, Tensor | None]]] = defaultdict(list)
    for lies, parameter in zip(lying, parameters, strict=True):
        members[lies.buffer].append((lies, parameter))
    moved = 0
    for number, found in members.items():
        own = [(lies, parameter) for lies, parameter in found if parameter is not None and _may_move(lies, parameter)]
        buffer = plan.buffers[number]
        are_apart = len({id(parameter) for _, parameter in own}) == len(found) > 1
        if not are_apart or sum(parameter.nbytes for _, parameter in own) != buffer.size_bytes:
            continue
        if not copied_buffers(*zip(*own, strict=True)):
            continue
        with torch.no_grad():
            base = torch.empty(buffer.elements, dtype=own[0][1].dtype, device=own[0][1].device)
            for lies, parameter in own:
                place = base.as_strided(lies.shape, lies.strides, lies.offset)
                place.copy_(parameter)
                place.whole = base  # type: ignore[attr-defined]
                # It has a storage of its own, which holds the view with its attribute.
                parameter.data = from_dlpack(_to_dlpack(place))
                JOINED_PARAMETERS[parameter.data_ptr()] = base
        moved += buffer.size_bytes
    return moved


def _may_move(lies: Geometry, parameter: Tensor) -> bool:
    """Say whether a parameter is torch's own, has its memory to itself, and would lie there as it does here."""
    return (
        type(parameter) is nn.Parameter
        and type(parameter.data) is Tensor
        and parameter.shape == lies.shape
        and parameter.stride() == tuple(lies.strides)
        and (lies.offset * parameter.element_size()) % alignment_bytes(parameter.device.type) == 0
        and is_alone(parameter)
        and parameter.data_ptr() not in JOINED_PARAMETERS
    )
