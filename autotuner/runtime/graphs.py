"""Graphs of calls: calls in a row are captured at their second time and then replayed; and order between streams.

The first time in a thread they run one by one, which sets up what libraries need there. The second time they are
captured, and from then on replayed: replays draw new random numbers, and the same as the calls one by one would.
Where the current stream is being captured already, the calls run one by one, into the caller's graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import local
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from autotuner.errors import first_line
from autotuner.runtime.devices import DeviceRuntime, Run
from autotuner.runtime.fallbacks import warn


class StreamOrder:
    """Order between the uses of some memory: whoever uses it on another stream waits for what was queued before."""

    def __init__(self) -> None:
        self._last: tuple[int, Any] | None = None

    def turn(self, device: DeviceRuntime, tensors: Iterable[Tensor]) -> None:
        """Use tensors on the current stream from now on."""
        if self._last is None or device.stream() != self._last[0]:
            if self._last is not None:
                device.follow(self._last[1], tensors)
            self._last = (device.stream(), device.current())


# Graphs of one sequence of calls, by the stream that they are replayed on; on further streams the calls run one by one.
STREAMS = 2


class ThreadToken:
    """Stands for a thread for as long as it runs; the number of one that has ended is soon that of another."""


class _OfThread(local):
    def __init__(self) -> None:
        self.token = ThreadToken()


_OF_THREAD = _OfThread()


@dataclass(eq=False)
class CallSequence:
    """Calls that run one after the other.

    Args:
        replays: whether a graph may be made of them.
        names: of the calls, under which torch's profiler has them where they run one by one; () for none.
        ran: the threads in which they ran one by one.
        graphs: replays by stream.
    """

    calls: Sequence[Run]
    replays: bool = True
    names: Sequence[str] = ()
    ran: WeakSet[ThreadToken] = field(default_factory=WeakSet)
    graphs: dict[int, Run] = field(default_factory=dict)

    def run(self) -> None:
        """Run the calls one by one."""
        if self.names and torch._C._autograd._profiler_enabled():
            for name, call in zip(self.names, self.calls, strict=True):
                with record_function(name):
                    call()
        else:
            for call in self.calls:
                call()
        self.ran.add(_OF_THREAD.token)


@dataclass(eq=False)
class Switch:
    """Switch of a module's graphs; the first capture that fails turns it off for good, with a warning."""

    is_on: bool
    has_failed: bool = False

    def turn(self, on: bool) -> None:
        self.is_on = on and not self.has_failed

    def fail(self, error: Exception) -> None:
        if self.is_on:
            self.is_on, self.has_failed = False, True
            warn(f"a tuned module runs without CUDA graphs: its kernels could not be captured ({first_line(error)})")


class TemporaryMemory:
    """Memory of what graphs make and read themselves, shared by graphs that never run at one time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._captured: WeakSet[CallSequence] = WeakSet()

    def pool(self, device: DeviceRuntime, sequence: CallSequence) -> Any:
        """Return the pool for a graph of a sequence: one whose graphs are all gone cannot be captured into again."""
        if not any(each.graphs for each in self._captured):
            self._pool = device.pool()
        self._captured.add(sequence)
        return self._pool


class Graphs:
    """Graphs of one workspace's calls."""

    def __init__(self, device: DeviceRuntime, switch: Switch, memory: TemporaryMemory | None = None) -> None:
        """Capture nothing yet.

        Args:
            memory: of graphs of other workspaces too, none of which run at one time; None for these graphs' own.
        """
        self._device, self._switch, self._memory = device, switch, memory or TemporaryMemory()

    def run(self, sequence: CallSequence) -> None:
        device = self._device
        if not self._switch.is_on or not sequence.replays or device.is_capturing():
            sequence.run()
            return
        stream = device.stream()
        replay = sequence.graphs.get(stream)
        if replay is None:
            if _OF_THREAD.token not in sequence.ran or len(sequence.graphs) == STREAMS:
                sequence.run()
                return
            try:
                replay = device.captured(sequence.run, self._memory.pool(device, sequence))
                sequence.graphs[stream] = replay
            except Exception as error:
                self._switch.fail(error)
                sequence.run()
                return
        replay()
