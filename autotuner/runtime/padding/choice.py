"""The choice between a batch's own shape and a larger one that is compiled: by measured times of their steps."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from autotuner.runtime.padding.batches import Shape, holds, tokens_in

KEPT = 5
"""So many of the last steps of a shape are kept."""
SHAPES = 4096
"""Shapes of which it is known what padding has cost; behind so many, all begin anew."""


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
        times: of each shape that ran, or that was tuned before.
    """

    def __init__(self, elapsed_us: Callable[[Any, Any], float]) -> None:
        self._elapsed_us = elapsed_us
        self.times: dict[Shape, ShapeTimes] = {}
        self._lost_us: dict[Shape, float] = {}

    def add(self, shape: Shape) -> ShapeTimes:
        """Return the times of a shape, to which batches may be padded from now on."""
        if shape not in self.times:
            self.times[shape] = ShapeTimes(self._elapsed_us)
        return self.times[shape]

    def target(self, shape: Shape) -> Shape | None:
        """Return the shape to which batches of a shape can be padded with the least time; None where none is larger.

        The time is the measured one. Of a shape without, it is by tokens that of the shape with most tokens a second.
        """
        larger = [other for other in self.times if other != shape and holds(other, shape)]
        known = {each: found for each in larger if (found := self.times[each].step_us()) is not None}
        rate = _rate(known)
        return min(larger, key=lambda each: (known.get(each, rate * tokens_in(each)), tokens_in(each)), default=None)

    def pays(self, shape: Shape, target: Shape) -> bool:
        """Say whether a step of a shape is predicted to be faster padded, and count what it costs if it is not.

        - A shape that has run some steps by itself is padded where the measured step of the larger shape is faster.
        - One that never ran has to be compiled first. What a padded step loses is estimated: the measured time of the
          larger shape's step, times the share of its tokens that is added. It is padded until the sum of what its steps
          have lost is the time of compiling a shape, as measured; so padding costs at most as much as it saves.
        - Before there are times, it is padded: the larger shape is compiled, or will be.
        """
        padded_us = self.times[target].step_us()
        own = self.times.get(shape)
        if own is not None and own.steps:
            own_us = own.step_us()
            return own.is_settled and own_us is not None and padded_us is not None and padded_us < own_us
        if padded_us is None:
            return True
        if len(self._lost_us) >= SHAPES:
            self._lost_us.clear()
        lost_us = self._lost_us.get(shape, 0.0) + padded_us * (1 - tokens_in(shape) / tokens_in(target))
        if lost_us > self._compile_us():
            return False
        self._lost_us[shape] = lost_us
        return True

    def _compile_us(self) -> float:
        """Return how long a shape took to compile, the least of all: the first one may load a compiler, too."""
        return min((each.first_us for each in self.times.values() if each.first_us is not None), default=float("inf"))


def _rate(known: Mapping[Shape, float]) -> float:
    """Return the least time of a token; 1 where there are no times."""
    return min((found / tokens_in(shape) for shape, found in known.items()), default=1.0)
