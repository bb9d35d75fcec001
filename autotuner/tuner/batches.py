"""Batches: parts of races, each for one device, and how their results become those of the races."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil

from autotuner.ir.records import Call, Measurement
from autotuner.tuner.progress import Result

CALLS_MAX = 32
"""Calls of a batch at most; a race of so many is never split. On eight simulated GPUs, an encoder layer's calls take
5.9 s; 6.2 s with 16, for the incumbent is timed in more parts; 12.9 s where nothing is split."""

SECONDS = 0.8
"""About so long a part of a split race takes at most: that much is lost with a device."""

PART_MIN = 4
"""Calls of a part at least, however long they take: the incumbent is timed in each part."""

CALL_S = 0.03
"""For one call, with its set-up, before any is timed: an encoder layer on an H200 takes 26 ms a call."""

SPREAD_MAX = 0.05
"""A device that is further off than this share is taken for a sick one, and its times are doubtful."""


@dataclass(frozen=True)
class Batch:
    """Calls that one device races: a race, or a part of one.

    Args:
        race: the race's number, in the order in which they were cut.
        calls: first what leads, where the race was split.
        estimated_s: how long it takes.
        leads: key of the incumbent, which every part of a split race has; "" in a race that was not split.
    """

    race: int
    calls: tuple[Call, ...]
    estimated_s: float
    leads: str = ""


@dataclass
class Pace:
    """Seconds that a call of each kernel takes, learned from batches that are over."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def call_s(self, call: Call) -> float:
        """Return the estimate of one call: the mean of its kernel, or that of all."""
        kernel = call.candidate.kernel
        if self.calls[kernel]:
            return self.seconds[kernel] / self.calls[kernel]
        counted = sum(self.calls.values())
        return sum(self.seconds.values()) / counted if counted else CALL_S

    def estimated_s(self, calls: Iterable[Call]) -> float:
        return sum(self.call_s(call) for call in calls)

    def learn(self, calls: Sequence[Call], took_s: float) -> None:
        """Take what a batch took: its calls share it in proportion to their estimates."""
        shares = [self.call_s(call) for call in calls]
        for call, share in zip(calls, shares, strict=True):
            self.seconds[call.candidate.kernel] += took_s * share / sum(shares)
            self.calls[call.candidate.kernel] += 1


