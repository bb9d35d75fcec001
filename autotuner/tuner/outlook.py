"""How a walk stands: the best plan so far, what is proven, what is expected, and which calls could still matter.

The loop is a lazy shortest path: a call that is not measured enters with an optimistic cost, so the cheapest plan at
these costs is a bound, and what it is made of is measured next. It ends when that plan is measured throughout.

Source:
    Dellin and Srinivasa, A unifying formalism for shortest path problems with expensive edge evaluations (2016).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from autotuner.errors import InfeasibleError

if TYPE_CHECKING:
    from autotuner.tuner.puzzle import Puzzle

ROUNDING = 1e-9

BATCH_GROWTH = 0.1
"""Between two looks, at most this share of what is measured already is measured for no better reason than to keep the
device busy; a proven gap below `WIDE` makes it less."""

WIDE = 0.1


@dataclass(frozen=True)
class Outlook:
    """What is known of a problem of which some costs are measured and others optimistic; times in microseconds.

    Args:
        best_us: the best plan of measured calls alone; None where there is none.
        bound_us: proven: no plan takes less, however long the calls take that are not measured.
        estimated_us: by learned costs, no plan takes less; None without learned costs.
        wanted: what could still matter, by key: calls of the plan that the bound comes from, then of the one that is
            cheapest by learned costs, then of all others the most promising first. Empty when enough is proven.
        first: how many of `wanted` are of those two plans.
    """

    best_us: float | None
    bound_us: float
    estimated_us: float | None
    wanted: tuple[str, ...]
    first: int

    def more(self, known: int) -> float:
        """Return how many calls are worth measuring before the next look, of which `known` are measured already.

        All that is wanted depends on what is measured next: so few at first, and few when little is left to prove.
        """
        return BATCH_GROWTH * known * min(1.0, (self.proven_gap or WIDE) / WIDE)

    @property
    def proven_gap(self) -> float | None:
        """By what share the best plan may be longer than the best there can be; None where that is not known."""
        return gap(self.best_us, self.bound_us)

    @property
    def estimated_gap(self) -> float | None:
        return gap(self.best_us, self.estimated_us)


def gap(best_us: float | None, bound_us: float | None) -> float | None:
    """Return by what share one time lies above another, not less than 0; None where one is not known, or is 0."""
    if best_us is None or not bound_us:
        return None
    above = best_us / bound_us - 1
    return above if above > ROUNDING else 0.0


def look(
    puzzle: "Puzzle",
    measured_us: Mapping[str, float],
    optimistic_us: Mapping[str, float],
    learned_us: Mapping[str, float] | None = None,
    enough: float = 0.0,
) -> Outlook:
    """Solve, and say what could still matter.

    Args:
        measured_us: of calls that are measured and work.
        optimistic_us: of calls that are not measured: at most what they will turn out to take.
        learned_us: of the same calls, what they are expected to take at least.
        enough: the proven gap at which nothing matters any more.

    Raises:
        InfeasibleError: there is no plan, whatever will be measured.
    """
    lower = puzzle.solved({**optimistic_us, **measured_us})
    best_us: float | None
    if lower.keys <= measured_us.keys():
        best_us = lower.total_us
    else:
        try:
            best_us = puzzle.solved(measured_us).total_us
        except InfeasibleError:
            best_us = None
    if not optimistic_us:
        return Outlook(best_us, lower.bound_us, lower.bound_us, (), 0)
    expected = None if learned_us is None else puzzle.solved({**learned_us, **measured_us})
    reached = inf if best_us is None else best_us / (1 + enough) * (1 - ROUNDING)
    estimated_us = None if expected is None else max(expected.bound_us, lower.bound_us)
    if lower.bound_us >= reached:
        return Outlook(best_us, lower.bound_us, estimated_us, (), 0)
    plans = [*sorted(lower.keys), *(sorted(expected.keys) if expected is not None else ())]
    first = dict.fromkeys(key for key in plans if key not in measured_us)
    through_us = lower.through_us(reached)
    rest = sorted((us, key) for key in optimistic_us if key not in first and (us := through_us.get(key, inf)) < reached)
    return Outlook(best_us, lower.bound_us, estimated_us, (*first, *(key for _, key in rest)), len(first))
