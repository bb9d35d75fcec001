"""Devices that configurations run on, by the type that torch gives their tensors."""

from collections.abc import Callable

import torch

from autotuner.ir.device import CPU, CUDA
from autotuner.runtime.devices.cpu import CpuRuntime
from autotuner.runtime.devices.cuda import CudaRuntime
from autotuner.runtime.devices.protocol import DeviceRuntime, Run

__all__ = ["RUNTIMES", "CpuRuntime", "CudaRuntime", "DeviceRuntime", "Run", "device_runtime"]

RUNTIMES: dict[str, Callable[[torch.device], DeviceRuntime]] = {CPU: CpuRuntime, CUDA: CudaRuntime}
"""By torch's name of a device's type."""


def device_runtime(device: torch.device) -> DeviceRuntime:
    """Return streams, events, graphs and memory of a device; one of an unknown type runs calls as the CPU does."""
    return RUNTIMES.get(device.type, CpuRuntime)(device)
