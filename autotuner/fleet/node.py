"""A host of a cluster: checks what it needs, then becomes `ray start`, which stays in the foreground."""

import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence

from autotuner.errors import DeviceError, InputError
from autotuner.fleet.cluster import SETTINGS, imported

PORT = 6379
CONNECT_S = 5.0


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT".

    Raises:
        InputError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{text!r} is no address of a head: write HOST:PORT, such as head:{PORT}")
    return host.strip("[]"), int(port)


def has_gpus() -> bool:
    """Say whether torch sees CUDA devices here."""
    from autotuner.measure.devices.cuda import cuda_devices

    return bool(cuda_devices())


def check_gpus() -> list[str]:
    """Return the names of this host's CUDA devices.

    Raises:
        DeviceError: there is none, or torch or the driver are missing.
    """
    from autotuner.measure.devices import check_torch
    from autotuner.measure.devices.cuda import cuda_devices
    from autotuner.measure.devices.nvml import Nvml

    check_torch()
    found = [device.name for device in cuda_devices()]
    if found:
        return found
    driver = Nvml().driver()
    why = "no NVIDIA driver answers here" if driver is None else f"driver {driver} is here, and torch sees no device"
    raise DeviceError(f"this host has no GPU for a fleet: {why}; start a host without one with --no-gpu")


def check_head(address: str) -> None:
    """Check that a head answers, lets this host in, and has the same versions of Ray and Python.

    Raises:
        DeviceError: one of these is not so.
    """
    host, port = address_of(address)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise DeviceError(
            f"nothing answers at {address} ({error.strerror or error}): start the head there with `autotuner node "
            f"--head --port {port}`, and open the port in the firewall"
        ) from error
    found = head_versions(f"{socket.gethostbyname(host)}:{port}")
    if own_versions() != found:
        raise DeviceError(f"the head at {address} has {_words(found)}, and this host {_words(own_versions())}: "
                          "install the same on all hosts of a cluster")  # fmt: skip


def own_versions() -> dict[str, str]:
    """Return the versions that all hosts of a cluster share: Ray's, and Python's to the minor."""
    return {"ray": imported().__version__, "python": ".".join(platform.python_version_tuple()[:2])}


def head_versions(address: str) -> dict[str, str]:
    """Return the versions of a head.

    Raises:
        DeviceError: it does not let this host in.
    """
    ray = imported()
    from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        text = GcsClient(address=address).internal_kv_get(CLUSTER_METADATA_KEY, namespace=b"cluster", timeout=CONNECT_S)
    except ray.exceptions.AuthenticationError as error:
        raise DeviceError(
            f"the head at {address} does not let this host in: put its token, as `ray get-auth-token` prints it there, "
            "into ~/.ray/auth_token here, or name the file in RAY_AUTH_TOKEN_PATH"
        ) from error
    except Exception as error:
        raise DeviceError(f"what answers at {address} is no head of Ray {ray.__version__}: {error}") from error
    value: Mapping[str, str] = json.loads(text or b"{}")
    return {"ray": str(value.get("ray_version")), "python": ".".join(str(value.get("python_version")).split(".")[:2])}


def _words(versions: Mapping[str, str]) -> str:
    return f"Ray {versions['ray']} on Python {versions['python']}"


def start_command(*, head: bool, address: str | None, port: int, gpus: int | None, rest: Sequence[str]) -> list[str]:
    """Return the command that a host becomes."""
    where = ["--head", f"--port={port}"] if head else [f"--address={address}"]
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
