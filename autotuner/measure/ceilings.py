"""Measures ceilings: the least times of plain work by amount, under the measuring policy, in the measuring process."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, takewhile
from math import ceil, inf

import torch
from torch import Tensor

from autotuner.ceilings import Ceilings, Ladder
from autotuner.measure.operands import dtype_of
from autotuner.measure.policy import Policy
from autotuner.measure.sampling import Run, Sampler

PASSES = 2
"""Over all rungs, one after the other: what disturbs one pass is over in the next. The least counts."""

SAMPLES = 3
"""Of each kernel at each rung and in each pass; again, the least counts."""

SAMPLE_SHARE = 0.1
"""A sample is so much shorter than one of a candidate: of the least of several, short ones are the more optimistic."""

HOPELESS = 1.5
"""A kernel that takes so many times the best of its rung in its first sample gets no second one."""

BYTES_MIN, BYTES_MAX = 1 << 10, 1 << 27
"""Above the last rung its own bandwidth counts: no more than a device's memory has, where it is beyond every cache."""

BYTES_HELD_SHARE = 4
"""Of the memory that operand sets may take, one rung takes at most this part."""

PRODUCT_MIN, PRODUCT_MAX = 16, 1024
"""Extents of a cube, whose flop is four times as much from rung to rung."""

Make = Callable[[], Run]


def measure_ceilings(policy: Policy, between: Run, held_bytes: int, dtypes: Iterable[str]) -> Ceilings:
    """Return the ceilings of this device.

    Args:
        between: small operators, run untimed between short calls, as candidates are timed.
        held_bytes: what operand sets may take.
        dtypes: element types of which products are measured.

    Raises:
        KernelError: torch has no such element type.
    """
    bench = _Bench(policy, between)
    most = min(BYTES_MAX, held_bytes // BYTES_HELD_SHARE)
    call_us, moved = inf, dict[float, float]()
    products: dict[str, dict[float, float]] = {dtype: {} for dtype in dtypes}
    for _ in range(PASSES):
        call_us = min(call_us, bench.least_us(_trifles(), BYTES_MIN))
        for amount in _amounts(most):
            moved[amount] = min(bench.least_us(_movers(amount), amount), moved.get(amount, inf))
        for dtype, rungs in products.items():
            for flop, us in _products(bench, dtype_of(dtype)):
                rungs[flop] = min(us, rungs.get(flop, inf))
    ladders = {dtype: Ladder(tuple(_risen(sorted(rungs.items())))) for dtype, rungs in products.items()}
    return Ceilings(call_us, Ladder(tuple(sorted(moved.items()))), ladders)


class _Bench:
    """Times plain work as candidates are timed: in as many operand sets, each after other operators."""

    def __init__(self, policy: Policy, between: Run) -> None:
        self._policy, self._between = replace(policy, sample_us=SAMPLE_SHARE * policy.sample_us), between

    def least_us(self, makes: Iterable[Make], set_bytes: float) -> float:
        """Return the least time of any of some kernels, in microseconds; `set_bytes` is what one of its sets takes."""
        sets = min(self._policy.sets, ceil((self._policy.rotate_bytes + 1) / set_bytes))
        least = inf
        for make in makes:
            sampler = Sampler([make() for _ in range(sets)], self._policy, self._between)
            for _ in range(SAMPLES):
                sample_us, _ = sampler.sample()
                least = min(least, sample_us)
                if sample_us > HOPELESS * least:
                    break
        return least


def _amounts(most: int) -> list[int]:
    return list(takewhile(lambda amount: amount <= most, (BYTES_MIN << number for number in count())))


def _movers(amount: int) -> Iterator[Make]:
    """Yield kernels that read and write so many bytes together: a copy, an addition, a sum, a fill."""
    item_bytes = torch.float32.itemsize
    half, third, whole = (max(1, amount // item_bytes // parts) for parts in (2, 3, 1))

    def copy() -> Run:
        source, target = _filled(half), _filled(half)
        return lambda: target.copy_(source)

    def add() -> Run:
        one, other, target = _filled(third), _filled(third), _filled(third)
        return lambda: torch.add(one, other, out=target)

    def read() -> Run:
        source, target = _filled(whole), torch.zeros(())
        return lambda: torch.sum(source, 0, out=target)

    def write() -> Run:
        target = _filled(whole)
        return target.zero_

    yield from (copy, add, read, write)


def _trifles() -> Iterator[Make]:
    """Yield calls with next to nothing to do."""

    def write() -> Run:
        return torch.zeros(1).zero_

    def copy() -> Run:
        source, target = torch.zeros(1), torch.zeros(1)
        return lambda: target.copy_(source)

    yield from (write, copy)


def _filled(count: int) -> Tensor:
    return torch.full((count,), 1.5)


def _products(bench: _Bench, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Yield the flop of a cube, the best shape for so much, and the least time for it in any order of its operands."""
    extents = (round(PRODUCT_MIN * 4 ** (number / 3)) for number in count())
    for extent in takewhile(lambda extent: extent <= PRODUCT_MAX, extents):
        makes = [_multiplied(extent, one, other, dtype) for one in (False, True) for other in (False, True)]
        yield 2 * extent**3, bench.least_us(makes, 3 * extent**2 * dtype.itemsize)


def _multiplied(extent: int, one_turned: bool, other_turned: bool, dtype: torch.dtype) -> Make:
    def make() -> Run:
        one, other = _matrix(extent, one_turned, dtype), _matrix(extent, other_turned, dtype)
        target = torch.empty(extent, extent, dtype=dtype)
        return lambda: torch.mm(one, other, out=target)

    return make


def _matrix(extent: int, turned: bool, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(extent, extent).to(dtype)
    return drawn.t() if turned else drawn


def _risen(rungs: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield rungs at no lower rate than any smaller product had: what stalls at one of them does not count."""
    rate = 0.0
    for amount, us in rungs:
        rate = max(rate, amount / us)
        yield amount, amount / rate
