"""Times of one step: of the layers, of the copies, of the updates, and what bounds the step."""

from dataclasses import dataclass
from math import ceil

CALLS = "the host's calls of layers"
"""Bounds a step in which the device waits for the host's Python: that is the time of the layers, then."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one step.

    Args:
        forward: that layers computed in forward, and what is behind them.
        backward: that they computed in backward, run again and differentiated.
        down_forward: of copies to the device in forward.
        down_backward: of those in backward.
        up_forward: of copies to the host in forward: inputs of layers that are kept there.
        up_backward: of those in backward: gradients.
        host: of updates on the host.
        measured: of the whole step.
        overlaps: whether the host updates during backward.
        micro_batches: of the step.
        waiting: share of the layers, in forward and backward, in which the device waited for the calls of the host.
    """

    forward: float
    backward: float
    down_forward: float
    down_backward: float
    up_forward: float
    up_backward: float
    host: float
    measured: float
    overlaps: bool
    micro_batches: int = 1
    waiting: float = 0.0

    @property
    def parts(self) -> tuple[dict[str, float], ...]:
        """Parts of a step, one after the other: what runs at the same time in each, by name."""
        computing = CALLS if self.waiting > 0.5 else "computing"
        of_forward = {computing: self.forward, "the link": max(self.down_forward, self.up_forward)}
        of_backward = {computing: self.backward, "the link": max(self.down_backward, self.up_backward)}
        if self.overlaps:
            return of_forward, of_backward | {"updates on the host": self.host}
        return of_forward, of_backward, {"updates on the host": self.host}

    @property
    def predicted(self) -> float:
        """The least that the step takes where all that can overlaps, without what is before the layers."""
        return sum(max(part.values()) for part in self.parts)

    @property
    def bound(self) -> str:
        """Name of what takes most of that."""
        total: dict[str, float] = {}
        for part in self.parts:
            name = max(part, key=lambda each: part[each])
            total[name] = total.get(name, 0.0) + part[name]
        return max(total, key=lambda each: total[each])

    @property
    def is_computing(self) -> bool:
        """True where the layers are what takes longest in forward or backward, so that faster ones save time."""
        computing = (self.forward, self.backward)
        return any(own >= max(part.values()) for own, part in zip(computing, self.parts, strict=False))

    @property
    def enough(self) -> int:
        """Micro-batches of this size from which on the layers compute for as long as what runs beside them takes."""
        rounds = [
            self.micro_batches * max(part.values()) / computing
            for part, computing in zip(self.parts, (self.forward, self.backward), strict=False)
            if computing
        ]
        return max([1, *map(ceil, rounds)])

    def __str__(self) -> str:
        down, up = self.down_forward + self.down_backward, self.up_forward + self.up_backward
        return (
            f"a step took {_told(self.measured)}: layers computed {_told(self.forward)} forward and "
            f"{_told(self.backward)} backward, copies took {_told(down)} to the device and {_told(up)} to the host, "
            f"updates {_told(self.host)}; {_told(self.predicted)} where all that can overlaps, bound by {self.bound}"
            + (f"; {self.enough} micro-batches hide the rest" if self.enough > self.micro_batches else "")
            + ("; larger micro-batches need fewer calls" if self.bound == CALLS else "")
        )


def _told(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
