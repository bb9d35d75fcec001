"""A tuned module inside a model that torch.compile compiles: one opaque operator, with a backward of its own.

torch.ops.autotuner.tuned_layer(key, place, x, mask, parameters, strides, stacks) -> (y, ticket). The compiler knows
shapes and strides and sees nothing of what runs. It takes two calls with the same arguments for one, so each place in
the model where a module is called has a number, or two calls would share their dropout masks. Key and ticket are eight
bytes on the host: the key names the module, and is no constant, so that modules that are compiled one by one can share
their code; the ticket is what forward leaves for backward, and names a workspace, which is held for as long as any
tensor over these bytes is there.

What a mask says is not known while a model is compiled. Where it turns out to be one that no configuration covers, or
where hooks are there by then, the operator runs the original.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library, nn
from torch._C._autograd import _get_current_graph_task_keep_graph

from autotuner.runtime.binding import Binding
from autotuner.runtime.fallbacks import Reason
from autotuner.runtime.gradient_stacks import like_stacked, separated, stacked, without_shared_memory
from autotuner.runtime.output_set import copy_of
from autotuner.runtime.parameter_memory import where
from autotuner.runtime.pool import Lease
from autotuner.runtime.ticket import Ticket, like_ticket, new_number

TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)
"""It draws random numbers. It makes CUDA graphs of its own, over memory of its own, so the compiler must not record it
in its graphs, whose memory is theirs."""

UNSEEN = ("mask", "hooks", "forward")
"""Reasons for which the original runs inside the operator: what is not looked at while a model is compiled."""


class Layer(Protocol):
    """The part of a tuned module that the operator calls."""

    original: ClassVar[type[nn.Module]]
    names: tuple[str, ...]

    def covering(self, x: Tensor, mask: Tensor | None) -> tuple[Binding, Tensor | None] | Reason: ...
    def get_parameter(self, target: str) -> nn.Parameter: ...
    def count_call(self) -> None: ...
    def count_fallback(self, reason: Reason, x: Tensor) -> None: ...
    def call_original(self, x: Tensor, mask: Tensor | None) -> Tensor: ...


_KEYED: "WeakValueDictionary[int, Layer]" = WeakValueDictionary()


def key_of(module: Layer) -> Tensor:
    """Return a key that nobody else has."""
    number = new_number()
    _KEYED[number] = module
    return torch.tensor([number])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def new_place() -> int:
    """Return another number at each place where a compiled model is traced through this call."""
    return new_number()


@library.custom_op("autotuner::tuned_layer", mutates_args=(), tags=TAGS)
def tuned_layer(
    key: Tensor,
    place: int,  # noqa: ARG001
    x: Tensor,
    mask: Tensor | None,
    parameters: Sequence[Tensor],
    strides: Sequence[int],  # noqa: ARG001
    stacks: Sequence[int],  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Run a tuned module's forward.

    Args:
        key: `key_of` the module.
        place: where it is called.
        x: as the framework's forward gets it.
        mask: over keys, as the framework's forward gets it.
        parameters: the module's, in the order of its ports: what gradients are asked of.
        strides: of x's gradient.
        stacks: of gradients; see `gradient_stacks`.

    Returns:
        y, and a ticket for backward.

    Raises:
        RuntimeError: the module has changed since the model was compiled, in a way that the compiler does not notice;
            or the parameters are not the module's own.
    """
    module = _KEYED[int(key.item())]
    name = module.original.__name__
    found = module.covering(x, mask)
    if isinstance(found, Reason) and found.key not in UNSEEN:
        raise RuntimeError(
            f"a tuned {name} inside a compiled model has changed since it was compiled: {found.sentence}; compile "
            "the model anew (torch.compiler.reset())"
        )
    own = [module.get_parameter(each) for each in module.names]
    if [where(parameter) for parameter in parameters] != [where(parameter) for parameter in own]:
        raise RuntimeError(
            f"a tuned {name} inside a compiled model runs on its own parameters, and was given others: change them "
            "outside of what is compiled, and call it without functional_call"
        )
    ticket, token = Ticket.issue()
    if isinstance(found, Reason):
        module.count_fallback(found, x)
        y = _original(module, ticket, x, mask, parameters)
    else:
        binding, added = found
        module.count_call()
        ticket.lease = Lease(binding.pool)
        y = ticket.lease.forward(x, added, parameters)
    return y, token


