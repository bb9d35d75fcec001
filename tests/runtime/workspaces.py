"""What the calls of a plan allocate while they run, recorded as the bench does it."""

import torch

from autotuner.kernels import KERNELS
from autotuner.measure.allocations import allocated_bytes
from autotuner.measure.operands import Buffers, Values
from autotuner.placement import Plan
from autotuner.records import Call


def workspaces(plan: Plan) -> dict[str, int]:
    """Return bytes by call key."""
    with torch.no_grad():
        return {step.call.key: _workspace_bytes(step.call) for step in plan.steps}


def _workspace_bytes(call: Call) -> int:
    kernel, buffers = KERNELS[call.candidate.kernel], Buffers()
    values = Values(call.subgraph, kernel.consistent)
    run = kernel.builder()(call, buffers.inputs(call, values, 0), buffers.outputs(call, values, 0))
    run()
    return allocated_bytes(run)
