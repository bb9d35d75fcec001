"""A plan as one node of torch's autograd graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from autotuner.runtime.devices import device_runtime
from autotuner.runtime.pool import Lease, Pool
from autotuner.runtime.workspace import Workspace


class TunedStep(torch.autograd.Function):
    """forward(pool, mask, original, x, *parameters) -> y. Gradients of parameters are contiguous.

    The workspace belongs to the node until its backward is over, or the node is gone. Parameters are saved so that
    torch notices, as for its own operators, when one was changed in place between forward and backward. So is x where a
    caller captures the step in a graph: no copy is made of it then, nor of y's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pool: Pool,
        mask: Tensor | None,
        original: Callable[[Tensor], Tensor] | None,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.lease = lease = Lease(pool)
        ctx.original = original
        ctx.in_place = reads_in_place(x)
        # Without a way to run the original again, and where x was copied in, it is read no more.
        read_again = (x,) if ctx.in_place or original is not None else ()
        ctx.ahead = len(read_again)
        ctx.save_for_backward(*read_again, *parameters)
        return lease.forward(x, mask, parameters, in_place=ctx.in_place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        parameters = saved[ctx.ahead :]
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return (None, None, None, *_differentiable(ctx.original, saved, wanted, grads[0]))
        keeps = _get_current_graph_task_keep_graph()
        of_x, *found = ctx.lease.workspace.backward(grads, wanted, keeps, parameters, ctx.in_place)
        if not keeps:
            ctx.lease = None
        return (None, None, None, of_x, *(of if of is None else of.contiguous() for of in found))


def reads_in_place(x: Tensor) -> bool:
    """Say whether a step reads x where it is: in a caller's graph, whose tensors stay where they are."""
    runtime = device_runtime(x.device)
    return runtime.has_graphs and runtime.is_current() and runtime.is_capturing()


def lease_of(y: Tensor) -> Lease:
    """Return the lease of the workspace in which an output's forward ran."""
    lease: Lease = y.grad_fn.lease  # type: ignore[union-attr]
    return lease


def workspace_of(y: Tensor) -> Workspace:
    """Return the workspace in which an output's forward ran; it holds the masks that were drawn."""
    return lease_of(y).workspace


def _differentiable(
    original: Callable[[Tensor], Tensor] | None, saved: Sequence[Tensor], wanted: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again (`create_graph=True`), through the original module.

    Raises:
        RuntimeError: dropout is on, and the original module would draw other masks.
    """
    if original is None:
        raise RuntimeError(
            "create_graph=True through a tuned module with dropout: its masks cannot be given to the original module; "
            "set every dropout p to 0, or use the original module"
        )
    x, *_ = saved
    asked = [tensor for tensor, want in zip(saved, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(original(x), asked, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if want else None for want in wanted)
