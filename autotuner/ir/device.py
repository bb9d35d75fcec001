"""Device types, as torch names them, their vendors, and what holds for every device of a type."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CPU: Final = "cpu"
CUDA: Final = "cuda"
"""NVIDIA's devices, and those of AMD: torch gives both this name."""
NVIDIA: Final = "nvidia"
AMD: Final = "amd"


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Properties of all devices of a type.

    Args:
        alignment_bytes: the memory planner has every buffer start at a multiple of it.
        has_graphs: whether calls are queued, and can be captured in graphs that are replayed; see `DeviceRuntime`.
    """

    alignment_bytes: int = 1
    has_graphs: bool = False


DEVICE_TYPES: dict[str, DeviceType] = {
    CPU: DeviceType(),
    # As torch's own allocations are aligned: libraries choose kernels by the alignment of their operands, and the copy
    # engine of Hopper wants 128 bytes.
    CUDA: DeviceType(alignment_bytes=256, has_graphs=True),
}
"""By torch's name. One that is not listed has the properties of `DeviceType()`."""


def alignment_bytes(device_type: str) -> int:
    """Return the bytes of which every buffer starts at a multiple, on a device of a type."""
    return DEVICE_TYPES.get(device_type, DeviceType()).alignment_bytes


def has_graphs(device_type: str) -> bool:
    """Say whether calls on a device of a type are queued, and can be captured in graphs that are replayed."""
    return DEVICE_TYPES.get(device_type, DeviceType()).has_graphs


def vendor_of(device_type: str, hip: str | None) -> str:
    """Return the vendor of the devices that torch gives a type: "nvidia", "amd", or else the type itself, as "cpu".

    Args:
        hip: `torch.version.hip`, a version where torch was built for ROCm, else None.
    """
    if device_type != CUDA:
        return device_type
    return NVIDIA if hip is None else AMD


def recorded_vendor(device_type: str, facts: Mapping[str, object]) -> str:
    """Return the vendor of a device by its recorded type and facts.

    Only devices of torch's type "cuda" that are not NVIDIA's have a fact `vendor`, so that all others keep the keys of
    their environments.
    """
    return str(facts.get("vendor", vendor_of(device_type, None)))
