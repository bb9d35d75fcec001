"""Buckets of gradients: which are exchanged together, by the time of each gradient and of an exchange."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MEBIBYTE = 1 << 20
SIZES = tuple(MEBIBYTE << power for power in range(9))
"""Bytes of a bucket that are looked at."""
EQUAL = 0.02
"""Buckets are as large as they can be without taking this much longer, by the time of all exchanges, than the best."""


@dataclass(frozen=True)
class Arrival:
    """A gradient in the order of backward.

    Args:
        size: in bytes.
        place: what its bucket's other gradients have in common with it, an element type and device, say.
        us: microseconds from the beginning of backward until it is there.
    """

    size: int
    place: Hashable = None
    us: float = 0.0


@dataclass(frozen=True)
class ExchangeTime:
    """Microseconds of an exchange: `us`, and `us_per_byte` for each byte."""

    us: float
    us_per_byte: float

    def of(self, size: int) -> float:
        return self.us + size * self.us_per_byte

    @staticmethod
    def fitted(small: int, small_us: float, large: int, large_us: float) -> "ExchangeTime":
        """Return the line through two measured sizes."""
        per_byte = max(0.0, large_us - small_us) / (large - small)
        return ExchangeTime(max(0.0, small_us - small * per_byte), per_byte)


def buckets_of(arrivals: Sequence[Arrival], limit: int) -> list[list[int]]:
    """Return the numbers of gradients that are exchanged together, in order, at most so many bytes unless it is one."""
    found: list[list[int]] = []
    of_place: dict[Hashable, tuple[list[int], int]] = {}
    for number, arrival in enumerate(arrivals):
        bucket, size = of_place.get(arrival.place, ([], 0))
        if not bucket or size + arrival.size > limit:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(number)
        of_place[arrival.place] = bucket, size + arrival.size
    # A bucket is complete with its last gradient, and they are exchanged in one order.
    return sorted(found, key=lambda bucket: bucket[-1])


def exposed_us(arrivals: Sequence[Arrival], limit: int, time: ExchangeTime) -> float:
    """Return how long exchanges go on after the last gradient, one after the other, each once its bucket is there."""
    end = 0.0
    for bucket in buckets_of(arrivals, limit):
        ready = max(arrivals[number].us for number in bucket)
        end = max(end, ready) + time.of(sum(arrivals[number].size for number in bucket))
    return end - max(arrival.us for arrival in arrivals)


def chosen_limit(arrivals: Sequence[Arrival], time: ExchangeTime, largest: int = SIZES[-1]) -> int:
    """Return the size of buckets by which exchanges end first; of sizes that are about equal, the largest one."""
    found = {limit: exposed_us(arrivals, limit, time) for limit in SIZES if limit <= max(largest, SIZES[0])}
    allowed = min(found.values()) + EQUAL * time.of(sum(arrival.size for arrival in arrivals))
    return max(limit for limit, us in found.items() if us <= allowed)
