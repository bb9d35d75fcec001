"""Gradients that buckets take over from regions while backward goes on.

A gradient that a region hands over is the whole one where nothing else in the compiled graph reads its parameter.
Whether something beside the graph does is seen by its address, once torch has it: torch adds gradients up in other
memory than that of one which somebody else holds. Only parameters of which that was so in earlier steps are taken over.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from autotuner.runtime.early_gradients import Made, in_place_of, taken_by
from autotuner.runtime.gradient_bucket import Bucket


class Buckets(Protocol):
    """What gradients are taken over for."""

    def note_arrival(self, parameter: Tensor) -> None: ...
    def open_bucket_of(self, parameter: Tensor) -> Bucket | None: ...
    def launch_ready(self) -> None: ...


class HandedOver:
    """Takes over gradients of which it is known that they are whole; see `Taker`."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._by_address: dict[int, nn.Parameter] = {}
        self._are_whole: set[int] = set()
        self._are_not: set[int] = set()
        self._at: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []

    @contextmanager
    def of(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Take over gradients of some parameters in the backward that runs in it."""
        self._by_address = {parameter.data_ptr(): parameter for parameter in parameters}
        self._at, self._kept = {}, []
        try:
            with taken_by(self):
                yield
        finally:
            self._at, self._kept = {}, []

    def take(self, made: Sequence[Made]) -> list[Tensor]:
        found, copied = [], list[tuple[Tensor, Tensor]]()
        for each in made:
            handed, known = each.whole, self._known(each)
            buckets = self._early_buckets(known)
            if buckets:
                views = [bucket.taken_over(parameter) for bucket, parameter in zip(buckets, known, strict=True)]
                copied += zip(views, each.gradients, strict=True)
                own = in_place_of(each.whole, views)
                handed = each.whole if own is None else own
            self._note(known, handed)
            found.append(handed)
        if copied:
            torch._foreach_copy_([view for view, _ in copied], [gradient for _, gradient in copied])
            self._buckets.launch_ready()
        return found

    def _known(self, made: Made) -> list[nn.Parameter]:
        """Return the parameters whose gradients these are; none where these may not be all that torch gives them."""
        own = [self._by_address.get(each.data_ptr()) for each in made.parameters]
        known = [p for p, gradient in zip(own, made.gradients, strict=True) if p is not None and _is_first(p, gradient)]
        if len(known) < len(own):
            return []
        for parameter in known:
            self._buckets.note_arrival(parameter)
        return [] if any(id(parameter) in self._are_not for parameter in known) else known

    def _early_buckets(self, known: Sequence[nn.Parameter]) -> list[Bucket]:
        """Return the bucket of each parameter; none where something is in the way of taking them over."""
        found = [self._buckets.open_bucket_of(p) for p in known if id(p) in self._are_whole]
        there = [bucket for bucket in found if bucket is not None]
        return there if len(there) == len(known) else []

    def _note(self, known: Sequence[nn.Parameter], handed: Tensor) -> None:
        for parameter, gradient in zip(known, handed.unbind(0) if len(known) > 1 else [handed], strict=False):
            if id(parameter) in self._at:
                self._turned_out(parameter, is_whole=False)
            self._at[id(parameter)] = gradient.data_ptr()
        if known:
            self._kept.append(handed.untyped_storage())  # so nothing is added to it in place

    def has_come(self, parameter: Tensor) -> bool:
        """Say, once torch has a parameter's gradient, whether it is the one that was handed over."""
        at = self._at.get(id(parameter))
        if at is None:
            return False
        is_whole = id(parameter) not in self._are_not and parameter.grad is not None and parameter.grad.data_ptr() == at
        self._turned_out(parameter, is_whole=is_whole)
        return is_whole

    def _turned_out(self, parameter: Tensor, *, is_whole: bool) -> None:
        if is_whole:
            self._are_whole.add(id(parameter))
        else:
            self._are_not.add(id(parameter))
            self._are_whole.discard(id(parameter))


def _is_first(parameter: nn.Parameter, gradient: Tensor) -> bool:
    """Tell whether a gradient is the parameter's only one so far, as it will be handed to it."""
    return (
        parameter.grad is None
        and not parameter._backward_hooks
        and (parameter.shape, parameter.dtype, parameter.device) == (gradient.shape, gradient.dtype, gradient.device)
    )
