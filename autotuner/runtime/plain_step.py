"""A training step, operator by operator: forward, loss, backward, clipping and the optimizer's step."""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from autotuner.errors import InputError
from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.gradient_exchange import GradientExchange
from autotuner.runtime.host_randomness import HostRandomness
from autotuner.runtime.one_pass_updates import OnePassUpdates, own_step, trained
from autotuner.runtime.parameter_gather import PartedUpdates
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
        exchange: with other processes that train the model; it takes norms, of all. Not with `in_backward`.
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
        self._scales_at_end = max_norm is not None and (exchange is None or not exchange.clips_before)
        self._is_updating = False
        self._agreed: OnePassUpdates | None = None

    @property
    def frees_gradients(self) -> bool:
        """True where gradients go before all are there."""
        return self._in_backward is not None

    def updates(self, device: torch.device) -> OnePassUpdates | PartedUpdates:
        """Return the optimizer's steps for a step that is captured.

        They are its own where parts of them are taken in backward. Processes that update the same parameters have to
        stay equal, however each of them runs its step: where one replays it, all take it in one pass, or none does.
        """
        if self._exchange is not None and self._exchange.shards:
            own, gather = self._exchange.parts(), self._exchange.gather
            return PartedUpdates(self._optimizer, own, gather, lambda: self._one_pass(device, True))
        is_shared = self._exchange is not None
        is_allowed = not self.frees_gradients and (not is_shared or self._agreed is not None)
        return self._one_pass(device, is_allowed)

    def agree(self, device: torch.device, captures: bool) -> None:
        """Find out, with the processes that update the same parameters, whether all can do so in one pass.

        Args:
            captures: whether this one captures steps.
        """
        if self._exchange is not None and not self._exchange.shards:
            updates = self._one_pass(device, captures)
            if all(can for (can,) in self._exchange.peers.told([int(updates.is_possible)])):
                self._agreed = updates

    def run(
        self, batches: Sequence[Any], update: Callable[[Tensor | None], object] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a step.

        Args:
            batches: its micro-batches, one at least.
            update: the optimizer's step, by the norm of all gradients where these are still to be scaled; by default as
                it is taken where nothing is captured.

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
                # What a checkpoint repeats in backward shares what this thread shares.
                in_this_thread = torch.autograd.set_multithreading_enabled(False)
                is_last = number == len(batches)
                with in_this_thread, beside.within() if beside is not None and is_last else nullcontext():
                    torch.autograd.backward(loss)
                total = loss.detach() if total is None else total + loss.detach()
        norm = None
        if self._exchange is not None:
            norm = self._exchange.finish()
        elif self._max_norm is not None:
            gradients = [each.grad for each in trained(self._optimizer) if each.grad is not None]
            norm = get_total_norm(gradients)
        self._is_updating = True
        (update or self._update)(norm if self._scales_at_end else None)
        if self._exchange is not None:
            self._exchange.updated()
        self.clear_gradients()
        assert total is not None
        return total, norm

    def _one_pass(self, device: torch.device, is_allowed: bool) -> OnePassUpdates:
        return OnePassUpdates(self._optimizer, device, self._max_norm if self._scales_at_end else None, is_allowed)

    def _update(self, norm: Tensor | None) -> None:
        if self._exchange is not None and self._exchange.shards:
            self._exchange.gather().run(self._optimizer, lambda _: own_step(self._optimizer, norm, self._max_norm))
        elif self._agreed is not None and self._exchange is not None and not self._exchange.are_plain:
            self._agreed.step_now(norm)
        else:
            own_step(self._optimizer, norm, self._max_norm)

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
