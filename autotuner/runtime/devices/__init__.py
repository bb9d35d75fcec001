"""Devices that configurations run on, by vendor: torch gives devices of two vendors one type."""

from collections.abc import Callable

import torch

from autotuner.ir.device import AMD, CPU, NVIDIA, vendor_of
from autotuner.runtime.devices.cpu import CpuRuntime
from autotuner.runtime.devices.cuda import CudaRuntime
from autotuner.runtime.devices.protocol import DeviceRuntime, Run

__all__ = ["RUNTIMES", "CpuRuntime", "CudaRuntime", "DeviceRuntime", "Run", "device_runtime"]

RUNTIMES: dict[str, Callable[[torch.device], DeviceRuntime]] = {
    CPU: CpuRuntime,
    NVIDIA: CudaRuntime,
    AMD: CudaRuntime,
}
"""By vendor. Torch has streams and graphs of AMD's devices under the names of CUDA's."""


def device_runtime(device: torch.device) -> DeviceRuntime:
    """Return streams, events, graphs and memory of a device; one of an unknown vendor runs calls as the CPU does."""
    return RUNTIMES.get(vendor_of(device.type, torch.version.hip), CpuRuntime)(device)