class Batches:
    """Races under way on several devices: cut into batches that any of them may take, and joined from their results.

    Each part of a split race has the incumbent, so that slow calls are dropped early on every device, and so that times
    of different devices can be compared. The race's first call leads at first, and the fastest that is known of the
    race by the time a part is handed out. The incumbent's time is that of its first part. Where a later part times it
    otherwise, beyond both intervals, all times of that part are scaled by the ratio; where the ratio is off by more
    than `SPREAD_MAX`, they stay, and are marked as drifted.

    A batch may come back in part, several times, or never: each call's first result counts.

    Args:
        devices: on a single one, no race is split.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._races: list[dict[str, Call]] = []
        self._known: list[dict[str, Measurement]] = []
        self.pace = Pace()

    def cut(self, race: Sequence[Call]) -> list[Batch]:
        """Return the batches of a race; calls of one subgraph, which share references, stay together."""
        calls = {call.key: call for call in race}
        number = len(self._races)
        self._races.append(calls)
        self._known.append({})
        if self._devices == 1 or len(calls) <= CALLS_MAX:
            return [self._batch(number, tuple(calls.values()))]
        first, *others = calls.values()
        alike: dict[str, list[Call]] = defaultdict(list)
        for call in others:
            alike[call.subgraph.signature].append(call)
        ordered = [call for group in alike.values() for call in group]
        length = min(CALLS_MAX - 1, max(PART_MIN, int(SECONDS / self.pace.estimated_s(ordered) * len(ordered))))
        parts = ceil(len(ordered) / length)
        ends = [len(ordered) * number // parts for number in range(parts + 1)]
        return [self._batch(number, (first, *ordered[begin:end]), first.key) for begin, end in pairwise(ends)]

    def renewed(self, batch: Batch) -> Batch:
        """Return a batch as it is to be handed out now: a part is led by the fastest known call of its race."""
        if not batch.leads:
            return batch
        known = self._known[batch.race]
        others = tuple(call for call in batch.calls if call.key != batch.leads or call.key not in known)
        times = {key: m.median_us for key, m in known.items() if m.median_us is not None}
        best = min(times, key=lambda key: (times[key], key), default=others[0].key)
        leading = self._races[batch.race][best]
        return self._batch(batch.race, (leading, *(call for call in others if call.key != best)), best)

    def join(self, batch: Batch, results: Sequence[Result], took_s: float | None = None) -> list[Result]:
        """Return the results of a batch that are new, comparable with those of the race's other parts.

        Args:
            results: of the batch, or of what came back of it.
            took_s: how long the device took for them, if that is known.
        """
        known = self._known[batch.race]
        if took_s is not None and results:
            self.pace.learn([call for call, _ in results], took_s)
        again = {call.key: measurement for call, measurement in results}.get(batch.leads)
        factor = _factor(known.get(batch.leads), again)
        new: dict[str, Result] = {}
        for call, measurement in results:
            if call.key not in known and call.key in self._races[batch.race] and call.key not in new:
                new[call.key] = (call, _comparable(measurement, factor))
        known.update({key: measurement for key, (_, measurement) in new.items()})
        return list(new.values())

    def rest(self, batch: Batch) -> Batch | None:
        """Return what is still to be measured of a batch that did not come back as a whole; None where nothing is."""
        known = self._known[batch.race]
        left = tuple(call for call in batch.calls if call.key not in known)
        if not left:
            return None
        leading = tuple(call for call in batch.calls if call.key == batch.leads and call.key in known)
        return self._batch(batch.race, (*leading, *left), batch.leads)

    def part(self, batch: Batch, calls: Iterable[Call]) -> Batch:
        """Return some calls of a batch as one of its own."""
        return self._batch(batch.race, tuple(calls), batch.leads)

    def singles(self, batch: Batch) -> list[Batch]:
        """Return what is still to be measured of a batch call by call, to find out which of them kills a device."""
        known = self._known[batch.race]
        return [self._batch(batch.race, (call,)) for call in batch.calls if call.key not in known]

    def _batch(self, race: int, calls: tuple[Call, ...], leads: str = "") -> Batch:
        return Batch(race, calls, self.pace.estimated_s(calls), leads)


def _factor(earlier: Measurement | None, again: Measurement | None) -> float:
    """Return by what the times of a part are multiplied, from the two times of its incumbent.

    It is 1 where the times agree, or one of them is of a few looks alone.
    """
    if earlier is None or again is None or "eliminated" in (*earlier.marks, *again.marks):
        return 1.0
    if earlier.median_us is None or again.median_us is None:
        return 1.0
    (low_us, high_us), (least_us, most_us) = _interval(earlier), _interval(again)
    return 1.0 if low_us <= most_us and least_us <= high_us else earlier.median_us / again.median_us


def _interval(measurement: Measurement) -> tuple[float, float]:
    median_us = measurement.median_us or 0.0
    low_us, high_us = measurement.low_us, measurement.high_us
    return median_us if low_us is None else low_us, median_us if high_us is None else high_us


def _comparable(measurement: Measurement, factor: float) -> Measurement:
    """Return a measurement of one part as the race's first part would have it."""
    if factor == 1.0 or measurement.median_us is None:
        return measurement
    if abs(factor - 1) > SPREAD_MAX:
        marks = measurement.marks if "drifted" in measurement.marks else (*measurement.marks, "drifted")
        return replace(measurement, marks=marks)
    low_us, high_us = _interval(measurement)
    return replace(
        measurement, median_us=factor * measurement.median_us, low_us=factor * low_us, high_us=factor * high_us,
        samples_us=tuple(factor * us for us in measurement.samples_us),
    )  # fmt: skip
