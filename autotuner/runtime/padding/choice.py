"""The choice between a batch's own shape and a larger one that is compiled: by measured times of their steps."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from autotuner.runtime.padding.batches import Shape, holds, tokens_in

KEPT = 5
"""So many of the last steps of a shape are kept."""
SHAPES = 128
"""Of padded calls, so many shapes are told apart: the rarer half is forgotten where there are more."""


@dataclass(eq=False)
class ShapeTimes:
    """Steps of one shape that ran, padded ones among them.

    Args:
        elapsed_us: returns the time between two marks, and may wait for the second one.
        first_us: how long the first step took on the host, with what was compiled in it; None before.
    """

    elapsed_us: Callable[[Any, Any], float]
    first_us: float | None = None
    steps: int = 0
    _marks: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    _read: tuple[int, float] | None = None

    @property
    def is_settled(self) -> bool:
        """True where so many steps ran that their median is how the shape runs, compiled and captured."""
        return self.steps > KEPT

    def keep(self, began: Any, ended: Any, host_us: float) -> None:
        """Keep a step; the first one compiles, and so its time is not that of a step."""
        self.steps += 1
        if self.first_us is None:
            self.first_us = host_us
        else:
            self._marks.append((began, ended))

    def step_us(self) -> float | None:
        """Return the median of the last steps, read anew after one, two, four ... more; None before the second step."""
        if not self._marks:
            return None
        if self._read is None or self.steps >= 2 * self._read[0]:
            self._read = self.steps, median(self.elapsed_us(*marks) for marks in self._marks)
        return self._read[1]


class PaddingChoice:
    """Times of the shapes of one form of batches, and what padding to them has cost.

    Attributes:
        times: of each shape that ran, or that is meant to.
    """

    def __init__(self, elapsed_us: Callable[[Any, Any], float], limit: int) -> None:
        """Begin without any shape.

        Args:
            elapsed_us: as of `ShapeTimes`.
            limit: no shape is added because of what padding costs, where there are so many.
        """
        self._elapsed_us, self._limit = elapsed_us, limit
        self.times: dict[Shape, ShapeTimes] = {}
        self._padded: Counter[Shape] = Counter()
        self._lost_us = 0.0

    def add(self, shape: Shape) -> ShapeTimes:
        """Return the times of a shape, to which batches may be padded from now on."""
        if shape not in self.times:
            self.times[shape] = ShapeTimes(self._elapsed_us)
        return self.times[shape]

    def targets(self, shape: Shape) -> list[Shape]:
        """Return the shapes to which batches of a shape can be padded, that with the least time of a step first."""
        larger = [other for other in self.times if other != shape and holds(other, shape)]
        return sorted(larger, key=lambda each: (self._step_us(each), tokens_in(each)))

    def shape_of(self, shape: Shape, target: Shape) -> Shape:
        """Return the shape in which a call is predicted to be fastest, and count what padding costs.

        - A shape that has run some steps by itself is padded where the measured step of the larger shape is faster.
        - One that never ran would have to be compiled, and is padded. What that loses is estimated: the measured time
          of the larger shape's step, times the share of its tokens that is added.
        - Where padded calls have lost as much as compiling takes, as measured, one more shape is compiled: that of the
          padded calls so far to which padding would have saved most. So padding costs about as much as it saves, at
          most, and few shapes are compiled.

        Args:
            target: of the shape, as `targets` returns it.
        """
        own = self.times.get(shape)
        padded_us = self.times[target].step_us()
        if own is not None:
            own_us = own.step_us()
            is_faster = own.is_settled and own_us is not None and padded_us is not None and padded_us < own_us
            return target if is_faster else shape
        self._padded[shape] += 1
        if len(self._padded) > SHAPES:
            self._padded = Counter(dict(self._padded.most_common(SHAPES // 2)))
        if padded_us is None:  # the larger shape is compiled, or will be
            return target
        self._lost_us += padded_us * (1 - tokens_in(shape) / tokens_in(target))
        if self._lost_us > self._compile_us() and len(self.times) < self._limit:
            self._lost_us = 0.0
            self.add(self._best_addition())
            if shape in self.times:
                return shape
            return next(iter(self.targets(shape)), target)
        return target

    def _best_addition(self) -> Shape:
        """Return the shape of padded calls to which all of them that fit would have been padded with most gain."""
        before_us = {each: min(map(self._step_us, self.targets(each)), default=0.0) for each in self._padded}

        def gain(added: Shape) -> float:
            own_us = self._step_us(added)
            return sum(
                count * max(before_us[each] - own_us, 0.0)
                for each, count in self._padded.items() if holds(added, each)
            )  # fmt: skip

        return max(self._padded, key=gain)

    def _step_us(self, shape: Shape) -> float:
        """Return the measured time of a shape's step; of one without, by its tokens: at the least time of a token."""
        times = self.times.get(shape)
        found = None if times is None else times.step_us()
        if found is not None:
            return found
        known = [(us, tokens_in(each)) for each, own in self.times.items() if (us := own.step_us()) is not None]
        return min((us / tokens for us, tokens in known), default=1.0) * tokens_in(shape)

    def _compile_us(self) -> float:
        """Return how long a shape took to compile, the least of all: the first one may load a compiler, too."""
        return min((each.first_us for each in self.times.values() if each.first_us is not None), default=float("inf"))
