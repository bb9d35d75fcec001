"""A training step that brings one layer after the other to the device: parameters, gradients and optimizer on the host.

Layers are the outer loop and micro-batches the inner one, so that each weight is brought once for forward and once for
backward, whatever the number of micro-batches. Of forward, the inputs of layers are kept; backward runs each layer
again. (Pudipeddi et al., Training Large Neural Networks with Constant Memory using a New Execution Algorithm, 2020.)
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotuner.errors import InputError
from autotuner.plan.phrases import binary
from autotuner.runtime.batches import UnknownBatchError, structure_of
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.devices.protocol import HostLink
from autotuner.runtime.layer_to_layer.attribute_watch import AttributeWatch
from autotuner.runtime.layer_to_layer.call import AutocastState
from autotuner.runtime.layer_to_layer.comparison import tensors_of
from autotuner.runtime.layer_to_layer.host_layer import HostLayer
from autotuner.runtime.layer_to_layer.host_updates import Arrived, HostUpdates
from autotuner.runtime.layer_to_layer.layer_pass import LayerPass, Sums
from autotuner.runtime.layer_to_layer.micro_batches import MicroBatches, SizeChoice
from autotuner.runtime.layer_to_layer.replaced_forward import ReplacedForward
from autotuner.runtime.layer_to_layer.slots import Slots
from autotuner.runtime.layer_to_layer.stash import HostStash
from autotuner.runtime.layer_to_layer.stash_choice import LayeredNeeds, StashChoice
from autotuner.runtime.layer_to_layer.times import LayerTimes
from autotuner.runtime.optimizer_parts import update_only
from autotuner.runtime.plain_step import Loss


class LayerToLayerStep:
    """A training step of a model whose layers are on the host: `loss = step(batch)`, or `step(*micro_batches)`.

    Attributes:
        steps: how many there were.
        skipped: how many of them updated nothing, as a gradient was not finite.
        gradient_norm: the norm of all gradients before clipping, in the last step that did not update in backward.
        times: of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        layers: Sequence[HostLayer],
        *,
        device: torch.device,
        link: HostLink,
        max_norm: float | None = None,
        in_backward: bool = False,
        norm_per_layer: bool = False,
        stash_on_host: bool = False,
        budget_bytes: int | None = None,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        """Take over the layers; their modules' forward goes through this step from now on.

        Args:
            model: whose parameters the optimizer moves; what is in no layer is on the device.
            optimizer: of these; its steps can be taken in parts.
            loss: forward and loss of a batch; it may be replaced.
            layers: on the host, in the order of the model.
            device: that computes.
            link: to it.
            max_norm: gradients are scaled down where their norm is larger.
            in_backward: update a layer as soon as its gradients are there, and not after all are known to be finite.
            norm_per_layer: have `max_norm` be for the gradients of each layer, and of what is in none.
            stash_on_host: keep the inputs of layers on the host between forward and backward.
            budget_bytes: that a step may need on the device; then they are kept there where that leaves room, unless
                they are to be on the host.
            micro_batches: splits batches; by default, they are the micro-batches. Where it finds the size and there is
                no budget, what the device has free takes its place.

        Raises:
            InputError: a budget, and a device whose memory cannot be counted.
        """
        self._model, self._optimizer, self.loss = model, optimizer, loss
        self._layers, self._device, self._link = list(layers), device, link
        self._runtime = device_runtime(device)
        self._max_norm, self._in_backward, self._per_layer = max_norm, in_backward, norm_per_layer
        self._slots = Slots(self._layers, device, link)
        self._updates = HostUpdates(optimizer, self._layers, link, keeps_all=not in_backward)
        self._micro_batches = micro_batches or MicroBatches(None)
        if budget_bytes is not None and not self._runtime.has_own_memory:
            raise InputError(f"memory_budget is for a device with memory of its own, and this one is {device}")
        finds = self._micro_batches.size == "auto" and self._runtime.has_own_memory
        self._choice: StashChoice | None = None
        if budget_bytes is not None or finds:
            self._choice = StashChoice(budget_bytes, self._runtime.room_bytes, stays=stash_on_host)
        self._stash = HostStash(device, link) if stash_on_host or self._choice is not None else None
        self._order = self._layers
        self._pass: LayerPass | None = None
        self.steps = self.skipped = 0
        self.gradient_norm: Tensor | None = None
        self.times: LayerTimes | None = None
        self._is_closed, self._has_watched = False, False
        self._own = {id(parameter) for layer in self._layers for parameter in layer.parameters}
        self._replaced = [ReplacedForward(layer.module, partial(self._forward, layer)) for layer in self._layers]

    def run_as_they_are(self, modules: Iterable[nn.Module]) -> None:
        """Have modules that hold layers run as Python, in what is compiled around them."""
        self._replaced += [ReplacedForward(module, module.forward) for module in modules]

    def close(self) -> None:
        """Give the layers their own forward back; their parameters stay on the host."""
        for each in reversed(self._replaced):
            each.undo()
        self._replaced.clear()
        self._is_closed = True
        self._updates.close()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that are on the host."""
        return tuple(layer.name for layer in self._layers)

    @property
    def bytes_down(self) -> int:
        """Bytes of weights that went to the device since the step was made."""
        return self._slots.bytes_down

    @property
    def bytes_up(self) -> int:
        """Bytes of gradients that came from the device since the step was made."""
        return self._updates.bytes_up

    @property
    def slot_bytes(self) -> int:
        """Bytes of the device that weights of layers have."""
        return self._slots.bytes

    @property
    def needs(self) -> list[LayeredNeeds]:
        """Needs of steps under a memory budget, for each shape that there was."""
        return [] if self._choice is None else list(self._choice.needs.values())

    @property
    def micro_batch_choice(self) -> SizeChoice | None:
        """Sizes of micro-batches that were tried for batches as the last one, of `micro_batch_size="auto"`."""
        return self._micro_batches.last

    @property
    def stash_bytes(self) -> int:
        """Bytes of inputs of layers that were on the host at the end of the last forward."""
        return 0 if self._stash is None else self._stash.bytes

    def __str__(self) -> str:
        down, up = (sum(each) for each in zip(*(
            (layer.weights.total_bytes, layer.gradients.total_bytes) for layer in self._layers
        ), strict=True))  # fmt: skip
        said = (
            f"{len(self._layers)} layers on the host, {binary(down)} of weights and {binary(up)} of gradients; "
            f"{binary(self.slot_bytes)} on {self._device} for the weights of two"
        )
        needs = "" if self._choice is None else "".join(f"; {each}" for each in self._choice.needs.values())
        needs += "" if self.micro_batch_choice is None else f"; {self.micro_batch_choice}"
        return said + needs if self.times is None else f"{said}{needs}; {self.times}"

    def trains(self, model: nn.Module) -> bool:
        """Say whether it is a step of a model, or of one that holds or wraps it."""
        return any(part is self._model for part in model.modules())

    def weights(self) -> Iterator[nn.Parameter]:
        """Yield the parameters on the device that layers have run with."""
        return self._slots.parameters()

    def __call__(self, *batches: Any) -> Tensor:
        """Run one training step, and return its loss, detached.

        Args:
            batches: one batch, or several micro-batches: then the loss is the mean of theirs, and gradients are those
                of the mean. Tensors are moved to the device. Where the step splits batches, the loss of one is what it
                would be in one piece.

        Raises:
            InputError: no batch; a loss that has not one element; a layer that cannot run this way.
        """
        if self._is_closed:
            raise InputError("this step is closed: make a new one with autotuner.layer_to_layer")
        if not batches:
            raise InputError("a training step needs a batch: step(batch), or step(first, second) for micro-batches")
        arrived: list[Arrived] = []
        norms: dict[int, Tensor] = {}
        parts, choice = self._micro_batches.split(batches), self._micro_batches.last
        batches, divisors = tuple(each.batch for each in parts), [each.divisor for each in parts]
        shape = None if self._choice is None else self._shape(batches)
        is_measured = self._choice is not None and shape not in self._choice.needs
        meter = self._runtime.meter() if is_measured else None
        if meter is not None:
            meter.lap()
        began, busy_s, skipped = perf_counter(), self._updates.busy_s, self.skipped
        is_watched = len(batches) > 1 and not self._has_watched
        on_host = self._choice is None or self._choice.is_on_host(shape)
        with nullcontext() if choice is None else choice.trying():
            with self._passing(on_host, is_watched) as run:
                run.run_forward(self.loss, batches, divisors)
                self._check_some_ran(run)
                for layer in self._layers:
                    layer.check_gradients()
                copied = self._copied()
                run.run_backward(partial(self._layer_is_done, arrived, norms))
                self._update(arrived, norms)
                self._note(run, copied, perf_counter() - began, self._updates.busy_s - busy_s)
            self._order = run.order
            self._has_watched |= is_watched
            self.steps += 1
            if self._choice is not None and meter is not None:
                slots = f"{binary(self.slot_bytes)} for the weights of two layers"
                self._choice.note(shape, meter, self.stash_bytes, slots)
        if choice is not None and self.times is not None and self.skipped == skipped:
            size = choice.size
            choice.note(self.times, partial(self._has_room, shape))
            if choice.size != size and self._stash is not None:
                self._stash.release()
        total = run.losses[0]
        for loss in run.losses[1:]:
            total = total + loss
        return total

    @contextmanager
    def example_calls(self, batch: Any) -> Iterator[Iterator[tuple[HostLayer, tuple[Any, ...], dict[str, Any]]]]:
        """Run forward of a batch, and hand out the call of each layer, whose weights are on the device meanwhile."""

        def calls() -> Iterator[tuple[HostLayer, tuple[Any, ...], dict[str, Any]]]:
            for layer, (call,) in zip(run.order, run.calls, strict=True):
                if self._stash is not None:
                    self._stash.take(call)
                _, arguments, keywords = call.inputs.arguments()
                with self._slots.reading(layer), call.autocast.again():
                    yield layer, arguments, keywords

        with self._runtime.forked_random(), self._passing() as run:
            run.run_forward(self.loss, [batch], backward=False)
            self._check_some_ran(run)
            yield calls()

    def _has_room(self, shape: Hashable, size: int, other: int) -> bool:
        """Say whether micro-batches of another size fit, by what those of this size and shape needed."""
        return self._choice is None or self._choice.has_room_for(shape, other / size)

    def _shape(self, batches: Sequence[Any]) -> Hashable:
        """Return what batches have in common that need the same memory."""
        try:
            return structure_of(tuple(batches), [])
        except UnknownBatchError as error:
            raise InputError(
                f"memory_budget goes with batches of tensors, in mappings, lists or tuples, and {error}"
            ) from None

    @contextmanager
    def _passing(self, stashes: bool = True, watches: bool = False) -> Iterator[LayerPass]:
        """Have the layers run in a pass for a while; nothing of it is left behind.

        Args:
            stashes: whether inputs of layers are kept on the host, where that was asked for.
            watches: whether it is checked that micro-batches leave each other's tensors alone.
        """
        for layer in self._layers:
            layer.check()
            layer.refresh()
        self._clear_gradients()
        self._slots.forget()
        self._slots.tickets.clear()
        self._updates.tickets.clear()
        if self._stash is not None:
            self._stash.begin()
        run = self._pass = LayerPass(
            self._slots, self._runtime, self._order, checks=self.steps == 0, stash=self._stash if stashes else None,
            watch=AttributeWatch(self._model) if watches else None,
        )  # fmt: skip
        try:
            with self._runtime.guard():
                yield run
        finally:
            self._updates.finish()
            self._pass = None
            self._clear_gradients()
            self._slots.forget()
            if self._stash is not None:
                self._stash.end()

    def _copied(self) -> tuple[int, int, int]:
        """Return how many copies there were in this pass: of weights, of gradients, of inputs."""
        return len(self._slots.tickets), len(self._updates.tickets), len(self._stash.tickets) if self._stash else 0

    def _note(self, run: LayerPass, copied: tuple[int, int, int], measured: float, host: float) -> None:
        """Note what the parts of a step took. What is asked for has come before the last update."""
        seconds = self._link.seconds
        stashed = self._stash.tickets if self._stash else []
        weights, _, inputs = copied
        forward, backward = (sum(self._runtime.elapsed_us(*pair) for pair in marks) / 1e6 for marks in run.marks)
        self.times = LayerTimes(
            forward=forward,
            backward=backward,
            down_forward=sum(map(seconds, self._slots.tickets[:weights])),
            down_backward=sum(map(seconds, [*self._slots.tickets[weights:], *stashed[inputs:]])),
            up_forward=sum(map(seconds, stashed[:inputs])),
            up_backward=sum(map(seconds, self._updates.tickets)),
            host=host, measured=measured, overlaps=self._in_backward, micro_batches=len(run.losses),
            waiting=sum(run.waits) / max(1, len(run.waits)),
        )  # fmt: skip

    def _check_some_ran(self, run: LayerPass) -> None:
        if not run.order:
            raise InputError(
                f"none of {', '.join(self.layers)} ran in the model's forward: it has to call them themselves"
            )

    def _forward(self, layer: HostLayer, *arguments: Any, **keywords: Any) -> Any:
        """Run a layer in place of its own forward."""
        if self._pass is not None and self._pass.is_forward:
            return self._pass.run_layer(layer, arguments, keywords)
        if torch.is_grad_enabled() and (
            layer.trained or any(tensor.requires_grad for tensor in tensors_of((arguments, keywords)))
        ):
            raise InputError(
                f"{layer.name} is on the host, and gradients are computed in step(batch) alone: call the model under "
                "torch.no_grad()"
            )
        kind = self._device.type
        layer.check_autocast(partial(AutocastState.now(kind).is_of, device_type=kind))
        layer.refresh()
        if layer is self._order[0]:
            self._slots.forget()
        with self._slots.reading(layer):
            place = self._order.index(layer) + 1 if layer in self._order else len(self._order)
            if place < len(self._order):
                self._slots.fetch(self._order[place])
            found = layer.forward(*arguments, **keywords)
            self._slots.wait_on_host(layer)  # the caller may write to the parameters next
        return found

    def _layer_is_done(self, arrived: list[Arrived], norms: dict[int, Tensor], layer: HostLayer, sums: Sums) -> None:
        """Send the gradients of a layer to the host, and update it where nothing else is waited for."""
        layer.check_gradients()
        if not self._in_backward or self._per_layer:
            there = [each for each in sums if each is not None]
            found = [torch.linalg.vector_norm(each) for each in there]
            of = [layer.parameters[n] for n, each in zip(layer.trained, sums, strict=True) if each is not None]
            norms.update(zip(map(id, of), found, strict=True))
            if self._per_layer and self._max_norm is not None:
                coefficient = self._coefficient(torch.linalg.vector_norm(torch.stack(found)))
                for each in there:
                    each.mul_(coefficient)
        packed = torch.empty(layer.gradients.total_bytes, dtype=torch.uint8, device=self._device)
        for view, gradient in zip(layer.gradients.views(packed), sums, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        arrived.append(self._updates.bring(layer, packed, [each is not None for each in sums]))
        if self._in_backward:
            self._updates.begin(arrived.pop())

    def _update(self, arrived: Sequence[Arrived], norms: dict[int, Tensor]) -> None:
        """Update what is left at the end of backward: all of it, or nothing where a gradient is not finite."""
        self._updates.wait()  # while layers are updated, the optimizer's groups have their parameters alone
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        resident = [each for each in trained if id(each) not in self._own and each.grad is not None]
        scale: float | None = None
        if not self._in_backward:
            for layer in self._layers:
                layer.check_gradients()
            norms |= {id(p): torch.linalg.vector_norm(p.grad) for p in resident if p.grad is not None}
            ordered = [norms[id(parameter)] for parameter in trained if id(parameter) in norms]
            norm = self.gradient_norm = torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.zeros(())
            if not bool(torch.isfinite(norm)):
                self.skipped += 1
                return
            if self._max_norm is not None and not self._per_layer:
                scale = float(self._coefficient(norm))
        for each in arrived:
            self._updates.begin(each, scale)
        self._updates.wait()
        if self._per_layer and self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(resident, self._max_norm)
        for parameter in resident:
            if scale is not None and parameter.grad is not None:
                parameter.grad.mul_(scale)
        update_only(self._optimizer, resident)

    def _coefficient(self, norm: Tensor) -> Tensor:
        """Return what gradients of a norm are multiplied by, as torch's own clipping has it."""
        assert self._max_norm is not None
        return (self._max_norm / (norm + 1e-6)).clamp(max=1.0)

    def _clear_gradients(self) -> None:
        self._slots.clear_gradients()
        for parameter in self._model.parameters():
            parameter.grad = None
