"""Leases: the process that holds a job or a call, and the time after which it counts as gone."""

import hashlib
import os
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Leases:
    """Seconds until an owner on another host counts as gone, unless it renews what it holds."""

    job_s: float = 60.0
    call_s: float = 120.0


def this_process() -> str:
    """Return the name of this process, which no other ever has: host with its boot and process table, number, start.

    Owners within one process add "#" and a word of their own.
    """
    return f"{_host()}:{os.getpid()}:{_start(os.getpid())}"


def is_gone(owner: str, lease_until: datetime, now: datetime) -> bool:
    """Say whether an owner can no longer give back what it holds.

    A process of this host is looked for, so that what a killed one held is free at once; of one elsewhere, or from
    before the host was booted anew, only its lease tells.
    """
    host, _, rest = owner.partition(":")
    number, _, start = rest.partition("#")[0].partition(":")
    if host != _host() or not number.isdigit() or not start.isdigit() or int(start) == 0:
        return lease_until < now
    return _start(int(number)) != int(start)


def _host() -> str:
    """Return where a process number means one process: two hosts may have one name, and one host several tables."""
    try:
        boot = _BOOT.read_text().strip()
        table = hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    except OSError:
        table = "unknown"
    return f"{socket.gethostname().replace(':', '-')}/{table}"


def _start(process_id: int) -> int:
    """Return when a process started, in clock ticks after boot; 0 where there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
