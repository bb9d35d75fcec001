"""CUDA devices: their facts, their policy, and their memory."""

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autotuner.ir.device import CUDA, NVIDIA, vendor_of
from autotuner.ir.records import Scalar
from autotuner.measure.devices.cpu import cores
from autotuner.measure.devices.device import HELD_SHARE, Device
from autotuner.measure.devices.nvml import Nvml, cuda_uuid
from autotuner.measure.devices.versions import version
from autotuner.measure.policy import CudaPolicy, Policy

if TYPE_CHECKING:
    from autotuner.measure.devices.cuda_sampling import CudaTimer

COMPILERS_MAX = 16
"""Each has a context on the device, of half a gigabyte."""
TIMING_CORES = 2
"""Cores that are left to the process that times and to the tuner while others compile."""
L2_MULTIPLE = 2
"""Data that lie so many times beyond the cache come from memory, whatever else is touched in between."""


def cuda_devices() -> list[Device]:
    """Return the CUDA devices that torch sees."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [CudaDevice(CUDA, torch.cuda.get_device_name(i), i) for i in range(torch.cuda.device_count())]


@dataclass(frozen=True, slots=True)
class CudaDevice(Device):
    """One CUDA device, by torch's index."""

    policy_type: ClassVar[type[Policy]] = CudaPolicy

    @property
    def lock_name(self) -> str:
        return f"{self.device_type}-{cuda_uuid(self.index)}"

    @property
    def compilers(self) -> int:
        return max(1, min(cores() - TIMING_CORES, COMPILERS_MAX))

    @property
    def compiles_beside(self) -> bool:
        return cores() > TIMING_CORES

    @property
    def is_in_use(self) -> bool:
        return computes_on_cuda(self.index)

    @property
    def memory_bytes(self) -> int:
        import torch

        return int(torch.cuda.get_device_properties(self.index).total_memory)

    @property
    def held_bytes(self) -> int:
        """A quarter of free memory."""
        import torch

        return int(torch.cuda.mem_get_info(self.index)[0]) // HELD_SHARE

    def facts(self, threads: int | None) -> dict[str, Scalar]:  # noqa: ARG002
        import torch

        properties = torch.cuda.get_device_properties(self.index)
        vendor = vendor_of(CUDA, torch.version.hip)
        return {
            "capability": f"{properties.major}.{properties.minor}",
            "cublaslt": _cublaslt_version(str(torch.version.cuda)),
            "cuda": str(torch.version.cuda),
            "cudnn": torch.backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
            "cudnn_frontend": version("nvidia-cudnn-frontend"),
            "cupy": version("cupy-cuda13x"),
            "driver": Nvml().driver() or "unknown",
            "l2_bytes": cuda_l2_bytes(self.index),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "nvmath": version("nvmath-python"),
            "python": ".".join(str(part) for part in sys.version_info[:2]),
            "torch": version("torch"),
            "triton": version("triton"),
            **Nvml().lowered(cuda_uuid(self.index)),
            **({} if vendor == NVIDIA else {"vendor": vendor}),
        }

    def policy(self, threads: int | None = None, rotate_bytes: int | None = None) -> CudaPolicy:  # noqa: ARG002
        return CudaPolicy(cuda_rotate_bytes(cuda_l2_bytes(self.index)) if rotate_bytes is None else rotate_bytes)

    def rotate_bytes(self, half_step_bytes: int) -> int | None:
        return half_step_bytes if half_step_bytes < self.policy().rotate_bytes else None

    def timer(self, policy: Policy, *, parent_computes: bool) -> "CudaTimer":
        from autotuner.measure.devices.cuda_sampling import CudaTimer

        assert isinstance(policy, CudaPolicy)
        return CudaTimer(policy, self.index, parent_computes=parent_computes)

    def allocated_bytes(self, run: Callable[[], object]) -> int:
        from autotuner.measure.devices.cuda_sampling import allocated_bytes

        return allocated_bytes(run)


def cuda_rotate_bytes(l2_bytes: int) -> int:
    """Return beyond how many bytes of operands nothing changes any more: a power of two, at least twice the cache."""
    return 1 << (L2_MULTIPLE * l2_bytes - 1).bit_length()


def computes_on_cuda(index: int) -> bool:
    """Say whether this process has a context on a CUDA device, as one whose model lies there; torch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch._C._cuda_hasPrimaryContext(index)


def cuda_l2_bytes(index: int) -> int:
    """Return the capacity of a CUDA device's second-level cache."""
    import torch

    return int(torch.cuda.get_device_properties(index).L2_cache_size)


def _cublaslt_version(cuda: str) -> int:
    """Return the version of the cuBLASLt that torch has loaded, 0 where there is none of that name."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{cuda.partition('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(library.cublasLtGetVersion())
    except (OSError, AttributeError):
        return 0
