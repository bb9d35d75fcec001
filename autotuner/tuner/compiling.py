"""Compilation of a run's calls: ahead of timing, or beside it where the measurer's timings allow that."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from autotuner.checkpoint import OverError
from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.tuner.progress import MeasurerProtocol, Progress
from autotuner.tuner.state import TuningState

Failed = Callable[[Call, Measurement], None]


class Compilation:
    """Calls of a run that are compiled, each once; `hand_over` says who is told which cannot be."""

    def __init__(self, measurer: MeasurerProtocol, state: TuningState) -> None:
        self._measurer, self._state = measurer, state
        self._failures: list[tuple[Call, Measurement]] = []
        self._failed: Failed = lambda call, problem: self._failures.append((call, problem))
        self._begun: set[str] = set()
        self._building: dict[str, Call] = {}
        """By key, the calls that are compiled beside timing, or wait for it, in order."""
        self._done = self._total = 0

    def hand_over(self, failed: Failed) -> None:
        """Have somebody told which calls cannot be compiled, those of before first."""
        self.hear()
        self._failed = failed
        for call, problem in self._failures:
            failed(call, problem)
        self._failures.clear()

    @property
    def is_beside(self) -> bool:
        return self._measurer.compiles_beside

    def ahead(self, calls: Iterable[Call]) -> set[str]:
        """Compile calls now, and return the keys of those that the job's limits leave out.

        Nothing is compiled beside timing by then: it would be given up.
        """
        assert not self._building
        compiled = {call.key: call for call in self._new(calls)}
        left = set(compiled)
        if compiled and not self._state.enough("compile"):
            self._tell()
            with suppress(OverError), self._state.within("compile"):
                for call, problem in self._measurer.prepare(list(compiled.values())):
                    left.discard(call.key)
                    self._end(call, problem)
                    self._tell()
                    if self._state.enough("compile"):
                        break
        return left

    def beside(self, calls: Iterable[Call]) -> set[str]:
        """Have calls compiled while others are timed, before those that wait for it already.

        Returns:
            The keys of those that compile and are given up, as the time for that is over: no process starts then.
        """
        calls = list(calls)
        if self._state.is_over("compile_beside"):
            return {c.key for c in calls if c.key not in self._begun and KERNELS[c.candidate.kernel].compiles}
        waiting = [call for call in calls if call.key in self._building]
        first = {call.key: call for call in (*waiting, *self._new(calls))}
        if first:
            self._building = {**first, **self._building}
            self._measurer.compile_beside(list(self._building.values()))
        return set()

    def hear(self) -> None:
        """Take what was compiled beside timing since the last time."""
        if self._building:
            for call, problem in self._measurer.take_compiled():
                if self._building.pop(call.key, None) is not None:
                    self._end(call, problem)

    def is_compiled(self, calls: Collection[Call]) -> bool:
        """Say whether none of these calls is still to be compiled."""
        return not any(call.key in self._building for call in calls)

    def is_given_up(self, calls: Collection[Call]) -> bool:
        """Say whether some of these calls, which compile, were given up."""
        return any(call.key not in self._begun for call in calls)

    def in_turn(self, races: Iterable[Sequence[Call]]) -> Iterator[Sequence[Call]]:
        """Yield races when they are compiled, in their order where there is a choice, and empty ones in between.

        An empty race says that all that are left are still to be compiled.
        """
        left = list(races)
        while left:
            self.hear()
            place = next((place for place, race in enumerate(left) if self.is_compiled(race)), None)
            if place is None:
                self._tell()
                yield ()
            else:
                yield left.pop(place)

    def give_up(self) -> set[str]:
        """End what is compiled beside timing, and return the keys of the calls that are not compiled."""
        left = set(self._building)
        if left:
            self._building.clear()
            self._begun -= left
            self._measurer.compile_beside(())
        return left

    def _new(self, calls: Iterable[Call]) -> list[Call]:
        """Return the calls that compile and have not begun to, and count them."""
        found = {c.key: c for c in calls if c.key not in self._begun and KERNELS[c.candidate.kernel].compiles}
        self._begun |= found.keys()
        self._total += len(found)
        return list(found.values())

    def _end(self, call: Call, problem: Measurement | None) -> None:
        self._done += 1
        if problem is not None:
            self._failed(call, problem)

    def _tell(self) -> None:
        self._state.tell(Progress("compile", self._done, self._total))
