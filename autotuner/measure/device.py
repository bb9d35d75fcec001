"""What can be tuned on this machine, and the facts that make two of its timings comparable."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from autotuner.errors import DeviceError
from autotuner.ir.records import NO_COMPILER, Environment, Scalar
from autotuner.settings import cxx_compiler

VECTOR_FLAGS = ("avx2", "avx512_bf16", "avx512f", "amx_bf16", "asimd", "bf16", "sve")
_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Device:
    """Something that kernels run on. `index` tells devices of one type apart."""

    device_type: str
    name: str
    index: int = 0


def devices() -> list[Device]:
    """Return what is here: the CPU, always first, and the CUDA devices that torch sees."""
    return [Device("cpu", cpu_name()), *_cuda_devices()]


def environment(
    device_type: str = "cpu",
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
    taken = tuple(sorted((policy or {}).items()))
    if device_type == "cpu":
        return Environment("cpu", cpu_name(), tuple(sorted(_cpu_facts(usable_threads(threads)).items())), taken)
    found = device_of(device_type, device_index)
    return Environment(found.device_type, found.name, tuple(sorted(_cuda_facts(found).items())), taken)


def check_torch() -> None:
    """Check that torch is installed, without which nothing can be measured.

    Raises:
        DeviceError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise DeviceError(
            "nothing can be measured here, torch is not installed: install autotuner[torch] for a worker; a service "
            "alone, `serve` without --with-worker, needs none"
        )


def device_of(device_type: str, index: int = 0) -> Device:
    """Return a device by type and index.

    Raises:
        DeviceError: there is no such device here.
    """
    here = devices()
    found = next((device for device in here if (device.device_type, device.index) == (device_type, index)), None)
    if found is None:
        wanted = repr(device_type) + (f" with index {index}" if index else "")
        known = ", ".join(f"{device.device_type} ({device.name})" for device in here)
        raise DeviceError(f"no device {wanted} here; what is here: {known}")
    return found


def cuda_uuid(index: int) -> str:
    """Return what tells a CUDA device from every other, as the driver writes it: "GPU-..."."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def computes_on_cuda(index: int) -> bool:
    """Say whether this process has a context on a CUDA device, as one whose model lies there; torch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch._C._cuda_hasPrimaryContext(index)


def cuda_l2_bytes(index: int) -> int:
    """Return the capacity of a CUDA device's second-level cache."""
    import torch

    return int(torch.cuda.get_device_properties(index).L2_cache_size)


def usable_threads(threads: int | None) -> int:
    """Return how many threads a kernel uses: those asked for, or one for each core.

    Raises:
        DeviceError: fewer than 1, or more than there are cores.
    """
    here = cores()
    if threads is not None and not 1 <= threads <= here:
        raise DeviceError(f"{threads} threads asked for; this process may use {here} cores: ask for 1 to {here}")
    return threads or here


def cores() -> int:
    """Return how many cores this process may keep busy: its affinity, or its container's quota where that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return allowed if quota is None else max(1, min(allowed, ceil(quota)))


def cache_bytes(level: int) -> int | None:
    """Return the capacity of one data cache of a level, as the first core sees it, or None where that is not known."""
    for place in sorted(_CACHES.glob("index*")):
        if _text(place / "level") == str(level) and _text(place / "type") != "Instruction":
            number, unit = _text(place / "size")[:-1], _text(place / "size")[-1:]
            return int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit]
    return None


def compiler() -> str | None:
    """Return the path of the C++ compiler that Inductor uses, None where it is not found."""
    return shutil.which(cxx_compiler())


def cpu_name() -> str:
    """Return what the processor calls itself."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _cpu_facts(threads: int) -> dict[str, Scalar]:
    info = _cpuinfo()
    flags = set(info.get("flags", info.get("Features", "")).split())
    facts: dict[str, Scalar] = {
        "cores": cores(),
        "flags": " ".join(flag for flag in VECTOR_FLAGS if flag in flags),
        "libc": " ".join(platform.libc_ver()).strip(),
        "machine": platform.machine(),
        "microarchitecture": "-".join(info[key] for key in ("cpu family", "model", "stepping") if key in info),
        "python": ".".join(str(part) for part in sys.version_info[:2]),
        "system": platform.system(),
        "threads": threads,
        "torch": _version("torch"),
    }
    quota = _quota()
    if quota is not None:
        facts["cpu_quota"] = quota
    if compiler() is None:  # only then a fact: where there is one, as nearly everywhere, what was measured stays valid
        facts["compiler"] = NO_COMPILER
    for level in (2, 3):
        size = cache_bytes(level)
        if size is not None:
            facts[f"l{level}_bytes"] = size
    return facts


def _cuda_devices() -> list[Device]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [Device("cuda", torch.cuda.get_device_name(i), i) for i in range(torch.cuda.device_count())]


def _cuda_facts(device: Device) -> dict[str, Scalar]:
    import torch

    properties = torch.cuda.get_device_properties(device.index)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "cublaslt": _cublaslt_version(str(torch.version.cuda)),
        "cuda": str(torch.version.cuda),
        "cudnn": torch.backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
        "cudnn_frontend": _version("nvidia-cudnn-frontend"),
        "driver": Management().driver() or "unknown",
        "l2_bytes": cuda_l2_bytes(device.index),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "nvmath": _version("nvmath-python"),
        "python": ".".join(str(part) for part in sys.version_info[:2]),
        "torch": _version("torch"),
        "triton": _version("triton"),
    }


def _cublaslt_version(cuda: str) -> int:
    """Return the version of the cuBLASLt that torch has loaded, 0 where there is none of that name."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{cuda.partition('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(library.cublasLtGetVersion())
    except (OSError, AttributeError):
        return 0


class Management:
    """NVIDIA's management library (NVML), which comes with the driver; where it is not, every answer is None."""

    _SM_CLOCK = 1

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library
        except (OSError, AttributeError):
            return

    def driver(self) -> str | None:
        """Return the driver's version."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlSystemGetDriverVersion(text, len(text)) != 0:
            return None
        return text.value.decode()

    def sm_clock_mhz(self, uuid: str) -> int | None:
        """Return how fast a device's multiprocessors run now."""
        clock = ctypes.c_uint()
        handle = self._handle(uuid)
        if self._library is None or handle is None:
            return None
        found = self._library.nvmlDeviceGetClockInfo(handle, self._SM_CLOCK, ctypes.byref(clock))
        return clock.value if found == 0 else None

    def processes(self, uuid: str) -> list[int] | None:
        """Return the numbers of the processes that compute on a device; inside a container they may be the host's."""
        count = ctypes.c_uint(64)
        table = (_Process * count.value)()
        handle = self._handle(uuid)
        if self._library is None or handle is None or not hasattr(self._library, _PROCESSES):
            return None
        if getattr(self._library, _PROCESSES)(handle, ctypes.byref(count), table) != 0:
            return None
        return [int(table[place].pid) for place in range(count.value)]

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        if self._library is None:
            return None
        found = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        return handle if found == 0 else None


_PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"


class _Process(ctypes.Structure):
    """What NVML says of a process that computes: nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cpuinfo() -> dict[str, str]:
    """Return the first core's entries in /proc/cpuinfo, nothing where there is no such file."""
    entries = _text(_CPUINFO).split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in entries)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _quota() -> float | None:
    """Return how many cores' worth of time the control group grants, or None where it sets no limit."""
    limit, _, period = _text(_CPU_QUOTA).partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
