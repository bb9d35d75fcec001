"""How a walk stands: the best plan so far, the proven bound, and whether that is enough."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

from autotuner.errors import InfeasibleError
from autotuner.records import Measurement
from autotuner.request import Limits
from autotuner.space import Space
from autotuner.tuner.answer import bound_us, solved
from autotuner.tuner.asked import Progress, Watch

SOLVE_AFTER_S = 5.0
SOLVE_SHARE = 0.05
"""Solving rests the device: at most this share of a walk is spent on how it stands."""

COMPILE_SHARE = 0.5
"""Of a limit of seconds: what is compiled and never timed would be of no use."""


@dataclass
class Standing:
    """Follows a walk, tells those who watch, and says when to stop.

    Args:
        gap: stop as soon as the best plan is proven to take at most this share longer than the best there can be.
    """

    space: Space
    watch: Watch
    gap: float | None = None
    limits: Limits = field(default_factory=Limits)
    reused: int = 0
    measured: int = 0
    failed: int = 0
    best_us: float | None = None
    bound_us: float | None = None

    def __post_init__(self) -> None:
        self._began = self._stage_began = self._solved_at = monotonic()
        self._solving_s = 0.0
        self._stage = ""

    def tell(self, progress: Progress) -> None:
        """Complete a progress by what is known of the whole walk, and pass it on."""
        now = monotonic()
        if progress.stage != self._stage:
            self._stage, self._stage_began = progress.stage, now
        left = progress.total - progress.done
        pace_s = (now - self._stage_began) / progress.done if progress.done else None
        self.watch(
            replace(
                progress,
                measured=self.measured,
                reused=self.reused,
                failed=self.failed,
                best_us=self.best_us,
                bound_us=self.bound_us,
                eta_s=None if pace_s is None else pace_s * left,
            )
        )

    def look(self, known: Mapping[str, Measurement], *, now: bool = False) -> None:
        """Solve with what is known, if the last time was long enough ago or it must be now."""
        rested_s = monotonic() - self._solved_at
        if not now and rested_s < max(SOLVE_AFTER_S, self._solving_s / SOLVE_SHARE):
            return
        began = monotonic()
        try:
            _, solution = solved(self.space, known, "exact")
        except InfeasibleError:
            self.best_us = None
        else:
            self.best_us = solution.total_us
        whole = all(key in known for key in self.space.calls)
        if whole and self.best_us is not None:
            self.bound_us = solution.lower_bound_us
        else:
            self.bound_us = bound_us(self.space, known)
        self._solved_at = monotonic()
        self._solving_s = self._solved_at - began

    def enough(self, stage: str = "measure") -> bool:
        """Say whether to stop measuring (or compiling) and answer with what there is."""
        if self.limits.measurements is not None and self.measured >= self.limits.measurements:
            return True
        if self.limits.seconds is not None:
            share = COMPILE_SHARE if stage == "compile" else 1.0
            if monotonic() - self._began > share * self.limits.seconds:
                return True
        found = Progress("measure", 0, 0, best_us=self.best_us, bound_us=self.bound_us).gap
        return self.gap is not None and found is not None and found <= self.gap
