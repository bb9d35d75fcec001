"""CUDA streams and graphs: order between streams, and calls in a row as one CUDA graph from their second time on.

The first time they run one by one, which sets up what libraries need. The second time they are captured, and from then
on replayed. Random kernels draw from torch's default generator, which torch registers with each graph: replays draw new
numbers, and the same as the calls one by one would. Where the current stream is being captured already, the calls run
one by one, into the caller's graph.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from autotuner.runtime.fallbacks import warn

Run = Callable[[], Any]

_SIDES: dict[tuple[int, int], torch.cuda.Stream] = {}
_LANES: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
_CAPTURES = Lock()
"""Of all threads: those that replay on one stream have one stream that captures, which captures one graph at a time."""
HIGH, LOW = -1, 0
"""Priorities of streams. The steps on no branch go first where both have work for the device."""


class Cuda:
    """One device. Nothing here waits on the host, except that `captured` does, once per graph."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index

    def guard(self) -> AbstractContextManager[Any]:
        """Make this device the current one for a while, where it is not."""
        return nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)

    def stream(self) -> int:
        """Return the handle of the caller's current stream."""
        return torch._C._cuda_getCurrentRawStream(self.index)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.index)

    def is_capturing(self) -> bool:
        """Say whether a graph is being captured on the current stream; called with this device as the current one."""
        return torch.cuda.is_current_stream_capturing()

    def follow(self, last: torch.cuda.Stream, tensors: Iterable[Tensor]) -> None:
        """Make the current stream wait for all that was queued on another one, and tell the allocator who uses what."""
        current = self.current()
        current.wait_event(last.record_event())
        for tensor in tensors:
            tensor.record_stream(current)

    def lanes(self, count: int) -> list[torch.cuda.Stream]:
        """Return streams for steps that are captured beside each other; the first has priority over the others.

        They belong to the current stream: a library keeps scratch memory per stream.
        """
        found = _LANES.setdefault((self.index, self.stream()), [])
        while len(found) < count:
            found.append(torch.cuda.Stream(self.index, priority=LOW if found else HIGH))  # type: ignore[no-untyped-call]
        return found[:count]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Make a stream the current one for a while."""
        return torch.cuda.stream(stream)

    def pool(self) -> Any:
        """Return memory that graphs share which never run at the same time."""
        return torch.cuda.graph_pool_handle()

    def _side(self) -> torch.cuda.Stream:
        """Return the stream that captures what is replayed on the current stream."""
        key = (self.index, self.stream())
        if key not in _SIDES:
            _SIDES[key] = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        return _SIDES[key]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Queue work on the stream that captures, in order with what is queued on the current one before and after."""
        side, current = self._side(), self.current()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    def captured(self, run: Run, pool: Any) -> Run:
        """Return the replay of what a function queues; it ran before, so that nothing is set up meanwhile.

        Captured is on a stream of its own, one for each stream that graphs are replayed on: a library keeps scratch
        memory per stream, which two graphs that run at the same time must not share.

        Raises:
            Exception: whatever the function or CUDA says; generator and current stream are as before.
        """
        side = self._side()
        graph = torch.cuda.CUDAGraph()
        with _CAPTURES:
            return self._captured(run, pool, side, graph)

    def _captured(self, run: Run, pool: Any, side: torch.cuda.Stream, graph: torch.cuda.CUDAGraph) -> Run:
        try:
            # The outer one restores the current stream where the end of a capture fails.
            with (
                torch.cuda.stream(self.current()),
                torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
            ):
                run()
        except Exception:
            self._recover(side, pool)
            raise
        return graph.replay

    def _recover(self, side: torch.cuda.Stream, pool: Any) -> None:
        """After a capture that failed: a capture that ends well leaves torch's generator ready for plain draws."""
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.index, pool)
        with suppress(Exception):
            anything = torch.zeros(1, device=f"cuda:{self.index}")
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(self.current()),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                anything.add_(1)


class StreamOrder:
    """Order between the uses of some memory: whoever uses it on another stream waits for what was queued before."""

    def __init__(self) -> None:
        self._last: tuple[int, torch.cuda.Stream] | None = None

    def turn(self, cuda: Cuda, tensors: Iterable[Tensor]) -> None:
        """Use tensors on the current stream from now on."""
        if self._last is None or cuda.stream() != self._last[0]:
            if self._last is not None:
                cuda.follow(self._last[1], tensors)
            self._last = (cuda.stream(), cuda.current())


# Graphs of one sequence of calls, by the stream that they are replayed on; on further streams the calls run one by one.
STREAMS = 2


class Capturing(Protocol):
    """The part of `Cuda` that is needed here."""

    def stream(self) -> int: ...
    def is_capturing(self) -> bool: ...
    def pool(self) -> Any: ...
    def captured(self, run: Run, pool: Any) -> Run: ...


@dataclass(eq=False)
class CallSequence:
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
    """Switch of a module's graphs; the first capture that fails turns it off, with a warning."""

    is_on: bool

    def fail(self, error: Exception) -> None:
        if self.is_on:
            self.is_on = False
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            warn(f"a tuned module runs without CUDA graphs: its kernels could not be captured ({words})")


class Graphs:
    """Graphs of one workspace's calls. They share their temporary memory, since they never run at one time."""

    def __init__(self, device: Capturing, switch: Switch) -> None:
        self._device, self._switch = device, switch
        self._pool: Any = None

    def forget(self) -> None:
        """Take other memory for the next graphs: that of graphs which are all gone cannot be captured into again."""
        self._pool = None

    def run(self, sequence: CallSequence) -> None:
        device = self._device
        if not self._switch.is_on or not sequence.replays or device.is_capturing():
            sequence.run()
            return
        stream = device.stream()
        replay = sequence.graphs.get(stream)
        if replay is None:
            if not sequence.ran or len(sequence.graphs) == STREAMS:
                sequence.run()
                return
            if self._pool is None:
                self._pool = device.pool()
            try:
                replay = sequence.graphs[stream] = device.captured(sequence.run, self._pool)
            except Exception as error:
                self._switch.fail(error)
                sequence.run()
                return
        replay()
