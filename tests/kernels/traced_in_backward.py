"""Builds a kernel that differentiates a program, within the backward of a device that has one thread for its backward.

Run as a process: such a device is made up for all of it. A CPU's backward runs in the thread that asks for it; a GPU's
runs in one thread, which must not wait for a gradient that it has to compute itself.
"""

import os
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend, rename_privateuse1_backend

from autotuner.ir.records import Call
from autotuner.kernels.torch import programmed

DEVICE = "made_up"


def make_device() -> None:
    """Make the device up, before anything is differentiated: torch starts the threads of all devices then."""
    rename_privateuse1_backend(DEVICE)
    _setup_privateuseone_for_python_backend(DEVICE)


def traced_in_backward(call: Call) -> list[Any]:
    """Return what was traced for a call within a backward; nothing is computed."""
    mode, found = FakeTensorMode(), list[Any]()
    mode.from_tensor = lambda tensor, **_: tensor  # type: ignore[method-assign]
    with patch.object(programmed, "FakeTensorMode", return_value=mode), mode:
        operands = [torch.empty(call.subgraph.tensors[n].extents, device=DEVICE) for n in call.subgraph.inputs]
        x = torch.empty(1, device=DEVICE).requires_grad_() * 2
        x.register_hook(lambda _: found.append(programmed._steps(call, operands)))  # type: ignore[no-untyped-call]
        torch.autograd.backward(x)
    return found


if __name__ == "__main__":
    from tests.kernels.test_program_kernels import turned

    make_device()
    (graph,) = traced_in_backward(turned())
    print(graph.code, flush=True)
    os._exit(0)  # the made-up device's thread may abort a process that goes through its end, where a machine is busy
