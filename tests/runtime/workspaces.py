"""What the calls of a plan allocate while they run, recorded as the bench does it."""

import torch

from autotuner.ir.records import Call
from autotuner.kernels import KERNELS
from autotuner.measure.devices import device_of
from autotuner.measure.operands import Buffers, Values
from autotuner.plan.memory_planner import MemoryPlan


def workspaces(plan: MemoryPlan, device_type: str = "cpu") -> dict[str, int]:
    """Return bytes by call key."""
    device = torch.device(device_type)
    with torch.no_grad():
        return {step.call.key: _workspace_bytes(step.call, device) for step in plan.steps}


def _workspace_bytes(call: Call, device: torch.device) -> int:
    kernel, buffers = KERNELS[call.candidate.kernel], Buffers(device)
    values = Values(call.subgraph, kernel.consistent, device)
    run = kernel.builder()(call, buffers.inputs(call, values, 0), buffers.outputs(call, values, 0))
    run()
    return device_of(device.type, device.index or 0).allocated_bytes(run)
