"""CUDA devices at run time: streams, events, and graphs of calls. Torch has AMD's devices under this name, too.

Random kernels draw from torch's default generator: replays of a graph draw new numbers, the same as its calls one by
one would. That generator may have another state at each replay: what torch compiles with checkpoints draws from
states of its own (`compiled_draws`). But a graph advances those alone that are registered with it. So each has a
state of its own, which is set to where the generator is before a replay, and the generator to where the graph has
come behind it.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.device import CUDA, NVIDIA, vendor_of
from autotuner.runtime.devices.compiled_draws import Pair, follow, pairs_on, register
from autotuner.runtime.devices.cuda_link import CudaLink
from autotuner.runtime.devices.protocol import Run, in_state
from autotuner.runtime.devices.storages import is_alone

_SIDES: dict[tuple[int, int], torch.cuda.Stream] = {}
_LANES: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
_CAPTURES = Lock()
"""Of all threads: those that replay on one stream have one stream that captures, which captures one graph at a time."""
_NOTES: dict[int, list[tuple[torch.Generator, torch.Generator]]] = {}
"""By device: states for numbers that are drawn twice, in the graph that is captured."""
APART = 40
"""Bits of the offsets between such states, so that none of them reaches the next."""
BLOCK_BYTES = 512
"""Of the allocator's blocks, which are multiples of it."""
SMALL_BYTES = 1 << 20
"""Of tensors that the allocator has in pieces of their own, at most."""
PIECE_BYTES = 64 << 20
"""Of tensors that move together."""
SHARED_POOL = (0, 0)
"""Of the allocator: memory that is no graph's."""
HIGH, LOW = -1, 0
"""Priorities of streams. The steps on no branch go first where both have work for the device."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: a graph that is destroyed while another is captured ends the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class DrawingReplay:
    """Replays a graph, which draws on from where a generator is.

    Args:
        replay: of the graph.
        generator: that is drawn from.
        own: the state that the graph draws from, registered with it.
        pairs: registered generators of compiled functions. Torch keeps both of a pair equal as it calls forward and
            backward; a forward without backward leaves them apart, which a replay, that runs both, makes up for.
    """

    def __init__(
        self, replay: Run, generator: torch.Generator, own: torch.Generator, pairs: Sequence[Pair] = ()
    ) -> None:
        self._replay, self._generator, self._own, self._pairs = replay, generator, own, pairs
        self._draws: bool | None = None

    def __call__(self) -> None:
        if self._draws is False and not self._pairs:
            self._replay()
            return
        generator, own = self._generator, self._own
        with _CAPTURES:  # a capture in another thread has the generator draw from elsewhere
            for forward, backward in self._pairs:
                follow(backward, forward)
            follow(own, generator)
            began = own.get_offset()
            self._replay()
            self._draws = own.get_offset() != began
            if self._draws:
                generator.set_offset(own.get_offset())


class CudaRuntime:
    """One device; see `DeviceRuntime`."""

    has_graphs = True
    has_own_memory = True
    has_triton = True
    columns_multiple = 64
    """Others take three times as long."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index

    @property
    def device(self) -> torch.device:
        return torch.device(CUDA, self.index)

    @property
    def vendor(self) -> str:
        return vendor_of(CUDA, torch.version.hip)

    @property
    def sums_wide(self) -> bool:
        return self.vendor == NVIDIA

    def is_current(self) -> bool:
        return torch.cuda.current_device() == self.index

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.index)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def follow(self, last: torch.cuda.Stream, tensors: Iterable[Tensor]) -> None:
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
        return torch.cuda.stream(stream)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def _side(self) -> torch.cuda.Stream:
        """Return the stream that captures what is replayed on the current stream."""
        key = (self.index, self.stream())
        if key not in _SIDES:
            _SIDES[key] = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        return _SIDES[key]

    @contextmanager
    def aside(self) -> Iterator[None]:
        side, current = self._side(), self.current()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    def captured(self, run: Run, pool: Any, repeats: int = 0, *, is_whole_step: bool = False) -> Run:
        """Return the replay of what a function queues.

        Captured is on a stream of its own, one for each stream that graphs are replayed on: a library keeps scratch
        memory per stream, which two graphs that run at the same time must not share.

        Numbers that are drawn twice come from states of the generator that the graph advances beside the usual one,
        two for each note, which begin at the same place.
        """
        side = self._side()
        graph, generator = torch.cuda.CUDAGraph(), self._generator()
        pairs = pairs_on(self.device) if is_whole_step else []
        with _CAPTURES, without_collection(), self.guard(), self._drawing(own := generator.clone_state()):
            register(graph, pairs)
            notes = _NOTES[self.index] = [self._states(graph, number) for number in range(repeats)]
            try:
                self._capture(run, pool, side, graph, pairs)
            finally:
                notes.clear()
        return DrawingReplay(graph.replay, generator, own, pairs)

    def _states(self, graph: torch.cuda.CUDAGraph, number: int) -> tuple[torch.Generator, torch.Generator]:
        """Return two equal states of the generator, which a graph advances; those of other numbers draw others."""
        generator = self._generator()
        made = generator.clone_state(), generator.clone_state()
        for state in made:
            state.set_offset(generator.get_offset() + (number + 1 << APART))
            graph.register_generator_state(state)
        return made

    def _generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.index]

    def _capture(
        self, run: Run, pool: Any, side: torch.cuda.Stream, graph: torch.cuda.CUDAGraph, pairs: Sequence[Pair]
    ) -> None:
        try:
            # The outer one restores the current stream where the end of a capture fails.
            with (
                torch.cuda.stream(self.current()),
                torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
            ):
                run()
        except Exception:
            self._recover(side, pool, pairs)
            raise

    def _recover(self, side: torch.cuda.Stream, pool: Any, pairs: Sequence[Pair]) -> None:
        """After a capture that failed: a capture that ends well leaves generators ready for plain draws."""
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.index, pool)
        with suppress(Exception):
            anything = torch.zeros(1, device=f"cuda:{self.index}")
            graph = torch.cuda.CUDAGraph()
            register(graph, pairs)
            with (
                torch.cuda.stream(self.current()),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                anything.add_(1)

    def captured_alone(self, warm: Run, run: Run) -> Run:
        with self.guard():
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                warm()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def mark(self) -> torch.cuda.Event:
        with torch.cuda.device(self.index):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def elapsed_us(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) * 1e3

    def forked_random(self) -> AbstractContextManager[Any]:
        return torch.random.fork_rng([self.index], device_type=CUDA)

    def drawn_so_far(self) -> Run:
        return partial(self._generator().set_state, self._generator().get_state())

    @contextmanager
    def noted_draws(self) -> Iterator[Any]:
        if not self.is_capturing():
            yield self._generator().get_state()
            return
        first, second = _NOTES[self.index].pop()
        with self._drawing(first):
            yield second

    def draws_again(self, noted: Any) -> AbstractContextManager[None]:
        return self._drawing(noted) if isinstance(noted, torch.Generator) else in_state(self._generator(), noted)

    @contextmanager
    def _drawing(self, state: torch.Generator) -> Iterator[None]:
        """Draw from a state that the graph which is captured advances."""
        generator = self._generator()
        before = generator.graphsafe_get_state()
        generator.graphsafe_set_state(state)
        try:
            yield
        finally:
            generator.graphsafe_set_state(before)

    def link(self) -> CudaLink:
        return CudaLink(self.device)

    def gather(self, tensors: Iterable[Tensor]) -> None:
        own = [each for each in tensors if each.device == self.device and is_alone(each)]
        if not own:
            return
        # Memory may be short, and not all settings of the allocator allow pools. What has not moved is right, too.
        with self.guard(), torch.no_grad(), suppress(RuntimeError):
            pool = torch.cuda.MemPool()
            for piece in _pieces(own):
                torch.cuda.empty_cache()
                large = [each.nbytes for each in piece if each.nbytes > SMALL_BYTES]
                whole = sum(-(-count // BLOCK_BYTES) * BLOCK_BYTES for count in large)
                with torch.cuda.use_mem_pool(pool, self.device):
                    # The allocator cuts what follows from a block of this size, and leaves nothing between.
                    torch.empty(whole, dtype=torch.uint8, device=self.device)
                    moved = [each.clone() for each in piece]
                for tensor, value in zip(piece, moved, strict=True):
                    tensor.data = value
            torch.cuda.empty_cache()

    def free_bytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.index)

    def room_bytes(self) -> int:
        free_bytes, all_bytes = self.free_bytes()
        share = torch.cuda.get_per_process_memory_fraction(self.index)
        return min(free_bytes + torch.cuda.memory_reserved(self.index), int(share * all_bytes))

    def meter(self) -> "CudaMeter":
        return CudaMeter(self.index)


class CudaMeter:
    """Counts what torch's allocator gives out; see `MemoryMeter`."""

    counts_all = True

    def __init__(self, index: int) -> None:
        self._index, self._reserved = index, 0
        self._laps: list[int] = []
        torch.cuda.empty_cache()
        # What a pool holds and has not given out belongs to graphs, whose replays write there.
        self.others_bytes = _held_by_pools(index)
        torch.cuda.reset_peak_memory_stats(index)

    def lap(self) -> None:
        self._laps.append(torch.cuda.max_memory_allocated(self._index))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._index))
        torch.cuda.reset_peak_memory_stats(self._index)

    def stop(self) -> tuple[list[int], int]:
        self.lap()
        return self._laps, self._reserved - self.others_bytes


def _held_by_pools(index: int) -> int:
    """Return the bytes that memory pools hold and have not given out."""
    try:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except RuntimeError:  # not all allocators tell
        return torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == index and segment["segment_pool_id"] != SHARED_POOL
    )


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors as they lie, some at a time: all of them together would be there twice while they move."""
    piece: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda each: each.data_ptr()):
        piece.append(tensor)
        if sum(each.nbytes for each in piece) >= PIECE_BYTES:
            yield piece
            piece = []
    if piece:
        yield piece
