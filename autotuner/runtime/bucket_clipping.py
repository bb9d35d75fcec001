"""Clipping of gradients in the buckets of DistributedDataParallel, beside backward."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from autotuner.errors import InputError

TINY = 1e-6
"""Added to norms, as `torch.nn.utils.clip_grad_norm_` does."""


class BucketClipping:
    """Clips the gradients of a model in DDP by norms that are taken of each bucket as it is exchanged.

    Args:
        model: whose communication hook this becomes.
        max_norm: of all gradients.
        per_bucket: each process clips each bucket before the exchange, to its share of `max_norm` by its number of
            elements: nothing waits for the last bucket, and the values are others.

    Raises:
        InputError: `model` is not in DDP, or `max_norm` is not above 0.
    """

    def __init__(self, model: DistributedDataParallel, max_norm: float, per_bucket: bool = False) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise InputError(f"clipping in buckets is for DistributedDataParallel; given: {type(model).__name__}")
        if not max_norm > 0:
            raise InputError(f"max_norm is above 0; given: {max_norm}")
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._count = sum(each.numel() for each in self._parameters)
        self._max_norm, self._per_bucket, self._group = max_norm, per_bucket, model.process_group
        self._norms: dict[int, Tensor] = {}
        try:
            model.register_comm_hook(None, self._exchange)
        except RuntimeError as error:
            raise InputError(f"the model takes no communication hook: {error}") from error

    def _exchange(
        self,
        _: Any,
        bucket: distributed.GradBucket,  # type: ignore[name-defined]  # the annotation that DDP wants to see
    ) -> torch.futures.Future[Tensor]:
        """Average a bucket over the processes, and note its norm."""
        gradients, index = bucket.buffer(), bucket.index()
        if index in self._norms:  # of a backward whose gradients were not clipped
            self._norms.clear()
        # Written on another stream than the one that reads it: so it is made here, and not there.
        norm = self._norms[index] = torch.zeros((), dtype=torch.float32, device=gradients.device)
        if self._per_bucket:
            norm.copy_(torch.linalg.vector_norm(gradients, dtype=torch.float32))
            share = self._max_norm * sqrt(gradients.numel() / self._count)
            gradients.mul_(coefficient(share, norm).to(gradients.dtype))
        gradients.div_(self._group.size())
        exchanged: Any = distributed.all_reduce(gradients, group=self._group, async_op=True)

        def noted(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            found: Tensor = future.value()[0]
            if not self._per_bucket:
                norm.copy_(torch.linalg.vector_norm(found, dtype=torch.float32))
            return found

        made: torch.futures.Future[Tensor] = exchanged.get_future().then(noted)
        return made

    def clip(self) -> Tensor:
        """Scale all gradients, where their norm is above `max_norm`, in one pass; call it before the optimizer.

        Returns:
            Their norm before that; with `per_bucket`, of this process's own ones before they were clipped.

        Raises:
            InputError: no gradients were exchanged since the last call.
        """
        if not self._norms:
            raise InputError(
                "no gradients were exchanged since the last call of clip: run backward before, not in no_sync"
            )
        total: Tensor = torch.linalg.vector_norm(torch.stack(list(self._norms.values())))
        self._norms.clear()
        if not self._per_bucket:
            gradients = [each.grad for each in self._parameters if each.grad is not None]
            torch._foreach_mul_(gradients, coefficient(self._max_norm, total))
        return total


def coefficient(limit: float, norm: Tensor) -> Tensor:
    """Return the factor that scales gradients of a norm down to a limit; 1 where they are below."""
    return torch.clamp(limit / (norm + TINY), max=1.0)
