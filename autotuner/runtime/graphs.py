"""Calls in a row, as one CUDA graph from their second time on.

The first time they run one by one, which sets up what libraries need. The second time they are captured, and from then
on replayed. Random kernels draw from torch's default generator, which torch registers with each graph: replays draw new
numbers, and the same as the calls one by one would. Where the current stream is being captured already, the calls run
one by one, into the caller's graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotuner.runtime.tally import warn

Run = Callable[[], Any]

# Graphs of one row of calls, by the stream that they are replayed on; on further streams the calls run one by one.
STREAMS = 2


class Capturing(Protocol):
    """The part of `Cuda` that is needed here."""

    def stream(self) -> int: ...
    def is_capturing(self) -> bool: ...
    def pool(self) -> Any: ...
    def captured(self, run: Run, pool: Any) -> Run: ...


@dataclass(eq=False)
class Row:
    """Calls that run one after the other; `replays` says whether a graph may be made of them."""

    calls: Sequence[Run]
    replays: bool = True
    ran: bool = False
    graphs: dict[int, Run] = field(default_factory=dict)

    def run(self) -> None:
        """Run the calls one by one."""
        for call in self.calls:
            call()
        self.ran = True


@dataclass(eq=False)
class Switch:
    """Whether a module's calls become graphs; the first capture that fails turns it off, with a warning."""

    is_on: bool

    def fail(self, error: Exception) -> None:
        if self.is_on:
            self.is_on = False
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            warn(f"a tuned module runs without CUDA graphs: its kernels could not be captured ({words})")


class Graphs:
    """Runs the rows of one workspace. Its graphs share their temporary memory, since they never run at one time."""

    def __init__(self, device: Capturing, switch: Switch) -> None:
        self._device, self._switch = device, switch
        self._pool: Any = None

    def run(self, row: Row) -> None:
        device = self._device
        if not self._switch.is_on or not row.replays or device.is_capturing():
            row.run()
            return
        stream = device.stream()
        replay = row.graphs.get(stream)
        if replay is None:
            if not row.ran or len(row.graphs) == STREAMS:
                row.run()
                return
            if self._pool is None:
                self._pool = device.pool()
            try:
                replay = row.graphs[stream] = device.captured(row.run, self._pool)
            except Exception as error:
                self._switch.fail(error)
                row.run()
                return
        replay()
