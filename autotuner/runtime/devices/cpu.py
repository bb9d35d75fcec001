"""The CPU at run time: one stream, on which a call is over when it returns, and no graphs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.device import vendor_of
from autotuner.measure.devices.cpu_sampling import AllocationCount
from autotuner.runtime.devices.protocol import HostLink, Run, in_state


class CpuRuntime:
    """The CPU, or a device of which nothing is known but that torch runs calls on it; see `DeviceRuntime`."""

    has_graphs = False
    has_own_memory = False
    has_triton = False
    sums_wide = False
    columns_multiple = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def vendor(self) -> str:
        return vendor_of(self.device.type, None)

    def is_current(self) -> bool:
        return True

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> int:
        return 0

    def current(self) -> Any:
        return None

    def is_capturing(self) -> bool:
        return False

    def follow(self, last: Any, tensors: Iterable[Tensor]) -> None:
        pass

    def lanes(self, count: int) -> Sequence[Any]:
        return [None] * count

    def on(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        return nullcontext()

    def pool(self) -> Any:
        return None

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def captured(self, run: Run, pool: Any, repeats: int = 0, *, is_whole_step: bool = False) -> Run:  # noqa: ARG002
        raise RuntimeError(f"calls on {self.device} cannot be captured")

    def captured_alone(self, warm: Run, run: Run) -> Run:  # noqa: ARG002
        raise RuntimeError(f"calls on {self.device} cannot be captured")

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return perf_counter()

    def has_passed(self, mark: float) -> bool:  # noqa: ARG002
        return False

    def elapsed_us(self, began: float, ended: float) -> float:
        return float(ended - began) * 1e6

    def forked_random(self) -> AbstractContextManager[Any]:
        return torch.random.fork_rng([])

    def drawn_so_far(self) -> Run:
        return partial(torch.set_rng_state, torch.get_rng_state())

    @contextmanager
    def noted_draws(self) -> Iterator[Tensor]:
        yield torch.get_rng_state()

    def draws_again(self, noted: Tensor) -> AbstractContextManager[None]:
        return in_state(torch.default_generator, noted)

    def gather(self, tensors: Iterable[Tensor]) -> None:
        pass

    def free_bytes(self) -> tuple[int, int] | None:
        return None

    def room_bytes(self) -> None:
        return None

    def meter(self) -> AllocationCount:
        return AllocationCount()

    def link(self) -> HostLink:
        return DirectLink()


class DirectLink:
    """The link of a device that is the host: a copy is over when it returns, and its ticket is the seconds it took."""

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def release(self, buffer: Tensor) -> None:
        pass

    def down(self, target: Tensor, source: Tensor, first: bool = False) -> Any:  # noqa: ARG002
        began = perf_counter()
        target.copy_(source)
        return perf_counter() - began

    def up(self, target: Tensor, source: Tensor) -> Any:
        return self.down(target, source)

    def wait(self, ticket: Any) -> None:
        pass

    def wait_on_host(self, ticket: Any) -> None:
        pass

    def seconds(self, ticket: Any) -> float:
        return float(ticket)
