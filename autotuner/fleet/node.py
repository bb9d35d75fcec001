"""A host of a cluster: checks what it needs, then becomes `ray start`, which stays in the foreground."""

import os
import sys
from collections.abc import Mapping, Sequence

from autotuner.errors import DeviceError
from autotuner.extras import require
from autotuner.fleet.importing import SETTINGS


def has_gpus() -> bool:
    """Say whether torch sees CUDA devices here."""
    from autotuner.measure.devices.cuda import cuda_devices

    return bool(cuda_devices())


def check_gpus() -> list[str]:
    """Return the names of this host's CUDA devices.

    Raises:
        DeviceError: there is none, or no driver.
        MissingError: torch is not installed.
    """
    from autotuner.measure.devices.cuda import cuda_devices
    from autotuner.measure.devices.nvml import Nvml

    require("a host with GPUs", "torch")
    found = [device.name for device in cuda_devices()]
    if found:
        return found
    driver = Nvml().driver()
    why = "no NVIDIA driver answers here" if driver is None else f"driver {driver} is here, and torch sees no device"
    raise DeviceError(f"this host has no GPU for a fleet: {why}; start a host without one with --no-gpu")


def start_command(*, head: bool, address: str | None, port: int, gpus: int | None, rest: Sequence[str]) -> list[str]:
    """Return the command that a host becomes."""
    where = ["--head", f"--port={port}", "--include-dashboard=false"] if head else [f"--address={address}"]
    number = [] if gpus is None else [f"--num-gpus={gpus}"]
    main = "from ray.scripts.scripts import main; main()"
    return [sys.executable, "-c", main, "start", "--block", *where, *number, "--disable-usage-stats", *rest]


def start_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of that command: token authentication and the health settings, unless others are given."""
    return {**SETTINGS, **given}


def become(command: Sequence[str]) -> None:
    """Become a command; nothing comes back."""
    sys.stdout.flush()
    os.execve(command[0], list(command), start_environment(os.environ))
