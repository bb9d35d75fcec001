"""A bucket of gradients: flat memory that several processes exchange at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.ir.device import alignment_bytes

ALIGNMENT = 16
"""Bytes; parameters begin at multiples of it at least, as vectorised kernels like it."""


@dataclass(eq=False)
class Bucket:
    """Gradients of one element type on one device.

    Args:
        parameters: of the gradients, which begin at multiples of what the device's kernels are measured with.
        owner: rank of the process that updates them, where the optimizer's state is shared out.

    Attributes:
        waits_for: parameters whose gradient is to come, by `id`.
        taken: those whose gradient was taken over before torch has it, by `id`.
        flat: the gradients one after the other; None until the first one is there.
        is_sent: whether all were there, and are exchanged.
        work: the exchange that has begun.
        own_norm: of this process's gradients, where they are clipped before the exchange.
    """

    parameters: list[nn.Parameter]
    owner: int = 0
    waits_for: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    is_sent: bool = False
    work: Any = None
    own_norm: Tensor | None = None

    def __post_init__(self) -> None:
        first = self.parameters[0]
        unit = max(ALIGNMENT, alignment_bytes(first.device.type)) // first.element_size()
        offsets, self.elements = list[int](), 0
        for parameter in self.parameters:
            offsets.append(self.elements)
            self.elements += -(-parameter.numel() // unit) * unit
        self._has_gaps = self.elements != sum(parameter.numel() for parameter in self.parameters)
        like = [torch.empty_like(parameter, device="meta") for parameter in self.parameters]
        self._number = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._places = [(each.size(), each.stride(), at) for each, at in zip(like, offsets, strict=True)]

    @property
    def size(self) -> int:
        """In bytes."""
        return self.elements * self.parameters[0].element_size()

    def begin(self) -> None:
        """Begin a step."""
        self.waits_for = {id(parameter) for parameter in self.parameters}
        self.taken, self.is_sent = set(), False
        self.flat = self.work = self.own_norm = None

    def taken_over(self, parameter: nn.Parameter) -> Tensor:
        """Count a gradient as taken over that torch does not have yet, and return where it is to be copied to."""
        self.taken.add(id(parameter))
        self.waits_for.discard(id(parameter))
        return self.view_of(parameter)

    def view_of(self, parameter: nn.Parameter) -> Tensor:
        """Return where the gradient of a parameter lies."""
        size, stride, at = self._places[self._number[id(parameter)]]
        return self._opened().as_strided(size, stride, at)

    def fill(self) -> Tensor:
        """Copy the gradients that are left to flat memory, zeros where there is none, and have them be views of it."""
        flat = self._opened()
        left = [
            (view, parameter)
            for view, parameter in zip(self._views(flat), self.parameters, strict=True)
            if id(parameter) not in self.taken
        ]
        there = [(view, parameter.grad) for view, parameter in left if parameter.grad is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [gradient for _, gradient in there])
        for view, parameter in left:
            if parameter.grad is None:
                view.zero_()
            parameter.grad = view
        return flat

    def _opened(self) -> Tensor:
        if self.flat is None:
            first = self.parameters[0]
            make: Callable[..., Tensor] = torch.zeros if self._has_gaps else torch.empty
            self.flat = make(self.elements, dtype=first.dtype, device=first.device)
        return self.flat

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
