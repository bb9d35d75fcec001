"""Where a time lies on the range bars: as a multiple of the best, on one logarithmic scale for all steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log10

from autotuner.plan.report.compare import Row

STOPS = (1, 2, 5)
MOST_TICKS = 5
WIDTH, INSET = 160, 8
"""Of a bar, in pixels; the ends of the scale are `INSET` from the bar's, so that marks have room."""


@dataclass(frozen=True, slots=True)
class Range:
    """A step's times, in microseconds; None where one is not known."""

    best_us: float | None
    chosen_us: float
    default_us: float | None = None
    worst_us: float | None = None

    @classmethod
    def of(cls, row: Row) -> "Range":
        best_us, worst_us = (timed.us if timed else None for timed in (row.best, row.worst))
        return cls(best_us, row.chosen_us, row.default_us, worst_us)

    @property
    def multiples(self) -> dict[str, float]:
        """Each known time as a multiple of the best; empty where the best is not known or takes no time."""
        if not self.best_us:
            return {}
        times = {"best": self.best_us, "chosen": self.chosen_us, "default": self.default_us, "worst": self.worst_us}
        return {name: us / self.best_us for name, us in times.items() if us}


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic scale from `low` to `high`, multiples of the best."""

    low: float
    high: float

    @classmethod
    def over(cls, ranges: Iterable[Range]) -> "Scale":
        """Return a scale on which every multiple has a place."""
        multiples = [multiple for times in ranges for multiple in times.multiples.values()]
        return cls(min(1.0, *multiples, 1.0), max(2.0, *multiples, 2.0))

    def place(self, multiple: float) -> float:
        """Return where a multiple lies, from 0 to 1."""
        share = (log10(multiple) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return min(1.0, max(0.0, share))

    def x(self, multiple: float) -> float:
        """Return where a multiple lies on a bar of `width` pixels."""
        return round(INSET + (self.width - 2 * INSET) * self.place(multiple), 1)

    @property
    def width(self) -> int:
        return WIDTH

    @property
    def ticks(self) -> tuple[float, ...]:
        """1, 2, 5, 10, 20 ... as far as the scale reaches; powers of ten alone where those are too many to be read."""
        fine = [stop * 10.0**power for power in range(-9, 10) for stop in STOPS]
        found = tuple(value for value in fine if self.low <= value <= self.high)
        return found if len(found) <= MOST_TICKS else tuple(value for value in found if value in fine[:: len(STOPS)])
