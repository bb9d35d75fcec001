"""The state that a region's forward leaves for its backward: one tensor over the memory of its workspace.

A compiled model hands tensors from forward to backward, and nothing else. As long as any tensor over this memory is
there, the workspace is lent. Hooks on saved tensors may give other memory to backward, such as a copy that was on the
CPU meanwhile. The workspace is given back where they do, and backward takes one with the bytes that it is given.
"""

from weakref import WeakValueDictionary

from torch import Tensor
from torch._C import _to_dlpack
from torch.utils.dlpack import from_dlpack

from autotuner.runtime.pool import Lease
from autotuner.runtime.workspace import Workspace

LEASES: "WeakValueDictionary[int, Lease]" = WeakValueDictionary()
"""Workspaces that are lent to a forward whose saved state is there, by where that is."""


def saved_state(lease: Lease) -> Tensor:
    """Return the saved state of a workspace; the lease lasts as long as the tensor's memory."""
    view = lease.workspace.state.detach()
    view.lease = lease  # type: ignore[attr-defined]
    # The new tensor has a storage of its own over the same memory, and that storage holds the view with its attribute.
    made: Tensor = from_dlpack(_to_dlpack(view))
    LEASES[made.data_ptr()] = lease
    return made


def workspace_of(y: Tensor) -> Workspace:
    """Return the workspace in which the forward of a region's output ran; it holds the masks that were drawn."""
    lease = lease_of(y.grad_fn.saved_tensors[0])  # type: ignore[union-attr]
    assert lease is not None
    return lease.workspace


def lease_of(state: Tensor) -> Lease | None:
    """Return the lease of the workspace whose memory a tensor is, None where it has other memory."""
    return LEASES.get(state.data_ptr())
