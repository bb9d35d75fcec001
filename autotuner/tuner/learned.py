"""Learned costs: what calls that are not measured are expected to take, by those that are. They prove nothing."""

from bisect import insort
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import floor

from autotuner.checkpoint import checkpoint
from autotuner.ir.records import Call
from autotuner.kernels.geometry import has_programs
from autotuner.measure.roofline import Work, work_of

Costs = Mapping[str, float]
"""Microseconds by call key; a call that is not there cannot be used."""

NO_COSTS: Costs = {}

Priors = Mapping[str, tuple[float, float]]
"""By a kernel's name, and by it and the kinds that it computes: the ratios of times to optimistic costs that nine in
ten, and half, of such calls reached elsewhere; see `autotuner.tuner.priors`."""

NO_PRIORS: Priors = {}

COVERAGE = 0.9
"""The share of calls that take at least as long as learned from ratios of similar calls to their optimistic cost."""

ALIKE = 0.9
"""A call is expected to take at least this share of the fastest measured one of its family with no more work, until
nine calls with others of their family are measured: then nine in ten measured calls say which share."""


@dataclass(frozen=True)
class Traits:
    """Properties of a call by which similar ones are found.

    Args:
        family: calls of one kernel and the same kinds of operators are of one family.
        work: of the call.
        priors: names under which priors have it.
    """

    family: Hashable
    work: Work
    priors: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Hashable, ...]:
        """The groups of similar calls that the call belongs to, the closest first."""
        return (self.family, amounts(self.work)), self.family, "every call"


@dataclass(frozen=True)
class Learned:
    """Costs of calls that are not measured, learned from those that are; microseconds by key.

    Args:
        likely_us: nine calls of ten take as long, see `COVERAGE`.
        median_us: half of them do; no less than `likely_us`.
    """

    likely_us: Costs
    median_us: Costs


def prior_names(call: Call) -> tuple[str, ...]:
    """Return the names under which priors have a call, the closer one first; none of programs, which may be any."""
    kernel, subgraph = call.candidate.kernel, call.subgraph
    return () if has_programs(subgraph) else (f"{kernel} {'+'.join(subgraph.kinds)}", kernel)


def amounts(work: Work) -> tuple[Hashable, ...]:
    return work.moved_bytes, *sorted(work.flop.items())


def traits_of(calls: Mapping[str, Call]) -> dict[str, Traits]:
    """Return the traits of calls, by key."""
    found = {}
    for key, call in calls.items():
        checkpoint()
        found[key] = Traits((call.candidate.kernel, call.subgraph.kinds), work_of(call), prior_names(call))
    return found


def learned_costs(
    traits: Mapping[str, Traits],
    optimistic_us: Costs,
    measured_us: Costs,
    twins_us: Costs = NO_COSTS,
    priors: Priors = NO_PRIORS,
) -> Learned:
    """Return learned costs of the calls that have an optimistic cost and are not measured.

    A call takes its optimistic cost times a factor: the one that 90 % (or half) of the measured calls in its group
    exceed. The closest group counts in which enough is measured for that (9 calls for 90 %), and priors before the
    group of every call; without one, its optimistic cost. Nor does a call take less than a share of what its family
    shows, see `_Family`: the share that 90 % of the measured calls exceed, each compared with the others. It is an
    estimate: of the calls drawn at random from what was recorded, 79 to 88 % took as long.

    A call with a twin takes what that says, times a factor found likewise: by the measured calls that have twins.

    Args:
        traits: of every call.
        optimistic_us: of every call; what costs nothing optimistically says nothing.
        measured_us: of those that are measured.
        twins_us: what twins say that calls take, of any of them.
        priors: of kernels.

    Source:
        Split conformal prediction: Papadopoulos et al., Inductive confidence machines for regression (2002);
        Barber et al., Predictive inference with the jackknife+ (2021), for leaving out one call at a time.
    """
    factors: dict[Hashable, list[float]] = defaultdict(list)
    families: dict[Hashable, _Family] = defaultdict(_Family)
    for key, us in measured_us.items():
        families[traits[key].family].add(key, traits[key].work, us)
        if optimistic_us.get(key, 0.0) > 0:
            for group in traits[key].groups:
                insort(factors[group], us / optimistic_us[key])
    likely, median = ({group: exceeded(seen, share) for group, seen in factors.items()} for share in (COVERAGE, 0.5))
    alike = _told_share(families, traits, measured_us)
    by_twins = _by_twins(traits, measured_us, twins_us)
    found: dict[str, tuple[float, float]] = {}
    for key, us in optimistic_us.items():
        if key in by_twins:
            found[key] = max(us, by_twins[key][0]), max(us, *by_twins[key])
        elif key not in measured_us:
            own = traits[key]
            floor_us = max(us, alike * families[own.family].least_us(own.work))
            prior = next((priors[name] for name in own.priors if name in priors), None)
            one, half = (
                _told(own, told, None if prior is None else prior[place]) for place, told in enumerate((likely, median))
            )
            found[key] = max(floor_us, us * one), max(floor_us, us * one, us * half)
    return Learned({key: us for key, (us, _) in found.items()}, {key: us for key, (_, us) in found.items()})


