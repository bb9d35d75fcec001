"""Learned costs: estimates of calls that are not measured, from the ratio of measured to optimistic costs."""

from bisect import insort
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from math import floor

from autotuner.ir.records import Call
from autotuner.measure.roofline import Work, work_of

COVERAGE = 0.9
"""The share of calls that take at least as long as their learned cost."""

Groups = Mapping[str, Sequence[Hashable]]
"""By call key: the groups of similar calls that a call belongs to, the closest first."""


def groups_of(calls: Mapping[str, Call]) -> Groups:
    """Return groups of calls: by kernel, kinds and amount of work; by kernel and kinds; and all."""
    found: dict[str, Sequence[Hashable]] = {}
    for key, call in calls.items():
        work: Work = work_of(call)
        alike = (call.candidate.kernel, call.subgraph.kinds)
        found[key] = ((*alike, work.moved_bytes, tuple(sorted(work.flop.items()))), alike, "every call")
    return found


def learned_us(
    groups: Groups, optimistic_us: Mapping[str, float], measured_us: Mapping[str, float], coverage: float = COVERAGE
) -> dict[str, float]:
    """Return learned costs of the calls that are not measured.

    A call takes its optimistic cost times a factor: the one that the stated share of the measured calls in its group
    exceeds. The closest group counts in which enough is measured for that (9 calls for 90 %); without one, its
    optimistic cost.

    Args:
        groups: of every call.
        optimistic_us: of every call; what costs nothing optimistically says nothing.
        measured_us: of those that are measured.

    Returns:
        Microseconds by key, never below the optimistic cost.

    Source:
        Split conformal prediction: Papadopoulos et al., Inductive confidence machines for regression (2002).
    """
    factors: dict[Hashable, list[float]] = defaultdict(list)
    for key, us in measured_us.items():
        if optimistic_us.get(key, 0.0) > 0:
            for group in groups[key]:
                insort(factors[group], us / optimistic_us[key])
    told = {group: factor for group, seen in factors.items() if (factor := _exceeded(seen, coverage)) is not None}
    found: dict[str, float] = {}
    for key, us in optimistic_us.items():
        if key not in measured_us:
            found[key] = us * max(1.0, next((told[group] for group in groups[key] if group in told), 1.0))
    return found


def _exceeded(ordered: Sequence[float], coverage: float) -> float | None:
    """Return what the next one exceeds with this probability, or None where there are too few to say."""
    rank = floor((1 - coverage) * (len(ordered) + 1) + 1e-9)
    return ordered[rank - 1] if rank else None
