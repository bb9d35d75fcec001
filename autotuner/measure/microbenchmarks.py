"""Microbenchmarks that measure a roofline: the least times of plain work by amount, under the measuring policy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, takewhile
from math import ceil, inf

import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.kernels.cpp.matmul import matrix_product
from autotuner.measure.operands import dtype_of
from autotuner.measure.roofline import Ladder, Roofline
from autotuner.measure.timer import Run, Sweep, Timer

SAMPLES = 3
"""Of each kernel at each rung and in each pass; again, the least counts."""

HOPELESS = 1.5
"""A kernel that takes so many times the best of its rung in its first sample gets no second one."""

BYTES_MIN = 1 << 10

BYTES_HELD_SHARE = 4
"""Of the memory that operand sets may take, one rung takes at most this part."""

Make = Callable[[], Run]
Multiply = Callable[[Tensor, Tensor, Tensor], Run]


def measure_roofline(timer: Timer, held_bytes: int, dtypes: Iterable[str], sweep: Sweep | None = None) -> Roofline:
    """Return the roofline of this device.

    Args:
        timer: as candidates are timed.
        held_bytes: what operand sets may take.
        dtypes: element types of which products are measured.
        sweep: amounts of work; by default the timer's own.

    Raises:
        KernelError: torch has no such element type.
    """
    bench, device, sweep = _Bench(timer), timer.device, sweep or timer.sweep
    most = min(sweep.bytes_max, held_bytes // BYTES_HELD_SHARE)
    call_us, moved = inf, dict[float, float]()
    products: dict[str, dict[float, float]] = {dtype: {} for dtype in dtypes}
    for _ in range(sweep.passes):
        call_us = min(call_us, bench.least_us(_trifles(device), BYTES_MIN))
        for amount in takewhile(lambda amount: amount <= most, (BYTES_MIN << number for number in count())):
            _lower(moved, amount, bench.least_us(_movers(amount, device), amount))
        for dtype, rungs in products.items():
            for flop, us in _products(bench, sweep.extents, dtype_of(dtype), device):
                _lower(rungs, flop, us)
    ladders = {}
    for dtype, rungs in products.items():
        rising = sorted(rungs.items())
        ladders[dtype] = Ladder(tuple(_risen(_full_waves(rising) if sweep.full_waves else rising)))
    return Roofline(call_us, Ladder(tuple(sorted(moved.items()))), ladders)


class _Bench:
    """Times plain work as candidates are timed: in as many operand sets, each after other operators."""

    def __init__(self, timer: Timer) -> None:
        self._timer, self._policy = timer.brief(), timer.policy

    def least_us(self, makes: Iterable[Make], set_bytes: float | None = None) -> float:
        """Return the least time of any of some kernels, in microseconds.

        Args:
            set_bytes: what one operand set takes; None where caches do not matter, and one set does.
        """
        sets = 1 if set_bytes is None else min(self._policy.sets, ceil((self._policy.rotate_bytes + 1) / set_bytes))
        least = inf
        for make in makes:
            sampler = self._timer.sampler([make() for _ in range(sets)])
            for _ in range(SAMPLES):
                ((sample_us, _),) = self._timer.samples([sampler])
                least = min(least, sample_us)
                if sample_us > HOPELESS * least:
                    break
        return least


def _lower(rungs: dict[float, float], amount: float, us: float) -> None:
    rungs[amount] = min(us, rungs.get(amount, inf))


def _movers(amount: int, device: torch.device) -> Iterator[Make]:
    """Yield kernels that read and write so many bytes together: a copy, an addition, a sum, a fill."""
    item_bytes = torch.float32.itemsize
    half, third, whole = (max(1, amount // item_bytes // parts) for parts in (2, 3, 1))

    def copy() -> Run:
        source, target = _filled(half, device), _filled(half, device)
        return lambda: target.copy_(source)

    def add() -> Run:
        one, other, target = _filled(third, device), _filled(third, device), _filled(third, device)
        return lambda: torch.add(one, other, out=target)

    def read() -> Run:
        source, target = _filled(whole, device), torch.zeros((), device=device)
        return lambda: torch.sum(source, 0, out=target)

    def write() -> Run:
        target = _filled(whole, device)
        return target.zero_

    yield from (copy, add, read, write)


def _trifles(device: torch.device) -> Iterator[Make]:
    """Yield calls with next to nothing to do."""

    def write() -> Run:
        return torch.zeros(1, device=device).zero_

    def copy() -> Run:
        source, target = torch.zeros(1, device=device), torch.zeros(1, device=device)
        return lambda: target.copy_(source)

    yield from (write, copy)


def _filled(count: int, device: torch.device) -> Tensor:
    return torch.full((count,), 1.5, device=device)


def _products(
    bench: _Bench, extents: Iterable[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[float, float]]:
    """Yield the flop of a cube, the best shape for so much, and the least time for it in any order of its operands."""
    multiplies = list(_multipliers(dtype, device))
    for extent in extents:
        makes = [
            _multiplied(extent, one, other, dtype, device, multiply)
            for multiply in multiplies for one in (False, True) for other in (False, True)
        ]  # fmt: skip
        yield 2 * extent**3, bench.least_us(makes, 3 * extent**2 * dtype.itemsize)


def _multipliers(dtype: torch.dtype, device: torch.device) -> Iterator[Multiply]:
    """Yield torch's product and, of what this package can compile for a processor, its own."""
    yield lambda one, other, target: lambda: torch.mm(one, other, out=target)
    if device.type == "cpu" and dtype == torch.float32:
        try:
            matrix_product(torch.empty(1, 1), torch.empty(1, 1), torch.empty(1, 1))
        except KernelError:  # no compiler: no candidate uses it either
            return
        yield matrix_product


def _multiplied(
    extent: int, one_turned: bool, other_turned: bool, dtype: torch.dtype, device: torch.device, multiply: Multiply
) -> Make:
    def make() -> Run:
        one, other = _matrix(extent, one_turned, dtype, device), _matrix(extent, other_turned, dtype, device)
        target = torch.empty(extent, extent, dtype=dtype, device=device)
        return multiply(one, other, target)

    return make


def _matrix(extent: int, turned: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = torch.randn(extent, extent, device=device).to(dtype)
    return drawn.t() if turned else drawn


def _risen(rungs: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield rungs at no lower rate than any smaller product had: what stalls at one of them does not count."""
    rate = 0.0
    for amount, us in rungs:
        rate = max(rate, amount / us)
        yield amount, amount / rate


def _full_waves(rungs: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield rungs at no lower rate than the next one has.

    The tiles of a cube may leave most multiprocessors idle in the last wave (1536 in float32: 42 TFLOP/s, where 2048
    has 52); another shape of as much flop does not.
    """
    for place, (amount, us) in enumerate(rungs):
        rate = max(more / least for more, least in rungs[place : place + 2])
        yield amount, min(us, amount / rate)
