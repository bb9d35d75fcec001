"""The lock of a device: one file per device and user, so that two tunings on a host never time on it at once."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotuner.device import cuda_uuid


def lock_path(device_type: str, device_index: int = 0) -> str:
    """Return the lock file: of all cores together, or of one CUDA device by its UUID, whatever its index here."""
    which = f"cuda-{cuda_uuid(device_index)}" if device_type == "cuda" else device_type
    return str(Path(tempfile.gettempdir()) / f"autotuner-{which}-{os.getuid()}.lock")


@contextmanager
def locked(path: str, *, alone: bool) -> Iterator[None]:
    """Hold the device: alone to time on it, together with others to compile beside them."""
    import fcntl

    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
