"""Processes that a test watches."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60


def until(seen: Callable[[], bool]) -> None:
    """Wait until something is seen."""
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
