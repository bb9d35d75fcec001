"""Tuning state: progress counters, bounds and the stop rule."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from time import monotonic

from autotuner.checkpoint import OverError, until
from autotuner.errors import InfeasibleError
from autotuner.ir.records import Measurement
from autotuner.measure.roofline import NO_ROOFLINE, Roofline
from autotuner.settings import TuneOptions
from autotuner.solve.baselines import default_us
from autotuner.solve.problem.formulate import SpaceProblem, formulate
from autotuner.space import Space
from autotuner.tuner.bounds import Bounds, RivalsWanted
from autotuner.tuner.costliest import PlannedCall
from autotuner.tuner.doubts import is_default_marked
from autotuner.tuner.learned import Priors
from autotuner.tuner.policy import DEFAULT_POLICY, TuningPolicy
from autotuner.tuner.progress import NOTHING_SPENT, ORDER, Progress, Spent, Stage, Watch
from autotuner.tuner.relaxation import Relaxation, RelaxedProblem
from autotuner.tuner.twins import COVERED, NO_TWINS, TWINNED, Twins

LIKE: Mapping[str, Stage] = {"confirm": "measure"}
"""A stage whose calls take as long as those of another one, until some of its own were timed."""

EARLY_SHARE = 0.5
"""Of the limits: what is compiled and never timed would be of no use, nor a search while others have no time."""

SHARES: Mapping[str, float] = {
    **dict.fromkeys(("search", "compile", "ceilings"), EARLY_SHARE),
    "likely": 0.2, "compile_beside": 0.8, "measure": 0.9,
}  # fmt: skip
"""Of the seconds, after which a stage ends; the rest is for confirming what would be chosen. What is compiled beside
timing keeps nothing waiting, so that ends later."""


@dataclass
class TuningState:
    """State of a tuning run: counts results, reports progress, and decides when to stop.

    Args:
        options: of the request, with its gaps and limits.
        ceilings: of this environment; without them, what is not measured may cost nothing.
        bounds: of the last solution; None where there is no plan, or before the first one.
        is_solved: the last solution was not cut short by the limit.
        ends_by_twins: a plan is good enough as soon as the twins of what is not measured say so, or its closest rivals
            are measured.
        rival_rounds: how often these were measured.
        spent: of the limits, before this run.
        twins: of the space's calls.
        priors: of kernels.
        waited_s: returns the seconds spent waiting for the device, which do not count against the limits.
        searched_us: returns what sampled cells are expected to come to, as `Relaxation.bounds` takes it.
    """

    space: Space
    watch: Watch
    options: TuneOptions = field(default_factory=TuneOptions)
    _: KW_ONLY
    ceilings: Roofline = NO_ROOFLINE
    reused: int = 0
    measured: int = 0
    failed: int = 0
    refused: int = 0
    bounds: Bounds | None = None
    is_solved: bool = False
    ends_by_twins: bool = False
    rival_rounds: int = 0
    spent: Spent = NOTHING_SPENT
    policy: TuningPolicy = DEFAULT_POLICY
    twins: Twins = NO_TWINS
    priors: Priors = field(default_factory=dict)
    waited_s: Callable[[], float] = lambda: 0.0
    searched_us: Callable[[], Mapping[str, tuple[float, float]]] = dict

    def __post_init__(self) -> None:
        self._began = self._stage_began = self._solved_at = monotonic()
        self._solving_s = 0.0
        self._stage = ""
        self._done_before = 0
        self._paces_s: dict[str, float] = {}
        self._to_come: Mapping[Stage, int] | None = None
        self._relaxation: Relaxation | None = None
        self._space_problem: SpaceProblem | None = None
        self._told = Progress("space", 0, 0)
        self._answer_us: tuple[float, float] | None = None
        self._answer_calls: tuple[PlannedCall, ...] = ()
        self._default_us: float | None = None
        self._default_is_marked = False

    def settle(self, predicted_us: float, lower_bound_us: float, costliest: tuple[PlannedCall, ...] = ()) -> None:
        """Report the answer's own figures: confirming may have changed them since the last solution."""
        self._answer_us, self._answer_calls = (predicted_us, lower_bound_us), costliest

    @property
    def best_us(self) -> float | None:
        if self._answer_us:
            return self._answer_us[0]
        return self.bounds.best_us if self.bounds else None

    @property
    def bound_us(self) -> float | None:
        if self._answer_us:
            return self._answer_us[1]
        return self.bounds.bound_us if self.bounds else None

    @property
    def estimated_us(self) -> float | None:
        return self.bounds.estimated_us if self.bounds else None

    @property
    def costliest(self) -> tuple[PlannedCall, ...]:
        """The calls of the best plan that take longest."""
        return self._answer_calls or (self.bounds.costliest if self.bounds else ())

    @property
    def solve_s(self) -> float:
        """Seconds that the last solution took."""
        return self._solving_s

    @property
    def is_exhaustive(self) -> bool:
        """True where every call is to be measured: as asked, or under a memory budget."""
        return self.options.exhaustive or self.options.budget_bytes is not None

    @property
    def left_s(self) -> float | None:
        """Seconds left of the job's limit; None without a limit."""
        return None if self.options.limits.seconds is None else max(0.0, self.options.limits.seconds - self.spent_s)

    @property
    def spent_s(self) -> float:
        """Seconds that the job has taken, by every worker that ran it; waiting for the device is left out."""
        return self.spent.seconds + monotonic() - self._began - self.waited_s()

    def within(self, stage: str) -> AbstractContextManager[None]:
        """End the work inside with `OverError` when the time of a stage is over."""
        return until(lambda: self.is_over(stage))

    def is_over(self, stage: str) -> bool:
        """Say whether the time of a stage is over."""
        limit_s = self.options.limits.seconds
        return limit_s is not None and self.spent_s > SHARES.get(stage, 1.0) * limit_s

    def tell(self, progress: Progress) -> None:
        """Complete a progress by the figures of the whole run, and pass it on."""
        now = monotonic()
        if progress.stage != self._stage:
            self._stage, self._stage_began, self._done_before = progress.stage, now, progress.done
        left, done = progress.total - progress.done, progress.done - self._done_before
        pace_s = (now - self._stage_began) / done if done else None
        if pace_s is not None:
            self._paces_s[progress.stage] = pace_s
        eta_s = None if pace_s is None else pace_s * left
        if eta_s is not None and self.left_s is not None:
            eta_s = min(eta_s, self.left_s)
        self._told = progress
        self.watch(
            replace(
                progress,
                measured=self.measured,
                reused=self.reused,
                failed=self.failed,
                refused=self.refused,
                best_us=self.best_us,
                bound_us=self.bound_us,
                estimated_us=self.estimated_us,
                default_us=self._default_us,
                default_is_marked=self._default_is_marked,
                costliest=self.costliest,
                eta_s=eta_s,
                left_s=self._left_s(progress.stage, eta_s),
                spent_s=self.spent_s,
                spent_measurements=self.spent.measurements + self.measured,
            )
        )

    def expect(self, calls: Mapping[Stage, int] | None) -> None:
        """Say how many calls each stage has that is still to come; None where that is not known."""
        self._to_come = calls

    def _left_s(self, stage: Stage, eta_s: float | None) -> float | None:
        """Return the seconds until a plan is chosen, where the calls to come are known, and how long such take."""
        if self._to_come is None or eta_s is None:
            return None
        following = {name: count for name, count in self._to_come.items() if ORDER.index(name) > ORDER.index(stage)}
        paces = {name: self._paces_s.get(name, self._paces_s.get(LIKE.get(name, ""))) for name in following}
        times = [None if pace is None else pace * following[name] for name, pace in paces.items()]
        known = [time for time in times if time is not None]
        if len(known) < len(times):
            return None
        together_s = eta_s + sum(known) + self._solving_s
        return together_s if self.left_s is None else min(together_s, self.left_s)

    def wait(self, note: str) -> None:
        """Report what is waited for, with the progress unchanged."""
        self.tell(replace(self._told, note=note))

    def solve(self, known: Mapping[str, Measurement], *, now: bool = False) -> None:
        """Solve the relaxed problem with what is known, if the last time was long enough ago or it must be now.

        Where the time is over before that is done, the last bounds stay.
        """
        rested_s = monotonic() - self._solved_at
        if not now and rested_s < max(self.policy.solve_after_s, self._solving_s / self.policy.solve_share):
            return
        began = monotonic()
        self.is_solved = False
        with suppress(OverError), self.within("measure"):
            rivals = self._rivals_wanted() if self.ends_by_twins else None
            self.bounds = self._relaxed().bounds(
                known, self.ceilings, self.options.gap or 0.0, rivals, self.searched_us()
            )
            self._default_us = default_us(
                self.space, {key: m.median_us for key, m in known.items() if m.median_us is not None}
            )
            self._default_is_marked = is_default_marked(self.space, known)
            self.is_solved = True
        self._solved_at = monotonic()
        self._solving_s = self._solved_at - began

    def has_plan(self, known: Mapping[str, Measurement]) -> bool:
        """Say whether there is a plan of what is measured and works."""
        calls = self.space.exact.calls
        try:
            self.problem().solve(
                {key: m.median_us for key, m in known.items() if m.median_us is not None and key in calls}
            )
        except InfeasibleError:
            return False
        return True

    def likely_keys(self, known: Mapping[str, Measurement], most: int) -> Sequence[str]:
        """Return the keys of calls that are likely to be wanted: of the plans that are expected to be best, about
        `most` in all. Where the time for looking is over, there are none."""
        with suppress(OverError), self.within("likely"):
            expected = self._relaxed().bounds(known, self.ceilings, self.options.gap or 0.0)
            return () if expected is None else expected.following(most)
        return ()

    def _rivals_wanted(self) -> RivalsWanted:
        proven_us = None if self.bounds is None else self.bounds.bound_us
        return RivalsWanted(self.policy.twins_gap, proven_us, is_last=self.rival_rounds >= self.policy.twins_rounds)

    def prove(self, known: Mapping[str, Measurement]) -> None:
        """Prove the bound at what is known in the end, where the last solution left that out."""
        if self.bounds is not None and not self.bounds.is_proven:
            with suppress(OverError), self.within("measure"):
                bound_us = self._relaxed().bound_us(known, self.ceilings)
                self.bounds = replace(self.bounds, bound_us=bound_us, is_proven=True)

    def look_for_twins(self, missing: Set[str]) -> None:
        """Let the run end as soon as twins say so, where most calls have one or are measured, and no gap is asked for.

        Args:
            missing: keys of what is not measured.
        """
        calls, twins = self.space.calls.keys(), self._relaxed().twins_us.keys()
        is_covered = len(calls - (missing - twins)) >= COVERED * len(calls) and len(twins) >= TWINNED * len(calls)
        wants_no_proof = (self.options.gap, self.options.estimated_gap) == (None, None)
        self.ends_by_twins = wants_no_proof and is_covered and not self.options.remeasure

    @property
    def is_enough_by_twins(self) -> bool:
        """True where nothing else is expected to make much of a difference, or the closest rivals made none."""
        bounds = self.bounds
        if not self.ends_by_twins or bounds is None or bounds.estimated_gap is None:
            return False
        is_near = bounds.estimated_gap <= self.policy.twins_gap or not bounds.wanted
        return is_near or self.rival_rounds >= self.policy.twins_rounds

    def problem(self) -> RelaxedProblem:
        """Return the relaxed problem of the space.

        Raises:
            InfeasibleError: some operator has no choice at all.
        """
        return self._relaxed().problem

    def space_problem(self) -> SpaceProblem:
        """Return the problem of the space as the answer needs it: of the request's budget, before calls have costs."""
        saving = self.options.budget_bytes is not None
        space = self.space if saving else self.space.exact
        if self._space_problem is None or self._space_problem.space is not space:
            self._space_problem = formulate(space, saving=saving)
        return self._space_problem

    def _relaxed(self) -> Relaxation:
        space = self.space.exact
        if self._relaxation is None:
            self._relaxation = Relaxation(space, self.twins, self.priors)
        if self._relaxation.space is not space:
            self._relaxation.extend(space)
        return self._relaxation

    def batch(self, wanted: Sequence[str], known: int, pace_s: float, devices: int = 1) -> Sequence[str]:
        """Return the wanted calls to measure before the next solution.

        Args:
            wanted: keys, those of `Bounds.wanted` that can be had, in its order.
            known: how many calls are measured.
            pace_s: from one result to the next; less where several devices measure.
            devices: that measure at once; each further one takes as many of the other calls as one device measures.
        """
        assert self.bounds is not None
        first: Collection[str] = self.bounds.wanted[: self.bounds.first]
        most = min(self._solving_s / self.policy.solve_share / max(pace_s, 1e-9), self.bounds.more(known))
        with suppress(OverError), self.within("measure"):
            first = set(self.bounds.following(int(most)))
        others = [key for key in wanted if key not in first][: int((devices - 1) * most)]
        return [*(key for key in wanted if key in first), *others] or wanted[:1]

    def enough(self, stage: str = "measure", under_way: int = 0, *, again: bool = False) -> bool:
        """Say whether to stop measuring (or compiling, or searching) and answer with what there is.

        Args:
            again: what is measured already would be timed once more: twins say nothing of that.
            under_way: calls that are being measured; they count as measured.
        """
        share = 1.0 if stage == "measure" else EARLY_SHARE
        measured = self.spent.measurements + self.measured + under_way
        if self.options.limits.measurements is not None and measured >= share * self.options.limits.measurements:
            return True
        if self.is_over(stage):
            return True
        if self.bounds is None:
            return False
        if self.is_enough_by_twins and not again:
            return True
        proven, estimated = self.bounds.proven_gap, self.bounds.estimated_gap
        if proven is not None and estimated is not None:
            proven = max(proven, estimated)  # searches of cells may find more than what is proven of what they tried
        pairs = ((self.options.gap, proven), (self.options.estimated_gap, estimated))
        return any(wanted is not None and found is not None and found <= wanted for wanted, found in pairs)
