"""A tuned module inside a model that torch.compile compiles: one opaque operator, with a backward of its own.

torch.ops.autotuner.tuned_layer(number, place, x, mask, parameters) -> (y, ticket). The compiler knows shapes and
strides and sees nothing of what runs. It takes two calls with the same arguments for one, so each place in the model
where a module is called has a number, or two calls would share their dropout masks. The ticket is what forward leaves
for backward: eight bytes on the host that name a workspace, held for as long as any tensor over these bytes is there.
"""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from autotuner.runtime.function import run_forward
from autotuner.runtime.workspace import Lease

if TYPE_CHECKING:
    from autotuner.runtime.module import TunedModule

NUMBERED: "WeakValueDictionary[int, TunedModule]" = WeakValueDictionary()
"""Modules by the numbers that compiled code knows them by."""

TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)
"""It draws random numbers. It makes CUDA graphs of its own, over memory of its own, so the compiler must not record it
in its graphs, whose memory is theirs."""

_TICKETS: "WeakValueDictionary[int, Ticket]" = WeakValueDictionary()
_numbers = count(1)


class Ticket(bytearray):
    """The bytes of a ticket's tensor, which torch keeps alive, and with them the workspace."""

    lease: Lease


def number_of(module: "TunedModule") -> int:
    """Return a number that nobody else has."""
    number = next(_numbers)
    NUMBERED[number] = module
    return number


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place() -> int:
    """Return another number at each place where a compiled model is traced through this call."""
    return next(_numbers)


@torch.library.custom_op("autotuner::tuned_layer", mutates_args=(), tags=TAGS)
def tuned_layer(
    number: int,
    place: int,  # noqa: ARG001
    x: Tensor,
    mask: Tensor | None,
    parameters: Sequence[Tensor],  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Run a tuned module's forward.

    Args:
        number: `number_of` the module.
        place: where it is called.
        x: as the framework's forward gets it.
        mask: additive, over keys.
        parameters: the module's, in the order of its ports: what gradients are asked of.

    Returns:
        y, and a ticket for backward.

    Raises:
        RuntimeError: the module has changed since the model was compiled, in a way that the compiler does not notice.
    """
    module = NUMBERED[number]
    binding = module._binding or module.bind()
    reason = binding.uncovered(module, x, mask)
    if reason is not None:
        raise RuntimeError(
            f"a tuned {module.original.__name__} inside a compiled model has changed since it was compiled: "
            f"{reason.sentence}; compile the model anew (torch.compiler.reset())"
        )
    module.__dict__["calls"] += 1
    key = next(_numbers)
    ticket = Ticket(key.to_bytes(8, "little"))
    ticket.lease = Lease(binding.pool)
    _TICKETS[key] = ticket
    return run_forward(ticket.lease.workspace, x, mask), torch.frombuffer(ticket, dtype=torch.int64)


@tuned_layer.register_fake
def _(
    number: int,  # noqa: ARG001
    place: int,  # noqa: ARG001
    x: Tensor,
    mask: Tensor | None,  # noqa: ARG001
    parameters: Sequence[Tensor],  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("autotuner::tuned_layer_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tuned_layer_backward(number: int, ticket: Tensor, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor]:  # noqa: ARG001
    """Run a tuned module's backward.

    Args:
        number: of the module.
        ticket: of the forward.
        grad: y's gradient.
        wanted: for x and each parameter, whether its gradient is.

    Returns:
        The wanted gradients.

    Raises:
        RuntimeError: an earlier backward has consumed what forward saved.
    """
    workspace = _TICKETS[int(ticket.item())].lease.workspace
    found = workspace.backward([grad], tuple(wanted), keeps=_get_current_graph_task_keep_graph())
    return [gradient for gradient in found if gradient is not None]


@tuned_layer_backward.register_fake
def _(number: int, ticket: Tensor, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor]:  # noqa: ARG001
    binding = NUMBERED[number]._binding
    assert binding is not None, "forward was traced before"
    return [
        torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
        for (shape, strides), want in zip(binding.gradients(), wanted, strict=True)
        if want
    ]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.number = inputs[0]
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    (ticket,) = ctx.saved_tensors
    _, _, x, _, parameters = ctx.needs_input_grad
    wanted = [x, *parameters]
    found = iter(torch.ops.autotuner.tuned_layer_backward(ctx.number, ticket, grad, wanted))
    of_x, *others = (next(found) if want else None for want in wanted)
    return None, None, of_x, None, others


tuned_layer.register_autograd(_backward, setup_context=_remember)
