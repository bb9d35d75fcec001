"""A bucket of gradients: flat memory that several processes exchange at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 16
"""Bytes; parameters begin at multiples of it, as vectorised kernels like it."""


@dataclass(eq=False)
class Bucket:
    """Gradients of one element type on one device.

    Args:
        parameters: of the gradients.
        owner: rank of the process that updates them, where the optimizer's state is shared out.

    Attributes:
        waits_for: parameters whose gradient is to come, by `id`.
        flat: the gradients one after the other; None until all are there.
        work: the exchange that has begun.
        own_norm: of this process's gradients, where they are clipped before the exchange.
    """

    parameters: list[nn.Parameter]
    owner: int = 0
    waits_for: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    work: Any = None
    own_norm: Tensor | None = None

    def __post_init__(self) -> None:
        unit = max(1, ALIGNMENT // self.parameters[0].element_size())
        offsets, self.elements = list[int](), 0
        for parameter in self.parameters:
            offsets.append(self.elements)
            self.elements += -(-parameter.numel() // unit) * unit
        self._has_gaps = self.elements != sum(parameter.numel() for parameter in self.parameters)
        like = [torch.empty_like(parameter, device="meta") for parameter in self.parameters]
        self._places = [(each.size(), each.stride(), at) for each, at in zip(like, offsets, strict=True)]

    @property
    def size(self) -> int:
        """In bytes."""
        return self.elements * self.parameters[0].element_size()

    def begin(self) -> None:
        """Begin a step."""
        self.waits_for = {id(parameter) for parameter in self.parameters}
        self.flat = self.work = self.own_norm = None

    def fill(self) -> Tensor:
        """Copy the gradients to flat memory, zeros where there is none, and have them be views of it."""
        first = self.parameters[0]
        make: Callable[..., Tensor] = torch.zeros if self._has_gaps else torch.empty
        flat = self.flat = make(self.elements, dtype=first.dtype, device=first.device)
        views = self._views(flat)
        there = [(view, p.grad) for view, p in zip(views, self.parameters, strict=True) if p.grad is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [gradient for _, gradient in there])
        for parameter, view in zip(self.parameters, views, strict=True):
            if parameter.grad is None:
                view.zero_()
            parameter.grad = view
        return flat

    def pack_parameters(self) -> None:
        """Write the parameters over the gradients, which are read no more."""
        assert self.flat is not None
        torch._foreach_copy_(self._views(self.flat), [parameter.detach() for parameter in self.parameters])

    def unpack_parameters(self) -> None:
        """Read the parameters from where the gradients were."""
        assert self.flat is not None
        torch._foreach_copy_([parameter.detach() for parameter in self.parameters], self._views(self.flat))

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part, strided as the parameter where that fills it."""
        return [flat.as_strided(size, stride, at) for size, stride, at in self._places]
