"""A tuned module inside a model that torch.compile compiles: one opaque operator, with a backward of its own.

torch.ops.autotuner.tuned_layer(key, place, x, mask, parameters, strides) -> (y, ticket). The compiler knows shapes and
strides and sees nothing of what runs. It takes two calls with the same arguments for one, so each place in the model
where a module is called has a number, or two calls would share their dropout masks. Key and ticket are eight bytes on
the host: the key names the module, and is no constant, so that modules that are compiled one by one can share their
code; the ticket is what forward leaves for backward, and names a workspace, which is held for as long as any tensor
over these bytes is there.
"""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library
from torch._C._autograd import _get_current_graph_task_keep_graph

from autotuner.runtime.function import run_forward
from autotuner.runtime.workspace import Lease

if TYPE_CHECKING:
    from autotuner.runtime.module import TunedModule

TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)
"""It draws random numbers. It makes CUDA graphs of its own, over memory of its own, so the compiler must not record it
in its graphs, whose memory is theirs."""

_KEYED: "WeakValueDictionary[int, TunedModule]" = WeakValueDictionary()
_TICKETS: "WeakValueDictionary[int, Ticket]" = WeakValueDictionary()
_numbers = count(1)


class Ticket(bytearray):
    """The bytes of a ticket's tensor, which torch keeps alive, and with them the workspace."""

    lease: Lease


def key_of(module: "TunedModule") -> Tensor:
    """Return a key that nobody else has."""
    number = next(_numbers)
    _KEYED[number] = module
    return torch.tensor([number])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def new_place() -> int:
    """Return another number at each place where a compiled model is traced through this call."""
    return next(_numbers)


@library.custom_op("autotuner::tuned_layer", mutates_args=(), tags=TAGS)
def tuned_layer(
    key: Tensor,
    place: int,  # noqa: ARG001
    x: Tensor,
    mask: Tensor | None,
    parameters: Sequence[Tensor],
    strides: Sequence[int],  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Run a tuned module's forward.

    Args:
        key: `key_of` the module.
        place: where it is called.
        x: as the framework's forward gets it.
        mask: additive, over keys.
        parameters: the module's, in the order of its ports: what gradients are asked of.
        strides: of x's gradient.

    Returns:
        y, and a ticket for backward.

    Raises:
        RuntimeError: the module has changed since the model was compiled, in a way that the compiler does not notice;
            or the parameters are not the module's own.
    """
    module = _KEYED[int(key.item())]
    name = module.original.__name__
    binding = module.binding_for(x)
    reason = binding.uncovered(module, x, mask)
    if reason is not None:
        raise RuntimeError(
            f"a tuned {name} inside a compiled model has changed since it was compiled: {reason.sentence}; compile the "
            "model anew (torch.compiler.reset())"
        )
    if not binding.owns(parameters):
        raise RuntimeError(
            f"a tuned {name} inside a compiled model runs on its own parameters, and was given others: change them "
            "outside of what is compiled, and call it without functional_call"
        )
    module.__dict__["calls"] += 1
    number = next(_numbers)
    ticket = Ticket(number.to_bytes(8, "little"))
    ticket.lease = Lease(binding.pool)
    _TICKETS[number] = ticket
    return run_forward(ticket.lease.workspace, x, mask), torch.frombuffer(ticket, dtype=torch.int64)


@tuned_layer.register_fake
def _(
    key: Tensor,
    place: int,  # noqa: ARG001
    x: Tensor,
    mask: Tensor | None,  # noqa: ARG001
    parameters: Sequence[Tensor],  # noqa: ARG001
    strides: Sequence[int],  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(key)


@library.custom_op("autotuner::tuned_layer_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tuned_layer_backward(
    ticket: Tensor,
    grad: Tensor,
    parameters: Sequence[Tensor],
    strides: Sequence[int],  # noqa: ARG001
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Run a tuned module's backward.

    Args:
        ticket: of the forward.
        grad: y's gradient.
        parameters: the module's, so that torch notices one that was changed in place since forward.
        strides: of x's gradient; those of parameters lie as these do.
        wanted: for x and each parameter, whether its gradient is.

    Returns:
        The wanted gradients.

    Raises:
        RuntimeError: an earlier backward has consumed what forward saved.
    """
    workspace = _TICKETS[int(ticket.item())].lease.workspace
    of_x, *others = workspace.backward([grad], tuple(wanted), keeps=_get_current_graph_task_keep_graph())
    lying = [of_x, *(_as(parameter, gradient) for parameter, gradient in zip(parameters, others, strict=True))]
    return [gradient for gradient in lying if gradient is not None]


def _as(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with its parameter's strides, as the compiler expects it; a copied parameter's lacks them."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device).copy_(
        gradient
    )


@tuned_layer_backward.register_fake
def _(
    ticket: Tensor,  # noqa: ARG001
    grad: Tensor,
    parameters: Sequence[Tensor],
    strides: Sequence[int],
    wanted: Sequence[bool],
) -> list[Tensor]:
    lying = [(grad.shape, strides), *((parameter.shape, parameter.stride()) for parameter in parameters)]
    return [
        torch.empty_strided(shape, tuple(steps), dtype=grad.dtype, device=grad.device)
        for (shape, steps), want in zip(lying, wanted, strict=True)
        if want
    ]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.strides = inputs[5]
    ctx.save_for_backward(output[1], *inputs[4])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    ticket, *parameters = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[2], *ctx.needs_input_grad[4]]
    found = iter(torch.ops.autotuner.tuned_layer_backward(ticket, grad, parameters, ctx.strides, wanted))
    of_x, *others = (next(found) if want else None for want in wanted)
    return None, None, of_x, None, others, None


tuned_layer.register_autograd(_backward, setup_context=_remember)
