"""The CPU as a device: its facts, its policy, and its memory."""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from autotuner.errors import DeviceError
from autotuner.ir.device import CPU
from autotuner.ir.records import NO_COMPILER, Scalar
from autotuner.measure.devices.device import HELD_SHARE, Device
from autotuner.measure.devices.versions import version
from autotuner.measure.policy import CpuPolicy, Policy
from autotuner.settings import cxx_compiler

if TYPE_CHECKING:
    from autotuner.measure.devices.cpu_sampling import CpuTimer

L2_FALLBACK_BYTES = 2 << 20
L2_MULTIPLE = 4
SMALL_SETS = 64
VECTOR_FLAGS = ("avx2", "avx512_bf16", "avx512f", "amx_bf16", "asimd", "bf16", "sve")
_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def cpu_devices() -> list[Device]:
    """Return the CPU, all cores together."""
    return [CpuDevice(CPU, cpu_name())]


@dataclass(frozen=True, slots=True)
class CpuDevice(Device):
    """All cores of this machine that this process may use."""

    policy_type: ClassVar[type[Policy]] = CpuPolicy

    @property
    def lock_name(self) -> str:
        return self.device_type

    @property
    def compilers(self) -> int:
        return cores()

    @property
    def compiles_beside(self) -> bool:
        return False

    @property
    def is_in_use(self) -> bool:
        return False

    @property
    def memory_bytes(self) -> int:
        """That of the machine, or what the control group of this process may have of it."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = _text(_MEMORY_LIMIT)
        return min(memory, int(limit) if limit.isdigit() else memory)

    @property
    def held_bytes(self) -> int:
        """A quarter of all memory."""
        return self.memory_bytes // HELD_SHARE

    def facts(self, threads: int | None) -> dict[str, Scalar]:
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
            "threads": usable_threads(threads),
            "torch": version("torch"),
        }
        quota = _quota()
        if quota is not None:
            facts["cpu_quota"] = quota
        if compiler() is None:  # only then a fact: where there is one, as nearly everywhere, measurements stay valid
            facts["compiler"] = NO_COMPILER
        for level in (2, 3):
            size = cache_bytes(level)
            if size is not None:
                facts[f"l{level}_bytes"] = size
        return facts

    def policy(self, threads: int | None = None, rotate_bytes: int | None = None) -> CpuPolicy:
        """Return the policy for a number of threads.

        Where `rotate_bytes` is not stated, operands rotate through four times the second-level caches of these threads,
        in up to 64 sets: small ones too then come from beyond that level, as after the rest of a step.
        """
        if rotate_bytes is not None:
            return CpuPolicy(rotate_bytes)
        return CpuPolicy(L2_MULTIPLE * usable_threads(threads) * (cache_bytes(2) or L2_FALLBACK_BYTES), sets=SMALL_SETS)

    def rotate_bytes(self, half_step_bytes: int) -> int | None:
        return half_step_bytes if half_step_bytes > self.policy().rotate_bytes else None

    def timer(self, policy: Policy, *, parent_computes: bool) -> "CpuTimer":  # noqa: ARG002
        from autotuner.measure.devices.cpu_sampling import CpuTimer

        assert isinstance(policy, CpuPolicy)
        return CpuTimer(policy)

    def allocated_bytes(self, run: Callable[[], object]) -> int:
        from autotuner.measure.devices.cpu_sampling import allocated_bytes

        return allocated_bytes(run)


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
