"""Readings of NVIDIA's management library (NVML), and what they say: did a device run at its full clock, and alone."""

import ctypes
from collections.abc import Collection

LOW_SHARE = 0.75


def cuda_uuid(index: int) -> str:
    """Return what tells a CUDA device from every other, as the driver writes it: "GPU-..."."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class Nvml:
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
        return self._number(uuid, "nvmlDeviceGetClockInfo", self._SM_CLOCK)

    def lowered(self, uuid: str) -> dict[str, int]:
        """Return the limits of a device that were changed from its defaults: timings compare only under equal ones.

        They are `power_limit_w` and `sm_clock_mhz`; each is there only where it differs from the default.
        """
        found = {}
        limits = [
            ("power_limit_w", 1000, "PowerManagementLimit", "PowerManagementDefaultLimit", ()),
            ("sm_clock_mhz", 1, "ApplicationsClock", "DefaultApplicationsClock", (self._SM_CLOCK,)),
        ]
        for name, unit, now, default, arguments in limits:
            set_to = self._number(uuid, f"nvmlDeviceGet{now}", *arguments)
            usual = self._number(uuid, f"nvmlDeviceGet{default}", *arguments)
            if set_to is not None and usual is not None and set_to != usual:
                found[name] = set_to // unit
        return found

    def _number(self, uuid: str, function: str, *arguments: int) -> int | None:
        """Return what a function of a device says, None where the device or the driver has no such thing."""
        value = ctypes.c_uint()
        handle = self._handle(uuid)
        if self._library is None or handle is None or not hasattr(self._library, function):
            return None
        return value.value if getattr(self._library, function)(handle, *arguments, ctypes.byref(value)) == 0 else None

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
    """A process that computes: nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class SmClock:
    """The clock of the multiprocessors, as it was seen while samples were taken."""

    def __init__(self) -> None:
        self.most_mhz = 0

    def is_low(self, mhz: int | None) -> bool:
        """Say whether a reading is below 75 % of the highest so far. No reading says nothing."""
        if mhz is None:
            return False
        self.most_mhz = max(self.most_mhz, mhz)
        return mhz < LOW_SHARE * self.most_mhz


def foreign(processes: Collection[int] | None, own: Collection[int], computing: int = 1) -> int:
    """Return how many processes on a device are not one's own.

    Args:
        processes: numbers of all that compute there; None where that is not known.
        own: this process and its parent. In a container the driver may number processes as the host does: where fewer
            of these are in the list than compute, that many entries are taken for them.
        computing: how many of one's own compute there.
    """
    if not processes:
        return 0
    known = sum(number in own for number in processes)
    return max(0, len(processes) - max(known, computing))
