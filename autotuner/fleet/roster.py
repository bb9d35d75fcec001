"""Roster: the GPUs of a fleet, which of them take part, and why others do not."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Any

from autotuner.database import FleetGpu
from autotuner.database.gpus import HOST_GONE
from autotuner.fleet.software import difference
from autotuner.ir.records import Environment

FAILURES_MAX = 3
FAILURES_WITHIN_S = 300.0
"""A GPU whose actors have given up so often within this time is left out for as long."""

CANARY_SHOWN = 0.02
CANARY_LEFT_OUT = 0.05
"""Shares by which a GPU's canary may differ from that of its class before it is shown, or left out."""


@dataclass(frozen=True)
class Gpu:
    """One GPU and the actor on it.

    Args:
        slot: its place in the cluster, as "NODE/0".
        host: name of its host.
        uuid: of the GPU, as its driver writes it.
        environment: of timings taken on it.
        cores: that its host has for compiling.
        canary_us: its first canary; None where none was timed.
        software: of its actor, as by `own_software`; "" of a version that does not tell.
    """

    slot: str
    host: str
    uuid: str
    environment: Environment
    cores: int = 1
    canary_us: float | None = None
    software: str = ""


@dataclass
class _Standing:
    gpu: Gpu | None = None
    present: bool = False
    failures: deque[float] = field(default_factory=deque)
    canary_us: float | None = None
    words: str = ""
    gone: str = ""


class Roster:
    """The GPUs that were seen, by slot. Moments are seconds of any clock that never goes back.

    GPUs whose environment is that of the first one form the class; others are left out, for their timings do not
    compare. So are those of hosts with other sources of this package than this process has.

    Args:
        environment: of the class, where it is known from the start.
        device_name: of the class, where it is asked for.
    """

    def __init__(self, environment: Environment | None = None, device_name: str | None = None) -> None:
        self.environment = environment
        self._device_name = device_name
        self._entries: dict[str, _Standing] = {}

    def join(self, gpu: Gpu) -> None:
        """Take a GPU in whose actor is ready, or is so again."""
        is_wanted = self._device_name in (None, gpu.environment.device_name) and not difference(gpu.software)
        if self.environment is None and is_wanted:
            self.environment = gpu.environment
        entry = self._entries.setdefault(gpu.slot, _Standing())
        if entry.gpu is not None and entry.gpu.uuid != gpu.uuid:
            entry = self._entries[gpu.slot] = _Standing()
        entry.gpu, entry.present = gpu, True
        if gpu.canary_us is not None:
            entry.canary_us = gpu.canary_us

    def lose(self, slot: str, now: float, failure: str = "", *, host: bool = False) -> None:
        """Note that an actor is gone; with a failure, its measurer could not measure on that GPU."""
        entry = self._entries.setdefault(slot, _Standing())
        entry.present = False
        entry.gone = HOST_GONE if host else "its actor is being started" + (failure and f" after: {failure}")
        if failure:
            entry.failures.append(now)
            entry.words = failure

    def note_canary(self, slot: str, us: float) -> bool:
        """Note what a GPU's canary took, and return whether that is news."""
        if slot not in self._entries or self._entries[slot].canary_us == us:
            return False
        self._entries[slot].canary_us = us
        return True

    def usable(self, now: float) -> list[Gpu]:
        """Return the GPUs that take part, by slot."""
        return [gpu for gpu in self.present() if not self.why_not(gpu.slot, now)]

    def present(self) -> list[Gpu]:
        """Return the GPUs whose actors are ready, whether they take part or not."""
        return [entry.gpu for _, entry in sorted(self._entries.items()) if entry.present and entry.gpu is not None]

    def is_hopeless(self, now: float) -> bool:
        """Say whether every GPU that was seen is left out."""
        return bool(self._entries) and all(self.why_not(slot, now) for slot in self._entries)

    def why_not(self, slot: str, now: float) -> str:
        """Return the reason why a GPU takes no part, "" where it does."""
        entry = self._entries[slot]
        gpu = entry.gpu
        if gpu is not None and difference(gpu.software):
            return difference(gpu.software)
        if self.environment is not None and gpu is not None and gpu.environment.key != self.environment.key:
            return f"another class: {_differences(gpu.environment, self.environment)}"
        while entry.failures and now - entry.failures[0] > FAILURES_WITHIN_S:
            entry.failures.popleft()
        if len(entry.failures) >= FAILURES_MAX:
            return f"{len(entry.failures)} actors failed within {FAILURES_WITHIN_S:g} s, the last: {entry.words}"
        off = self.canary_off(slot)
        if off is not None and abs(off) > CANARY_LEFT_OUT:
            return f"its canary is {off:+.1%} off its class"
        return ""

    def canary_off(self, slot: str) -> float | None:
        """Return by what share a GPU's canary differs from that of its class, None where that is not known.

        The class's is the lower median: of two GPUs, the faster one's.
        """
        mine = self._entries[slot].canary_us
        known = [e.canary_us for e in self._entries.values() if e.present and e.canary_us is not None]
        if mine is None or len(known) < 2:
            return None
        return mine / median_low(known) - 1

    def shown(self, now: float) -> list[FleetGpu]:
        """Return how each GPU stands; type and name are "" of one that never said what it is."""
        rows = []
        for slot, entry in sorted(self._entries.items()):
            off, why, gpu = self.canary_off(slot), self.why_not(slot, now), entry.gpu
            reason = why or ("" if entry.present else entry.gone)
            if not reason and off is not None and abs(off) > CANARY_SHOWN:
                reason = f"its canary is {off:+.1%} off its class"
            used = entry.present and not why
            if gpu is None:
                rows.append(FleetGpu(slot, "", "", used, reason or entry.words))
                continue
            kind, name = gpu.environment.device_type, gpu.environment.device_name
            rows.append(
                FleetGpu(slot, kind, name, used, reason, host=gpu.host, uuid=gpu.uuid, canary_us=entry.canary_us)
            )
        return rows


def _differences(mine: Environment, theirs: Environment) -> str:
    """Return in what a GPU differs from its fleet, for people."""
    if mine.device_name != theirs.device_name:
        return f"it is {mine.device_name}, and the job runs on {theirs.device_name}"
    here, there = ({**dict(each.facts), **dict(each.policy)} for each in (mine, theirs))
    names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    return "; ".join(f"{name} is {here.get(name)} here and {there.get(name)} on the others" for name in names)


def gpu_to_json(gpu: Gpu) -> dict[str, Any]:
    return asdict(gpu) | {"environment": gpu.environment.to_json()}


def gpu_from_json(value: Mapping[str, Any]) -> Gpu:
    """Read what `gpu_to_json` wrote, of an earlier or later version as well."""
    known = {name: value[name] for name in Gpu.__dataclass_fields__ if name in value}
    return Gpu(**{**known, "environment": environment_from_json(value["environment"])})


def environment_from_json(value: Mapping[str, Any]) -> Environment:
    """Read what `Environment.to_json` wrote."""
    facts, policy = tuple(value["facts"].items()), tuple(value["policy"].items())
    return Environment(value["device_type"], value["device_name"], facts, policy)
