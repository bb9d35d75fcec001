"""Readings of NVIDIA's management library (NVML), and what they say: did a device run at its full clock, and alone."""

from collections.abc import Collection
from typing import Any

LOW_SHARE = 0.75
SM_CLOCK = 1
"""NVML's number of the clock of the multiprocessors."""


def cuda_uuid(index: int) -> str:
    """Return what tells a CUDA device from every other, as the driver writes it: "GPU-..."."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class Nvml:
    """Readings of NVIDIA's management library (NVML); each is None where the library or the device does not have it.

    The library comes with the driver, and nvidia-ml-py, which calls it, with the extra `cuda`.
    """

    def __init__(self) -> None:
        self._library: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            return
        except pynvml.NVMLError:
            return
        self._library = pynvml

    def driver(self) -> str | None:
        """Return the driver's version."""
        version: str | None = self._read("nvmlSystemGetDriverVersion")
        return version

    def sm_clock_mhz(self, uuid: str) -> int | None:
        """Return how fast a device's multiprocessors run now."""
        mhz: int | None = self._of_device(uuid, "nvmlDeviceGetClockInfo", SM_CLOCK)
        return mhz

    def lowered(self, uuid: str) -> dict[str, int]:
        """Return the limits of a device that were changed from its defaults: timings compare only under equal ones.

        They are `power_limit_w` and `sm_clock_mhz`; each is there only where it differs from the default.
        """
        found = {}
        limits = [
            ("power_limit_w", 1000, "PowerManagementLimit", "PowerManagementDefaultLimit", ()),
            ("sm_clock_mhz", 1, "ApplicationsClock", "DefaultApplicationsClock", (SM_CLOCK,)),
        ]
        for name, unit, now, default, arguments in limits:
            set_to = self._of_device(uuid, f"nvmlDeviceGet{now}", *arguments)
            usual = self._of_device(uuid, f"nvmlDeviceGet{default}", *arguments)
            if set_to is not None and usual is not None and set_to != usual:
                found[name] = set_to // unit
        return found

    def processes(self, uuid: str) -> list[int] | None:
        """Return the numbers of the processes that compute on a device; inside a container they may be the host's."""
        found = self._of_device(uuid, "nvmlDeviceGetComputeRunningProcesses_v3")
        return None if found is None else [process.pid for process in found]

    def _of_device(self, uuid: str, function: str, *arguments: int) -> Any:
        device = self._read("nvmlDeviceGetHandleByUUID", uuid)
        return None if device is None else self._read(function, device, *arguments)

    def _read(self, function: str, *arguments: Any) -> Any:
        if self._library is None:
            return None
        try:
            return getattr(self._library, function)(*arguments)
        except (AttributeError, self._library.NVMLError):
            return None


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
