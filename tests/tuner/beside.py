"""A measurer that compiles beside timing, for tests: one call each time that it is asked for more to time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autotuner.ir.records import Call, Measurement
from autotuner.kernels import KERNELS
from autotuner.tuner.progress import Replay, Result

ROUNDS_MAX = 10_000


class CompilingBeside(Replay):
    """Comes before another measurer of tests, and hands it what is compiled.

    `order` has the keys of calls as they were compiled, `rested` counts the races that could not begin yet.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.waiting: list[Call] = []
        self.fresh: list[Call] = []
        self.order: list[str] = []
        self.rested = 0

    @property
    def compiles_beside(self) -> bool:
        return True

    def fails(self, call: Call) -> Measurement | None:  # noqa: ARG002
        """Return why a call cannot be compiled."""
        return None

    def compile_beside(self, calls: Sequence[Call]) -> None:
        self.waiting = [call for call in calls if call.key not in self.order]

    def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
        found, self.fresh = self.fresh, []
        return [(call, self.fails(call)) for call in found]

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        return super().measure(self._worked_beside(races))

    def _worked_beside(self, races: Iterable[Sequence[Call]]) -> Iterator[Sequence[Call]]:
        for number, race in enumerate(races):
            assert number < ROUNDS_MAX, "it never ends"
            for call in race:
                assert not KERNELS[call.candidate.kernel].compiles or call.key in self.order, "not compiled yet"
            self.rested += not race
            yield from [race] if race else []
            if self.waiting:
                call = self.waiting.pop(0)
                self.fresh.append(call)
                self.order.append(call.key)
