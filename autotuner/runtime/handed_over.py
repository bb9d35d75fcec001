"""Gradients that somebody takes over from regions while backward goes on, once it is known that they are whole.

A gradient that a region hands over is the whole one where nothing else in the compiled graph reads its parameter.
Whether something beside the graph does is seen by its address, once torch has it: torch adds gradients up in other
memory than that of one which somebody else holds. Only parameters of which that was so in earlier steps are taken over.

Of several micro-batches, the backward of the last one completes gradients. What earlier ones have left of a gradient is
added to it as it is taken over, and where it is not yet, once torch has it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autotuner.runtime.early_gradients import Made, in_place_of, taken_by
from autotuner.runtime.gradient_bucket import Bucket

Ready = Sequence[tuple[Sequence[nn.Parameter], Made]]
"""Gradients that may be taken over, with their parameters."""


class HandedOver:
    """Offers gradients that are known to be whole; see `Taker`.

    Args:
        take_over: takes what is offered of a region, and returns for each what is handed out in its place; None where
            it leaves it.
        arrived: is told of each parameter whose gradient is there.
        place_of: returns where the gradient of a parameter is to lie once it is taken over; None where it has no place.
    """

    def __init__(
        self,
        take_over: Callable[[Ready], Sequence[Tensor | None]],
        arrived: Callable[[Tensor], None] = lambda _: None,
        place_of: Callable[[nn.Parameter], Tensor | None] = lambda _: None,
    ) -> None:
        self._take_over, self._arrived, self._place_of = take_over, arrived, place_of
        self._by_address: dict[int, nn.Parameter] = {}
        self._are_whole: set[int] = set()
        self._are_not: set[int] = set()
        self._at: dict[int, int] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._earlier: dict[int, tuple[nn.Parameter, Tensor]] = {}

    @contextmanager
    def of(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Offer gradients of some parameters in the backward that runs in it.

        Not of those whose gradient a hook is to see: so it is entered before the caller's own hooks are there.
        """
        alone = Counter(parameter.data_ptr() for parameter in parameters)
        self._by_address = {
            parameter.data_ptr(): parameter
            for parameter in parameters
            if alone[parameter.data_ptr()] == 1 and parameter.numel() and not _has_hooks(parameter)
        }
        ids = {id(parameter) for parameter in parameters}
        self._are_whole &= ids
        self._are_not &= ids
        self._at, self._kept = {}, {}
        try:
            with taken_by(self):
                yield
        finally:
            self._at, self._kept = {}, {}
            for parameter, gradient in self._earlier.values():  # to whose gradient the backward did not come
                parameter.grad = gradient
            self._earlier = {}

    def place_of(self, parameter: Tensor) -> Tensor | None:
        own = self._by_address.get(parameter.data_ptr())
        is_whole = own is not None and id(own) in self._are_whole and id(own) not in self._at
        return self._place_of(own) if own is not None and is_whole else None

    def take(self, made: Sequence[Made]) -> list[Tensor]:
        known = [self._known(each) for each in made]
        is_ready = [bool(own) and all(id(p) in self._are_whole for p in own) for own in known]
        ready = [(own, each) for own, each, is_one in zip(known, made, is_ready, strict=True) if is_one]
        self._add_earlier(ready)
        taken = iter(self._take_over(ready) if ready else ())
        found = []
        for own, each, is_one in zip(known, made, is_ready, strict=True):
            handed = next(taken) if is_one else None
            found.append(each.whole if handed is None else handed)
            self._note(own, found[-1])
        return found

    def has_come(self, parameter: Tensor) -> bool:
        """Say, once torch has a parameter's gradient, whether it is the one that was handed out.

        What earlier micro-batches have left of it is in it then.
        """
        self._kept.pop(id(parameter), None)
        at = self._at.get(id(parameter))
        self._at[id(parameter)] = 0  # a second part is not the whole one
        if at is None:
            return False
        is_whole = id(parameter) not in self._are_not and parameter.grad is not None and parameter.grad.data_ptr() == at
        self._turned_out(parameter, is_whole=is_whole)
        _, earlier = self._earlier.pop(id(parameter), (None, None))
        if earlier is not None and parameter.grad is not None:
            parameter.grad = earlier.add_(parameter.grad)
        return is_whole

    def _known(self, made: Made) -> list[nn.Parameter]:
        """Return the parameters whose gradients these are; none where these may not be all that torch gives them."""
        own = [self._by_address.get(each.data_ptr()) for each in made.parameters]
        known = [
            p for p, gradient in zip(own, made.gradients, strict=True) if p is not None and _are_alike(p, gradient)
        ]
        if len(known) < len(own):
            return []
        for parameter in known:
            self._arrived(parameter)
            if id(parameter) in self._at:
                self._turned_out(parameter, is_whole=False)
        return [] if any(id(parameter) in self._are_not for parameter in known) else known

    def _add_earlier(self, ready: Ready) -> None:
        """Add what earlier micro-batches have left to gradients that are taken over, in the memory of these."""
        added = [
            (gradient, parameter.grad)
            for parameters, made in ready
            for parameter, gradient in zip(parameters, made.gradients, strict=True)
            if parameter.grad is not None
        ]
        if added:
            torch._foreach_add_([gradient for gradient, _ in added], [earlier for _, earlier in added])
        for parameters, _ in ready:
            for parameter in parameters:
                parameter.grad = None

    def _note(self, known: Sequence[nn.Parameter], handed: Tensor) -> None:
        for parameter, gradient in zip(known, handed.unbind(0) if len(known) > 1 else [handed], strict=False):
            if parameter.grad is not None:  # else torch would add to it, and hand out nothing to compare
                self._earlier[id(parameter)] = parameter, parameter.grad
                parameter.grad = None
            self._at[id(parameter)] = gradient.data_ptr()
            self._kept[id(parameter)] = handed.untyped_storage()  # so nothing is added to it in place

    def _turned_out(self, parameter: Tensor, *, is_whole: bool) -> None:
        if is_whole:
            self._are_whole.add(id(parameter))
        else:
            self._are_not.add(id(parameter))
            self._are_whole.discard(id(parameter))


def into_buckets(ready: Ready, bucket_of: Callable[[nn.Parameter], Bucket | None]) -> list[Tensor | None]:
    """Copy gradients to the buckets that wait for them, unless they lie there, and return memory of these for each.

    Args:
        bucket_of: the bucket that waits for the gradient of a parameter; None where there is none.
    """
    found = list[Tensor | None]()
    copied = list[tuple[Tensor, Tensor]]()
    for parameters, made in ready:
        buckets = [each for each in map(bucket_of, parameters) if each is not None]
        if len(buckets) < len(parameters):
            found.append(None)
            continue
        views = [bucket.taken_over(parameter) for bucket, parameter in zip(buckets, parameters, strict=True)]
        moved = zip(views, made.gradients, strict=True)
        copied += [(view, gradient) for view, gradient in moved if view.data_ptr() != gradient.data_ptr()]
        found.append(in_place_of(made.whole, views))
    if copied:
        torch._foreach_copy_([view for view, _ in copied], [gradient for _, gradient in copied])
    return found


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Tell whether somebody sees, or changes, the gradient of a parameter on its way."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _are_alike(parameter: nn.Parameter, gradient: Tensor) -> bool:
    """Tell whether a gradient, and what there is of it already, are as torch would add them up in place."""
    earlier = parameter.grad
    return (parameter.shape, parameter.dtype, parameter.device) == (
        gradient.shape,
        gradient.dtype,
        gradient.device,
    ) and (earlier is None or earlier.layout is torch.strided)
