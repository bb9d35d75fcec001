"""A training step, operator by operator: forward, loss, backward, clipping and the optimizer's step."""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotuner.errors import InputError
from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.gradient_exchange import GradientExchange
from autotuner.runtime.host_randomness import HostRandomness
from autotuner.runtime.updates_in_backward import UpdatesInBackward

Loss = Callable[[Any], Tensor]
"""Computes the loss of a batch, a tensor of one element."""


class PlainStep:
    """Runs training steps of a model. Gradients are None before and after each.

    Args:
        model: whose parameters the optimizer moves.
        optimizer: of these.
        loss: forward and loss of a batch; it may be replaced.
        max_norm: gradients are scaled down where their norm is larger.
        in_backward: updates parameters as soon as their gradients are there. Not with `max_norm`, which needs all.
        exchange: with other processes that train the model; it clips in place of `max_norm`. Not with `in_backward`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        max_norm: float | None = None,
        in_backward: UpdatesInBackward | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:
        self._model, self._optimizer, self.loss = model, optimizer, loss
        self._max_norm, self._in_backward, self._exchange = max_norm, in_backward, exchange
        self._is_updating = False

    @property
    def frees_gradients(self) -> bool:
        """True where gradients go before all are there."""
        return self._in_backward is not None

    @property
    def may_round_otherwise(self) -> bool:
        """True where the optimizer's step may round as no other one does.

        Not where parts of it are taken in backward, nor where processes update the same parameters: these have to stay
        equal, however each of them runs its step.
        """
        return not self.frees_gradients and (self._exchange is None or self._exchange.shards)

    def run(self, batches: Sequence[Any], update: Callable[[], object] | None = None) -> tuple[Tensor, Tensor | None]:
        """Run a step.

        Args:
            batches: its micro-batches, one at least.
            update: the optimizer's step; by default its own.

        Returns:
            The mean of their losses, detached, and the norm of all gradients before clipping, where they are clipped.

        Raises:
            InputError: a loss that has not one element.
            PeerLostError: another process that trains the model has ended.
        """
        self.clear_gradients()
        self._is_updating = False
        if self._exchange is not None:
            self._exchange.begin()
        beside = self._in_backward or self._exchange
        total: Tensor | None = None
        with torch.enable_grad():
            for number, batch in enumerate(batches, 1):
                loss = self.loss(batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                    raise InputError(f"the loss is {given}: return a tensor of one element")
                if len(batches) > 1:
                    loss = loss / len(batches)
                with beside.within() if beside is not None and number == len(batches) else nullcontext():
                    torch.autograd.backward(loss)
                total = loss.detach() if total is None else total + loss.detach()
        norm = None
        if self._exchange is not None:
            norm = self._exchange.finish()
        elif self._max_norm is not None:
            trained = [p for group in self._optimizer.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(trained, self._max_norm)
        self._is_updating = True
        (update or self._optimizer.step)()
        if self._exchange is not None:
            self._exchange.updated()
        self.clear_gradients()
        assert total is not None
        return total, norm

    def clear_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        self._optimizer.zero_grad(set_to_none=True)

    def beginning(self, runtime: DeviceRuntime) -> Callable[[], bool]:
        """Return what has the model and all generators be as they are now, if the step from here on has failed.

        It says whether they are: not where parameters are updated already, or buffers have other values.
        """
        host, drawn, buffers = HostRandomness(), runtime.drawn_so_far(), list(self._model.buffers())
        versions = [buffer._version for buffer in buffers]

        def put_back() -> bool:
            self.clear_gradients()
            host.restore()
            drawn()
            gc.collect()  # what the step held may lie in circles
            has_updated = (
                self._is_updating
                or (self._in_backward is not None and self._in_backward.has_updated)
                or (self._exchange is not None and self._exchange.has_begun)
            )
            return not has_updated and [buffer._version for buffer in buffers] == versions

        return put_back
