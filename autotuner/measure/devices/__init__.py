"""Devices of this machine, and the facts that make two timings on them comparable."""

from collections.abc import Callable, Mapping, Sequence

from autotuner.errors import DeviceError
from autotuner.ir.cost import working_set_bytes
from autotuner.ir.device import CPU, CUDA
from autotuner.ir.graph import Graph
from autotuner.ir.records import Environment, Scalar
from autotuner.measure.devices.cpu import cpu_devices
from autotuner.measure.devices.cuda import cuda_devices
from autotuner.measure.devices.device import Device
from autotuner.measure.policy import Policy

__all__ = [
    "Device",
    "device_of",
    "devices",
    "environment",
    "half_step_bytes",
    "policy_for",
    "rotate_bytes",
]

FOUND: dict[str, Callable[[], Sequence[Device]]] = {CPU: cpu_devices, CUDA: cuda_devices}


def devices() -> list[Device]:
    """Return what is here: the CPU, always first, and the CUDA devices that torch sees."""
    return [device for found in FOUND.values() for device in found()]


def device_of(device_type: str, index: int = 0) -> Device:
    """Return a device by type and index.

    Raises:
        DeviceError: there is no such device here.
    """
    alike = FOUND[device_type]() if device_type in FOUND else ()
    found = next((device for device in alike if device.index == index), None)
    if found is None:
        wanted = repr(device_type) + (f" with index {index}" if index else "")
        known = ", ".join(f"{device.device_type} ({device.name})" for device in devices())
        raise DeviceError(f"no device {wanted} here; what is here: {known}")
    return found


def environment(
    device_type: str = CPU,
    threads: int | None = None,
    policy: Mapping[str, Scalar] | None = None,
    device_index: int = 0,
) -> Environment:
    """Return what makes timings on a device comparable; for the CPU without importing torch.

    Args:
        threads: how many a kernel may use; None for all cores that this process may use. Of the CPU only.
        policy: how timings are taken.
        device_index: which device of that type; two equal ones share timings.

    Raises:
        DeviceError: there is no such device here, or it has fewer cores than threads are asked for.
    """
    found = device_of(device_type, device_index)
    facts, taken = found.facts(threads), policy or {}
    return Environment(found.device_type, found.name, tuple(sorted(facts.items())), tuple(sorted(taken.items())))


def policy_for(
    device_type: str, threads: int | None = None, rotate_bytes: int | None = None, device_index: int = 0
) -> Policy:
    """Return the policy for a device.

    Raises:
        DeviceError: no such device here.
    """
    return device_of(device_type, device_index).policy(threads, rotate_bytes)


def rotate_bytes(graph: Graph, device_type: str = CPU, device_index: int = 0) -> int | None:
    """Return through how many bytes of operands a call is timed for a training graph, None for the policy's own.

    A step finds in cache what it touched last. Between two touches of a tensor lies anything from nothing (made, then
    read) to the whole step (weights, saved tensors): half the step's working set stands for both, rounded down to a
    power of two, so that models of about one size share measurements. The policy's own figure is the least on a CPU,
    whose last cache holds many such sets, and the most on a CUDA device, beyond whose cache there is only memory.
    """
    return device_of(device_type, device_index).rotate_bytes(half_step_bytes(graph))


def half_step_bytes(graph: Graph) -> int:
    """Return half the working set of a training step, rounded down to a power of two; see `rotate_bytes`."""
    half = working_set_bytes(graph) // 2
    return 1 << (half.bit_length() - 1)