def _told(own: Traits, told: Mapping[Hashable, float | None], prior: float | None) -> float:
    """Return the factor of a call: of the closest group that has one, with the prior before that of every call."""
    *close, widest = own.groups
    factors = (*(told.get(group) for group in close), prior, told.get(widest))
    return next((factor for factor in factors if factor), 0.0)


def _by_twins(traits: Mapping[str, Traits], measured_us: Costs, twins_us: Costs) -> dict[str, tuple[float, float]]:
    """Return, of calls that have twins and are not measured, what nine in ten and what half of them take at least."""
    ratios: dict[Hashable, list[float]] = defaultdict(list)
    for key in measured_us.keys() & twins_us.keys():
        for group in (traits[key].family, "every call"):
            insort(ratios[group], measured_us[key] / twins_us[key])
    factors: dict[Hashable, tuple[float, float]] = {}
    for group, seen in ratios.items():
        likely, median = (exceeded(seen, share) for share in (COVERAGE, 0.5))
        if likely is not None and median is not None:
            factors[group] = likely, median
    found = {}
    for key in twins_us.keys() - measured_us.keys():
        likely, median = factors.get(traits[key].family) or factors.get("every call") or (ALIKE, 1.0)
        found[key] = twins_us[key] * likely, twins_us[key] * median
    return found


class _Family:
    """The fastest measured calls of a family, by work. More work takes no less time, and is done at no lower rate."""

    def __init__(self) -> None:
        self._fastest: dict[tuple[Hashable, ...], tuple[Work, list[tuple[float, str]]]] = {}

    def add(self, key: str, work: Work, us: float) -> None:
        """Take a measured call."""
        fastest = self._fastest.setdefault(amounts(work), (work, []))[1]
        insort(fastest, (us, key))
        del fastest[2:]

    def least_us(self, work: Work, without: str = "") -> float:
        """Return what a call takes at least, by the measured calls but one of this key; 0 where there are none."""
        least = 0.0
        for other, fastest in self._fastest.values():
            us = next((us for us, key in fastest if key != without), 0.0)
            least = max(least, us * _share(work, other))
        return least


def _told_share(families: Mapping[Hashable, _Family], traits: Mapping[str, Traits], measured_us: Costs) -> float:
    """Return which share of what the others of its family show a call takes at least, by nine in ten measured ones."""
    shown = ((us, families[traits[key].family].least_us(traits[key].work, key)) for key, us in measured_us.items())
    told = exceeded(sorted(us / least for us, least in shown if least > 0), COVERAGE)
    return ALIKE if told is None else min(1.0, told)


def _share(work: Work, other: Work) -> float:
    """Return how much of another work a work does at least: 1 where it is no less, less where it is a part."""
    pairs = [(work.moved_bytes, other.moved_bytes)]
    pairs += [(work.flop.get(dtype, 0.0), other.flop.get(dtype, 0.0)) for dtype in work.flop.keys() | other.flop.keys()]
    return min((min(1.0, own / its) for own, its in pairs if its > 0), default=1.0)


def exceeded(ordered: Sequence[float], coverage: float) -> float | None:
    """Return what the next one exceeds with this probability, or None where there are too few to say."""
    rank = floor((1 - coverage) * (len(ordered) + 1) + 1e-9)
    return ordered[rank - 1] if rank else None
