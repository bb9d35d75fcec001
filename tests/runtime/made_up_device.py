"""A made-up device: memory and kernels of the CPU, behind streams and graphs of its own."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor, nn

from autotuner.ir.device import CPU, DEVICE_TYPES, DeviceType
from autotuner.runtime import scratch, stages
from autotuner.runtime.arena_memory import _MADE, Memories
from autotuner.runtime.devices import RUNTIMES, CpuRuntime, DeviceRuntime

LANES = 100
"""Streams from this number on are for steps beside each other."""
MEMORY = "memory"
OTHER = "xpu"
"""A type that the package knows nothing of. Torch has tensors without memory on it, and no others here."""


class Stream:
    """A stream that writes down what it waits for; an event is the last line before it."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self._log = number, log

    def __str__(self) -> str:
        return f"stream {self.number}" if self.number < LANES else f"lane {self.number - LANES}"

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self} joins {other}")

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self} waits for {event}")

    def record_event(self) -> str:
        return self._log[-1] if self._log else "nothing"


class MadeUpDevice(CpuRuntime):
    """A device that writes down what it is asked for.

    A capture leaves all memory as it was, as on a device that only notes what it is to do. A replay makes the same
    calls on the same memory.

    Attributes:
        now: number of the current stream.
        capturing: whether a graph is captured.
        fails: whether captures fail.
        lacks: so many captures find no memory.
        captures: how many there were; replays: how often one ran.
    """

    has_graphs = True

    def __init__(self, *, capturing: bool = False) -> None:
        super().__init__(torch.device(CPU))
        self.log: list[str] = []
        self.now = 1
        self.capturing, self.fails, self.lacks = capturing, False, 0
        self.captures = self.replays = 0

    @property
    def vendor(self) -> str:
        return "made-up"

    def stream(self) -> int:
        return self.now

    def current(self) -> Stream:
        return Stream(self.now, self.log)

    def is_capturing(self) -> bool:
        return self.capturing

    def follow(self, last: Stream, tensors: Iterable[Tensor]) -> None:
        self.log.append(f"{self.current()} waits for {last}, {len(list(tensors))} tensors")

    def lanes(self, count: int) -> list[Stream]:
        return [Stream(LANES + place, self.log) for place in range(count)]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream.number
        yield
        self.now = before

    def pool(self) -> str:
        return MEMORY

    def captured(
        self,
        run: Callable[[], Any],
        pool: Any,
        repeats: int = 0,  # noqa: ARG002
        *,
        is_whole_step: bool = False,  # noqa: ARG002
    ) -> Callable[[], Any]:
        assert pool == MEMORY
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        if self.lacks > 0:
            self.lacks -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore lines")
        self.captures += 1
        with self._unchanged(), self._capture():
            run()
        self.log.append("captured")

        def replay() -> None:
            self.replays += 1
            with self._capture():
                run()
            self.log.append("replayed")

        return replay

    def captured_alone(self, warm: Callable[[], Any], run: Callable[[], Any]) -> Callable[[], Any]:
        warm()
        return self.captured(run, MEMORY)

    @contextmanager
    def _capture(self) -> Iterator[None]:
        assert not self.capturing
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Put back what all tensors of this process hold, and the state of torch's generator."""
        generator, tensors = torch.get_rng_state(), [*map(Tensor.detach, _tensors())]
        try:
            with kept(tensors):
                yield
        finally:
            torch.set_rng_state(generator)


@contextmanager
def kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back what tensors hold, with all else in their storages; not where memory is another's, or gone by now."""
    found = (tensor.untyped_storage() for tensor in tensors)
    storages = {storage.data_ptr(): storage for storage in found if storage.resizable()}  # one at each address
    before = {place: storage.clone() for place, storage in storages.items()}  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for place, storage in storages.items():
            storage.copy_(before[place])


def _tensors() -> Iterator[Tensor]:
    """Yield the tensors of the CPU that this process holds; classes are compared, since some objects feign one."""
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == CPU and each.layout == torch.strided:
            yield each


def instead_of_the_cpu(patch: pytest.MonkeyPatch, *, follows: bool = False) -> MadeUpDevice:
    """Return a made-up device, which all tensors of the CPU are on from now on.

    Its workspaces take no memory that ones of the CPU have left, or share, which has been used on no stream.

    Args:
        follows: whether inputs are read where they lie if they lie where those of the call before lay. Then it depends
            on the allocator of the CPU how often something is captured.
    """
    device = MadeUpDevice()
    if not follows:
        patch.setattr(stages, "MOVES", 0)
    patch.setattr(_MADE, "memories", Memories())
    patch.setattr(scratch, "_COMMON", WeakValueDictionary())
    patch.setitem(RUNTIMES, CPU, lambda _: device)
    return device


def a_type_with_graphs(patch: pytest.MonkeyPatch, make: Callable[[], DeviceRuntime] = MadeUpDevice) -> None:
    """Have devices of the type `OTHER`, which are made-up ones: what is asked of them is asked by their type."""
    patch.setitem(DEVICE_TYPES, OTHER, DeviceType(alignment_bytes=64, has_graphs=True))
    patch.setitem(RUNTIMES, OTHER, lambda _: make())
