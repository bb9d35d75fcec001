"""One pass over all layers: forward of some micro-batches, layer after layer, and backward in the other direction."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autotuner.errors import InputError
from autotuner.runtime.batches import moved_to
from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.layer_to_layer.attribute_watch import AttributeWatch
from autotuner.runtime.layer_to_layer.call import (
    LEAKS,
    AutocastState,
    RepeatedCall,
    called_again,
    called_once,
    repeated,
)
from autotuner.runtime.layer_to_layer.comparison import check_equal, tensors_of
from autotuner.runtime.layer_to_layer.edges import Key, first_uses, key_of, share_nodes
from autotuner.runtime.layer_to_layer.host_layer import HostLayer
from autotuner.runtime.layer_to_layer.lockstep import Lockstep
from autotuner.runtime.layer_to_layer.slots import Slots
from autotuner.runtime.layer_to_layer.stash import HostStash
from autotuner.runtime.plain_step import Loss

TWICE = "{} runs twice in one forward: layer to layer, a layer runs once"
Sums = list[Tensor | None]
"""The gradients of a layer's trained parameters, summed over micro-batches."""


class LayerPass:
    """Forward of micro-batches, and their backward.

    Each micro-batch runs in a thread, and pauses where it comes to a layer. When all have come there, the layer's
    weights are on the device, and the caller's thread runs it for one after the other.

    Args:
        slots: where weights are on the device.
        runtime: of the device.
        expected: the order in which layers will run; another one is only slower.
        checks: whether layers are checked to compute the same when they run again.
        watch: of attributes that micro-batches share, where that is checked.
        stash: where inputs of layers are kept on the host; None for the device.

    Attributes:
        marks: of the device before and after each layer, in forward and then in backward.
        waits: for each of these, whether the device had come to the last micro-batch once that was queued, so that it
            waits for calls.
        order: the layers that have run.
        calls: of each of them, a call for each micro-batch.
        losses: of the micro-batches, divided so that they add up to that of the step.
    """

    def __init__(
        self,
        slots: Slots,
        runtime: DeviceRuntime,
        expected: Sequence[HostLayer],
        *,
        checks: bool = False,
        stash: HostStash | None = None,
        watch: AttributeWatch | None = None,
    ) -> None:
        self._slots, self._runtime, self._expected, self._checks = slots, runtime, expected, checks
        self._stash, self._watch = stash, watch
        self.marks: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = [], []
        self.waits: list[bool] = []
        self.order: list[HostLayer] = []
        self.calls: list[list[RepeatedCall]] = []
        self.losses: list[Tensor] = []
        self._lockstep: Lockstep | None = None
        self._asked: list[HostLayer | None] = []
        self._calls: list[Callable[[], Any]] = []
        self._found: list[Any] = []
        # Gradients of tensors that several layers read, summed as they come.
        self._pending: list[dict[Key, Tensor]] = []
        # Torch refuses to keep graphs that were compiled with donated buffers, and asks for this to be as it was then.
        self._keeping = torch._functorch.config.patch(donated_buffer=False)
        self._goes_back = False

    @property
    def is_forward(self) -> bool:
        """True in the thread of a micro-batch."""
        return self._lockstep is not None and self._lockstep.current is not None

    def run_forward(
        self, loss: Loss, batches: Sequence[Any], divisors: Sequence[float] = (1.0,), *, backward: bool = True
    ) -> None:
        """Run forward of all micro-batches, and backward of what is behind their layers.

        Args:
            loss: of a batch, on the device.
            batches: the micro-batches.
            divisors: of their losses.
            backward: whether that backward runs.

        Raises:
            InputError: a loss that has not one element; a layer that cannot run this way.
        """
        count = len(batches)
        self._asked, self._pending = [None] * count, [{} for _ in batches]
        self._calls, self._found = [lambda: None] * count, [None] * count
        functions = [partial(self._micro_batch, loss, number, batch, divisor, backward)
                     for number, (batch, divisor) in enumerate(zip(batches, divisors, strict=True))]  # fmt: skip
        autocast, stream = AutocastState.now(self._runtime.device.type), self._runtime.current()
        modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]

        @contextmanager
        def around() -> Iterator[None]:
            own = self._runtime.guard(), self._runtime.on(stream), autocast.again(), torch.enable_grad()
            with ExitStack() as stack:
                for each in (*modes, *own):
                    stack.enter_context(each)
                yield

        self._slots.fetch(self._expected[0])
        try:
            with Lockstep(functions, around) as self._lockstep:
                paused = [self._lockstep.advance(number) for number in range(count)]
                while any(paused):
                    layer = self._next(paused)
                    with self._slots.reading(layer):
                        if len(self.order) < len(self._expected):
                            self._slots.fetch(self._expected[len(self.order)])
                        with self._timed(0, count) as begins, buffers_kept(layer):
                            for number in range(count):
                                begins(number)
                                self._found[number] = self._calls[number]()
                                paused[number] = self._lockstep.advance(number)
        finally:
            self._lockstep = None

    def _next(self, paused: Sequence[bool]) -> HostLayer:
        """Return the layer at which all micro-batches have paused."""
        asked = {layer.name: layer for layer in self._asked if layer is not None}
        if not all(paused) or len(asked) != 1:
            raise InputError(
                f"micro-batches of one step run different layers ({', '.join(asked)}): layer to layer, all of them run "
                "the same ones, in the same order"
            )
        (layer,) = asked.values()
        if layer in self.order:
            raise InputError(TWICE.format(layer.name))
        self.order.append(layer)
        self.calls.append([])
        return layer

    def _micro_batch(self, loss: Loss, number: int, batch: Any, divisor: float, backward: bool) -> None:
        """Run forward of a micro-batch, and backward of what is behind its layers."""
        device = self._runtime.device
        found = loss(moved_to(batch, device))
        if not isinstance(found, Tensor) or found.numel() != 1:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"the loss is {shape}: return a tensor of one element")
        if divisor != 1:
            found = found / divisor
        self.losses.append(found.detach())
        self._asked[number] = None
        if self.calls:
            self.calls[-1][number].inputs.check_unchanged(self.order[-1].name)
        if backward and not found.requires_grad:
            raise InputError("the loss has no gradient: it is detached, or no parameter is trained")
        if backward:
            before = [edge.node for calls in self.calls for edge in calls[number].inputs.edges.values()]
            self._backward([found], [None], keeps=share_nodes(found, before))
            self._check_leaks()

    def run_layer(self, layer: HostLayer, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Have a layer run for the micro-batch of this thread, once all have come to it; return its outputs."""
        assert self._lockstep is not None
        number = self._lockstep.current
        assert number is not None
        if self._goes_back:  # as in a checkpoint; no micro-batch pauses in its backward, where settings are others
            raise InputError(TWICE.format(layer.name))
        if not torch.is_grad_enabled():
            raise InputError(
                f"{layer.name} runs without gradients within a training step, as in a reentrant checkpoint or another "
                "pass under no_grad: layer to layer runs each layer again by itself, so switch checkpointing off, and "
                "make other passes outside of the loss"
            )
        autocast = AutocastState.now(self._runtime.device.type)
        self._asked[number] = layer
        run = partial(self._run_layer, layer, number, arguments, keywords, autocast)
        self._calls[number] = partial(copy_context().run, run)
        with nullcontext() if self._watch is None else self._watch.apart():
            self._lockstep.pause()
        found, self._found[number] = self._found[number], None
        return found

    def _run_layer(
        self,
        layer: HostLayer,
        number: int,
        arguments: Sequence[Any],
        keywords: dict[str, Any],
        autocast: AutocastState,
    ) -> Any:
        """Run a layer for a micro-batch, and note the call."""
        self._calls[number] = lambda: None
        if len(self.calls) > 1:
            self._keep(self.calls[-2][number])
        layer.check_autocast(partial(autocast.is_of, device_type=self._runtime.device.type))
        with ExitStack() as stack:
            if self._checks:
                stack.enter_context(buffers_kept(layer, values=True))
            if self._watch is not None:
                stack.enter_context(self._watch.within(layer.module))
            found, call = called_once(
                layer.name, layer.forward, arguments, keywords, autocast, self._runtime, self._slots.addresses
            )
        if self._checks and number == 0:
            check_equal(layer.name, tensors_of(found), tensors_of(repeated(layer.forward, call, self._runtime)[1]))
        self.calls[-1].append(call)
        return found

    def _keep(self, call: RepeatedCall) -> None:
        """Have the inputs of a call go to the host, where that is asked for, now that the caller is done with them."""
        call.inputs.check_unchanged(call.name)
        if self._stash is not None:
            self._stash.put(call)

    def run_backward(self, is_done: Callable[[HostLayer, Sums], None]) -> None:
        """Run the layers again, the last one first, and their backward.

        Args:
            is_done: is called with the gradients of each layer that has some, once they are complete.
        """
        uses = first_uses(self.calls)
        for place in reversed(range(len(self.order))):
            layer = self.order[place]
            with self._slots.reading(layer) as weights:
                if place:
                    self._slots.fetch(self.order[place - 1])
                trained = [weights[number] for number in layer.trained]
                sums: Sums = [None] * len(trained)
                with self._timed(1, len(self.calls[place])) as begins:
                    for number, call in enumerate(self.calls[place]):
                        begins(number)
                        self._take(place, number)
                        self._backward_of(place, number, call)
                        _add_gradients(sums, trained)
                        self._go_on(number, uses[number].pop(place, {}))
                if any(each is not None for each in sums):
                    is_done(layer, sums)
            self.calls[place] = []

    def _take(self, place: int, number: int) -> None:
        """Have the inputs of a call on the device, and those of the next call on their way there."""
        if self._stash is None:
            return
        self._stash.take(self.calls[place][number])
        if number + 1 < len(self.calls[place]):
            self._stash.fetch(self.calls[place][number + 1])
        elif place:
            self._stash.fetch(self.calls[place - 1][0])

    def _backward_of(self, place: int, number: int, call: RepeatedCall) -> None:
        """Run a layer again for one micro-batch, and add up the gradients of its inputs."""
        if all(gradient is None for gradient in call.gradients):
            return
        pending = self._pending[number]
        for leaf, gradient in called_again(self.order[place].forward, call, self._runtime).items():
            key = key_of(call.inputs.edges[leaf])
            pending[key] = gradient if key not in pending else pending[key] + gradient
        call.inputs.edges.clear()

    def _go_on(self, number: int, edges: dict[Key, GradientEdge]) -> None:
        """Run backward of a micro-batch behind tensors whose gradients are complete: at once, as autograd adds them."""
        pending = self._pending[number]
        there = [key for key in edges if key in pending]
        if there:
            self._backward([edges[key] for key in there], [pending.pop(key) for key in there], keeps=True)
            self._check_leaks()

    @contextmanager
    def _timed(self, phase: int, count: int) -> Iterator[Callable[[int], None]]:
        """Mark when the device begins and ends a layer's calls, in forward (0) or in backward (1).

        Args:
            count: of micro-batches.

        Returns:
            What is told the number of each micro-batch before its call.
        """
        began = last = self._runtime.mark()

        def begins(number: int) -> None:
            nonlocal last
            if 0 < number == count - 1:
                last = self._runtime.mark()

        yield begins
        self.waits.append(self._runtime.has_passed(last))
        self.marks[phase].append((began, self._runtime.mark()))

    def _backward(
        self, of: Sequence[Tensor] | Sequence[GradientEdge], gradients: Sequence[Tensor | None], keeps: bool
    ) -> None:
        """Run backward of what is in no layer.

        Args:
            keeps: whether its graph is kept, as parts of it may run once more.
        """
        self._goes_back = True
        with self._keeping:
            try:
                torch.autograd.backward(of, gradients, retain_graph=keeps)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):  # the weights of the next layer are in its slot
                    raise InputError(LEAKS.format("a layer")) from error
                raise
            finally:
                self._goes_back = False

    def _check_leaks(self) -> None:
        """Check, where that is asked for, that no gradient has come to a layer but by its outputs."""
        layer = self._slots.layer_with_gradient() if self._checks else None
        if layer is not None:
            raise InputError(LEAKS.format(layer))


@contextmanager
def buffers_kept(layer: HostLayer, *, values: bool = False) -> Iterator[None]:
    """Check that a layer's buffers are not written to inside.

    Args:
        values: whether those that are written to by other than torch's operators are found, too, by copies.

    Raises:
        InputError: one was written to.
    """
    buffers = list(layer.module.buffers())
    versions = [buffer._version for buffer in buffers]
    copies = [buffer.clone() for buffer in buffers] if values else []
    yield
    now = list(layer.module.buffers())
    if (
        [*map(id, buffers)] != [*map(id, now)]
        or versions != [buffer._version for buffer in now]
        or any(not torch.equal(before, buffer) for before, buffer in zip(copies, now, strict=False))
    ):
        raise InputError(
            f"{layer.name} writes to its buffers, as batch normalisation does, and layer to layer runs each layer "
            "twice a step: they would be written twice"
        )


def _add_gradients(sums: Sums, trained: Sequence[nn.Parameter]) -> None:
    """Add what backward has left in parameters to sums of float32 or more, and take it from them."""
    for place, parameter in enumerate(trained):
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            continue
        before = sums[place]
        if before is None:
            sums[place] = gradient.float() if gradient.dtype.itemsize < 4 else gradient
        else:
            before.add_(gradient)