def _original(module: Layer, ticket: Ticket, x: Tensor, mask: Tensor | None, parameters: Sequence[Tensor]) -> Tensor:
    """Run the original, and keep its autograd graph for backward."""
    with _with_autograd():
        leaf = x.detach().requires_grad_(x.is_floating_point())
        y = module.call_original(leaf, mask)
    ticket.original = (y, [leaf, *parameters])
    return y.detach().clone(memory_format=torch.contiguous_format)


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Record an autograd graph inside an operator, where torch leaves autograd out."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.inference_mode(False), torch.enable_grad():
        yield


@tuned_layer.register_fake
def _(
    key: Tensor,  # noqa: ARG001
    place: int,  # noqa: ARG001
    x: Tensor,
    mask: Tensor | None,  # noqa: ARG001
    parameters: Sequence[Tensor],  # noqa: ARG001
    strides: Sequence[int],  # noqa: ARG001
    stacks: Sequence[int],  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), like_ticket()


@library.custom_op("autotuner::tuned_layer_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tuned_layer_backward(
    ticket: Tensor,
    grad: Tensor,
    parameters: Sequence[Tensor],
    strides: Sequence[int],
    stacks: Sequence[int],
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Run a tuned module's backward.

    Args:
        ticket: of the forward.
        grad: y's gradient.
        parameters: the module's, so that torch notices one that was changed in place since forward.
        strides: of x's gradient; those of parameters are contiguous.
        stacks: of gradients; see `gradient_stacks`.
        wanted: for x and each parameter, whether its gradient is.

    Returns:
        The wanted gradient of x, and a tensor for each stack of which something is wanted.

    Raises:
        RuntimeError: an earlier backward has consumed what forward saved.
    """
    found = Ticket.of(ticket)
    keeps = _get_current_graph_task_keep_graph()
    if found.original is not None:
        y, leaves = found.original
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        with _with_autograd():
            given = torch.autograd.grad(y, asked, grad, retain_graph=keeps, allow_unused=True)
        if any(gradient is None for gradient in given):
            raise RuntimeError("a gradient is wanted that the original did not compute: it runs on other parameters")
        grads = iter(given)
        of_x, *others = (next(grads) if want else None for want in wanted)
        of_x = None if of_x is None else copy_of(of_x, strides)
    else:
        assert found.lease is not None
        of_x, *others = found.lease.workspace.backward([grad], tuple(wanted), keeps, parameters)
    made = [] if of_x is None else [of_x]
    # `stacks` is of the plan that was to run; one for calls with a mask may have others.
    return without_shared_memory([*made, *stacked(others, parameters, stacks, wanted[1:])])


@tuned_layer_backward.register_fake
def _(
    ticket: Tensor,  # noqa: ARG001
    grad: Tensor,
    parameters: Sequence[Tensor],
    strides: Sequence[int],
    stacks: Sequence[int],
    wanted: Sequence[bool],
) -> list[Tensor]:
    made = []
    if wanted[0]:
        made.append(torch.empty_strided(grad.shape, tuple(strides), dtype=grad.dtype, device=grad.device))
    return [*made, *like_stacked(parameters, stacks, wanted[1:])]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.strides, ctx.stacks = inputs[5:]
    ctx.save_for_backward(output[1], *inputs[4])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    ticket, *parameters = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[2], *ctx.needs_input_grad[4]]
    found = iter(torch.ops.autotuner.tuned_layer_backward(ticket, grad, parameters, ctx.strides, ctx.stacks, wanted))
    of_x = next(found) if wanted[0] else None
    return None, None, of_x, None, separated(found, ctx.stacks, wanted[1:]), None, None


tuned_layer.register_autograd(_backward, setup_context=_remember)
