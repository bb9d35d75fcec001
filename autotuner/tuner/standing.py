"""How far a walk is, for those who watch, and whether that is enough."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from autotuner.checkpoint import OverError, checkpoint, until
from autotuner.errors import InfeasibleError
from autotuner.ir.records import Measurement
from autotuner.measure.roofline import NO_ROOFLINE, Roofline, Work, work_of
from autotuner.settings import Limits
from autotuner.space import Space
from autotuner.tuner.asked import NOTHING_SPENT, Progress, Spent, Watch
from autotuner.tuner.estimates import Groups, groups_of, learned_us
from autotuner.tuner.outlook import Outlook, look
from autotuner.tuner.puzzle import SpacePuzzle

SOLVE_AFTER_S = 5.0
SOLVE_SHARE = 0.05
"""Solving rests the device: about this share of a walk is meant to be spent on how it stands. Where few calls are worth
measuring, it is more: a look costs less than calls that need not be measured."""

EARLY_SHARE = 0.5
"""Of the limits: what is compiled and never timed would be of no use, nor a search while others have no time."""

SHARES: Mapping[str, float] = {**dict.fromkeys(("search", "compile", "ceilings"), EARLY_SHARE), "measure": 0.9}
"""Of the seconds, after which a stage ends; the rest is for confirming what would be chosen."""


@dataclass
class Standing:
    """Follows a walk, tells those who watch, and says when to stop.

    Args:
        gap: stop as soon as the best plan is proven to take at most this share longer than the best there can be.
        estimated_gap: the same by learned costs.
        ceilings: of this environment; without them, what is not measured may cost nothing.
        outlook: what was seen last; None where there is no plan, or nothing was seen yet.
        has_looked: the last look was not cut short by the limit.
        spent: of the limits, before this walk.
        waited_s: for how long the device was waited for so far; it does not count against the limits.
    """

    space: Space
    watch: Watch
    gap: float | None = None
    limits: Limits = field(default_factory=Limits)
    estimated_gap: float | None = None
    ceilings: Roofline = NO_ROOFLINE
    reused: int = 0
    measured: int = 0
    failed: int = 0
    outlook: Outlook | None = None
    has_looked: bool = False
    spent: Spent = NOTHING_SPENT
    waited_s: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self._began = self._stage_began = self._solved_at = monotonic()
        self._solving_s = 0.0
        self._stage = ""
        self._done_before = 0
        self._seen: _Seen | None = None
        self._told = Progress("space", 0, 0)
        self._answer_us: tuple[float, float] | None = None

    def settle(self, predicted_us: float, lower_bound_us: float) -> None:
        """Take the answer's own figures for those of the last look: confirming may have changed them since."""
        self._answer_us = (predicted_us, lower_bound_us)

    @property
    def best_us(self) -> float | None:
        if self._answer_us:
            return self._answer_us[0]
        return self.outlook.best_us if self.outlook else None

    @property
    def bound_us(self) -> float | None:
        if self._answer_us:
            return self._answer_us[1]
        return self.outlook.bound_us if self.outlook else None

    @property
    def estimated_us(self) -> float | None:
        return self.outlook.estimated_us if self.outlook else None

    @property
    def look_s(self) -> float:
        """What the last look took."""
        return self._solving_s

    @property
    def left_s(self) -> float | None:
        """What is left of the job's seconds; None without a limit."""
        return None if self.limits.seconds is None else max(0.0, self.limits.seconds - self.spent_s)

    @property
    def spent_s(self) -> float:
        """What the job has taken so far, before this walk included; waiting for the device is left out."""
        return self.spent.seconds + monotonic() - self._began - self.waited_s()

    def within(self, stage: str) -> AbstractContextManager[None]:
        """End the work inside with `OverError` when the time of a stage is over."""
        return until(lambda: self.is_over(stage))

    def is_over(self, stage: str) -> bool:
        """Say whether the time of a stage is over."""
        limit_s = self.limits.seconds
        return limit_s is not None and self.spent_s > SHARES.get(stage, 1.0) * limit_s

    def tell(self, progress: Progress) -> None:
        """Complete a progress by what is known of the whole walk, and pass it on."""
        now = monotonic()
        if progress.stage != self._stage:
            self._stage, self._stage_began, self._done_before = progress.stage, now, progress.done
        left, done = progress.total - progress.done, progress.done - self._done_before
        pace_s = (now - self._stage_began) / done if done else None
        self._told = progress
        self.watch(
            replace(
                progress,
                measured=self.measured,
                reused=self.reused,
                failed=self.failed,
                best_us=self.best_us,
                bound_us=self.bound_us,
                estimated_us=self.estimated_us,
                eta_s=None if pace_s is None else pace_s * left,
                spent_s=self.spent_s,
                spent_measurements=self.spent.measurements + self.measured,
            )
        )

    def wait(self, note: str) -> None:
        """Tell what is waited for, at the progress of before."""
        self.tell(replace(self._told, note=note))

    def look(self, known: Mapping[str, Measurement], *, now: bool = False) -> None:
        """Solve with what is known, if the last time was long enough ago or it must be now.

        Where the time is over before that is done, what was seen last stays.
        """
        rested_s = monotonic() - self._solved_at
        if not now and rested_s < max(SOLVE_AFTER_S, self._solving_s / SOLVE_SHARE):
            return
        began = monotonic()
        self.has_looked = False
        with suppress(OverError), self.within("measure"):
            if self._seen is None or self._seen.space is not self.space:
                self._seen = _Seen(self.space)
            self.outlook = self._seen.outlook(known, self.ceilings, self.gap or 0.0)
            self.has_looked = True
        self._solved_at = monotonic()
        self._solving_s = self._solved_at - began

    def puzzle(self) -> SpacePuzzle:
        """Return the problem of the space.

        Raises:
            InfeasibleError: some operator has no choice at all.
        """
        if self._seen is None or self._seen.space is not self.space:
            self._seen = _Seen(self.space)
        return self._seen.puzzle()

    def batch(self, wanted: Sequence[str], known: int, pace_s: float) -> Sequence[str]:
        """Return what to measure before the next look, of what is wanted.

        Args:
            wanted: keys, those of `Outlook.wanted` that can be had, in its order.
            known: how many calls are measured.
            pace_s: what measuring one takes.
        """
        assert self.outlook is not None
        first = set(self.outlook.wanted[: self.outlook.first])
        worth = self._solving_s / SOLVE_SHARE / max(pace_s, 1e-9)
        return wanted[: max(1, sum(key in first for key in wanted), int(min(worth, self.outlook.more(known))))]

    def enough(self, stage: str = "measure") -> bool:
        """Say whether to stop measuring (or compiling, or searching) and answer with what there is."""
        share, measured = 1.0 if stage == "measure" else EARLY_SHARE, self.spent.measurements + self.measured
        if self.limits.measurements is not None and measured >= share * self.limits.measurements:
            return True
        if self.is_over(stage):
            return True
        if self.outlook is None:
            return False
        pairs = ((self.gap, self.outlook.proven_gap), (self.estimated_gap, self.outlook.estimated_gap))
        return any(asked is not None and found is not None and found <= asked for asked, found in pairs)


class _Seen:
    """What looking at a space again and again needs: its problem, what its calls do, and what they are like."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._puzzle: SpacePuzzle | None = None
        self._works: dict[str, Work] = {}
        for key, call in space.calls.items():
            checkpoint()
            self._works[key] = work_of(call)
        self._groups: Groups = groups_of(space.calls)

    def puzzle(self) -> SpacePuzzle:
        self._puzzle = self._puzzle or SpacePuzzle(self.space)
        return self._puzzle

    def outlook(self, known: Mapping[str, Measurement], ceilings: Roofline, enough: float) -> Outlook | None:
        """Solve; None where there is no plan, whatever will be measured."""
        calls = self._works
        measured = {key: m.median_us for key, m in known.items() if m.median_us is not None and key in calls}
        lowered = ceilings.lowered((calls[key], us) for key, us in measured.items())
        optimistic = {key: lowered.optimistic_us(work) for key, work in calls.items()}
        left = {key: us for key, us in optimistic.items() if key not in known}
        learned = None
        if any(left.values()):
            guessed = learned_us(self._groups, optimistic, measured)
            learned = {key: guessed[key] for key in left}
        try:
            return look(self.puzzle(), measured, left, learned, enough)
        except InfeasibleError:
            return None
