"""Memory of others that a plan's outputs may be written to, where it lies as the plan has them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import Geometry, MemoryPlan, Ports
from autotuner.runtime.early_gradients import as_own


def bases_in(plan: MemoryPlan, ports: Ports, places: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Return memory for a plan's buffers of gradients, as storages of their own, by the buffer's number.

    A buffer has several gradients where one product makes them: then their places have to lie one behind the other.

    Args:
        places: memory for the gradient of each of the ports' sources, or None.
    """
    members: dict[int, list[tuple[Geometry, Tensor | None]]] = {}
    if any(place is not None for place in places):
        for port, place in zip(ports.sources, places, strict=True):
            lies = plan.geometry(port, "grad_")
            members.setdefault(lies.buffer, []).append((lies, place))
    found = {}
    for number, of_buffer in members.items():
        base = _base_of(plan, number, of_buffer)
        if base is not None:
            found[number] = base
    return found


def _base_of(plan: MemoryPlan, number: int, members: Sequence[tuple[Geometry, Tensor | None]]) -> Tensor | None:
    """Return the memory of a buffer that these gradients fill; None where their places lie otherwise."""
    buffer = plan.buffers[number]
    dtype = getattr(torch, buffer.dtype)
    there = [(lies, place) for lies, place in members if place is not None]
    begins = {place.data_ptr() - lies.offset * place.element_size() for lies, place in there}
    are_alike = all(
        (place.dtype, place.shape, place.stride()) == (dtype, lies.shape, lies.strides) for lies, place in there
    )
    first = next((place for lies, place in there if not lies.offset), None)
    if (
        first is None
        or buffer.role != "output"
        or len(there) < len(members)
        or not are_alike
        or begins != {first.data_ptr()}
        or sum(place.numel() for _, place in there) != buffer.elements
        or first.data_ptr() % alignment_bytes(first.device.type)
    ):
        return None
    return as_own(first.as_strided((buffer.elements,), (1,)))
