"""Order of a training step's kernels over streams: what waits for what, and when each may run.

Steps run on one stream, except those of branches, which have a stream each. A branch's step starts once what it reads
is there, and is waited for by whoever reads what it makes, or else at the end of its phase.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autotuner.plan.step import Branches, check_branches


def tick_of(number: int, forward: int) -> int:
    """Return when a step runs, after so many forward ones."""
    return number + 1 if number < forward else number + 2


@dataclass(frozen=True)
class Schedule:
    """Streams of a plan's steps.

    Args:
        sources: for each step, the steps before it that make what it reads.
        forward: how many of them are of forward; they come first.
        branches: a step is in one of them at most.

    Raises:
        ConfigurationError: the branches are not of these steps.
    """

    sources: tuple[frozenset[int], ...]
    forward: int
    branches: Branches = ()

    def __post_init__(self) -> None:
        check_branches(self.branches, len(self.sources))

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """The stream of each step: 0, or from 1 on that of its branch."""
        on = {number: place for place, branch in enumerate(self.branches, 1) for number in branch}
        return tuple(on.get(number, 0) for number in range(len(self.sources)))

    def phase(self, number: int) -> range:
        """Return the steps of a step's phase."""
        return range(self.forward) if number < self.forward else range(self.forward, len(self.sources))

    @cached_property
    def awaited(self) -> frozenset[int]:
        """The steps that steps of other streams wait for."""
        return frozenset(source for number in range(len(self.sources)) for source in self.waits(number))

    def waits(self, number: int) -> list[int]:
        """Return the steps of other streams and of its own phase that a step waits for."""
        return [source for source in self._before(number) if self.streams[source] != self.streams[number]]

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The first and the last tick at which each step may run."""
        first: list[int] = []
        for number in range(len(self.sources)):
            began = tick_of(self.phase(number)[0], self.forward)
            if self.streams[number]:
                earliest = [began, *(self._after(source, first) for source in self._before(number))]
                earliest += [first[other] for other in self._beside(number) if other < number]
                first.append(max(earliest))
            else:
                first.append(tick_of(number, self.forward))
        last = dict.fromkeys(range(len(self.sources)), 0)
        for number in reversed(range(len(self.sources))):
            if not self.streams[number]:
                last[number] = tick_of(number, self.forward)
                continue
            ended = tick_of(self.phase(number)[-1], self.forward)
            latest = [ended, *(last[other] for other in self._beside(number) if other > number)]
            for reader in range(number + 1, len(self.sources)):
                if number in self._before(reader):
                    latest.append(last[reader])  # at whose tick a step of another branch may already run
            last[number] = min(latest)
        return tuple((first[number], last[number]) for number in range(len(self.sources)))

    def _before(self, number: int) -> list[int]:
        """Return what a step reads from, of its own phase: the other is over by then."""
        return sorted(source for source in self.sources[number] if source in self.phase(number))

    def _beside(self, number: int) -> Iterator[int]:
        """Yield the other steps of a step's branch that are of its phase."""
        for other in self.branches[self.streams[number] - 1]:
            if other != number and other in self.phase(number):
                yield other

    def _after(self, source: int, first: Sequence[int]) -> int:
        """Return the first tick at which something may run that waits for a step."""
        return first[source] if self.streams[source] else tick_of(source, self.forward) + 1
