"""The lock of a device: one file per device type and user, so that two tunings on a host never time at once."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lock_path(device_type: str) -> str:
    return str(Path(tempfile.gettempdir()) / f"autotuner-{device_type}-{os.getuid()}.lock")


@contextmanager
def locked(path: str, *, alone: bool) -> Iterator[None]:
    """Hold the device: alone to time on it, together with others to compile beside them."""
    import fcntl

    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
