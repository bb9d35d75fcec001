"""Doubts: measurements that were taken under bad conditions, and are better taken again."""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from math import inf
from statistics import median

from autotuner.ir.records import NO_COMPILER, Call, Doubt, Environment, Mark, Measurement
from autotuner.kernels import KERNELS
from autotuner.plan.step import Step
from autotuner.solve.baselines import alone_as_declared
from autotuner.space import Space
from autotuner.tuner.learned import traits_of

OUTLIER_FACTOR = 4.0
"""Above the median of calls of the same kernel for as much work. Of 1,209 of a tiny layer on a quiet CPU, none is."""

OUTLIER_FACTOR_OF_BEST = 16.0
"""Above the fastest call for the same operators. Of the same 1,209 calls, none is; five are above 8 times it."""

SIBLINGS_MIN = 3
"""So many calls of the same kernel have a median that one bad time does not move."""

MARKED_SHARE = 0.1
"""Of all times: so many that were measured under bad conditions may hide a better plan."""

WIDE_SHARE = 0.5
"""An interval is wide above this share of its time, or above twice the noise floor where that is more."""

WIDE_PART = 0.1
"""Of the plan's time: so much may have wide intervals."""

WHAT_HAPPENED: Mapping[Mark, str] = {
    "contended": "while other processes used the device",
    "drifted": "while the speed of the device changed",
}


def outliers(calls: Mapping[str, Call], known: Mapping[str, Measurement]) -> set[str]:
    """Return the keys of calls that took far longer than their siblings did, by samples that were kept.

    A kernel takes about as long in other layouts for the same bytes and products: see `OUTLIER_FACTOR` and
    `OUTLIER_FACTOR_OF_BEST`.
    """
    times = {key: m.median_us for key, m in known.items() if m.median_us is not None and key in calls}
    groups = {key: own.groups for key, own in traits_of({key: calls[key] for key in times}).items()}
    alike: dict[Hashable, list[float]] = defaultdict(list)
    best: dict[str, float] = defaultdict(lambda: inf)
    for key, us in times.items():
        alike[groups[key][0]].append(us)
        signature = calls[key].subgraph.signature
        best[signature] = min(best[signature], us)
    usual = {group: median(found) for group, found in alike.items() if len(found) >= SIBLINGS_MIN}
    return {
        key for key, us in times.items() if known[key].samples_us and (
            us > OUTLIER_FACTOR * usual.get(groups[key][0], inf)
            or us > OUTLIER_FACTOR_OF_BEST * best[calls[key].subgraph.signature]
        )
    }  # fmt: skip


def unbuilt(calls: Mapping[str, Call], known: Mapping[str, Measurement]) -> set[str]:
    """Return the keys of all calls whose kernels compile, where none could be built: what they need is missing here."""
    compiled = {key for key in known if key in calls and KERNELS[calls[key].candidate.kernel].compiles}
    failed = {key for key in compiled if known[key].status == "error"}
    return failed if failed and not any(known[key].status == "ok" for key in compiled) else set()


def is_default_marked(space: Space, known: Mapping[str, Measurement]) -> bool:
    """Say whether a time of some operator alone, as declared, was taken under bad conditions: then their sum is no
    baseline."""
    costs_us = {key: m.median_us for key, m in known.items() if m.median_us is not None}
    return any(known[key].is_doubtful for key in alone_as_declared(space, costs_us).values())


def distrusted(
    calls: Mapping[str, Call], known: Mapping[str, Measurement], chosen: Collection[str] | None
) -> frozenset[str]:
    """Return the keys of known calls that are to be measured again.

    Args:
        chosen: what is doubtful of the latest answer as a whole; None where that is settled, or there is none yet: a
            tuning that was interrupted goes on with what is missing, and then has a doubtful answer.
    """
    lone = {key for key in outliers(calls, known) if len(known[key].samples_us) == 1}
    if chosen is None:
        return frozenset(lone)
    marked = {key for key, measurement in known.items() if measurement.is_doubtful}
    return frozenset(marked | lone | unbuilt(calls, known) | (set(chosen) & known.keys()))


def doubts_of(
    steps: Sequence[Step],
    chosen: Collection[str],
    *,
    calls: Mapping[str, Call],
    known: Mapping[str, Measurement],
    environment: Environment,
    noise_floor: float | None,
    fresh: Collection[str] | None = None,
) -> tuple[Doubt, ...]:
    """Return why a plan may not be the best, or not take what is predicted.

    Args:
        chosen: keys of the calls that its steps execute.
        fresh: keys of what was measured for it; None for everything.
    """
    timed = [key for key in (known if fresh is None else {*fresh, *chosen}) if key in calls and key in known]
    return (
        *_missing_tools(calls, known, environment),
        *_marked(chosen, {key: known[key] for key in timed}),
        *_wide(steps, noise_floor),
    )


def _missing_tools(
    calls: Mapping[str, Call], known: Mapping[str, Measurement], environment: Environment
) -> Iterator[Doubt]:
    compiling = sum(KERNELS[call.candidate.kernel].compiles for call in calls.values())
    failed = unbuilt(calls, known)
    if dict(environment.facts).get("compiler") == NO_COMPILER and compiling:
        yield Doubt(
            "no_compiler",
            f"No C++ compiler was found, so none of the {compiling:,} candidates that need one could be had: install "
            "one (g++), and tune again.",
        )
    elif failed:
        messages = Counter(known[key].message for key in failed)
        yield Doubt(
            "no_compiler",
            f"None of the {len(failed):,} candidates that are compiled could be built; most often: "
            f"{messages.most_common(1)[0][0][:200]}",
        )


def _marked(chosen: Collection[str], known: Mapping[str, Measurement]) -> Iterator[Doubt]:
    timed = [key for key, measurement in known.items() if measurement.status == "ok"]
    for mark, happened in WHAT_HAPPENED.items():
        found = {key for key in timed if mark in known[key].marks}
        inside = len(found & set(chosen))
        if inside or len(found) > MARKED_SHARE * len(timed):
            yield Doubt(
                mark, f"{len(found):,} of {len(timed):,} times were taken {happened}, {inside} of the plan among them."
            )


def _wide(steps: Sequence[Step], noise_floor: float | None) -> Iterator[Doubt]:
    share = max(WIDE_SHARE, 2 * (noise_floor or 0.0))
    wide = [step for step in steps if step.high_us - step.low_us > share * step.predicted_us]
    wide_us = sum(step.predicted_us for step in wide)
    total_us = sum(step.predicted_us for step in steps)
    open_us = sum(step.high_us - step.low_us for step in wide)
    if wide_us <= WIDE_PART * total_us and open_us > share * total_us:
        yield Doubt(
            "wide",
            f"The 95 % intervals of {len(wide)} calls of the plan leave {open_us:,.0f} of its {total_us:,.0f} us open.",
        )
    if wide_us > WIDE_PART * total_us:
        yield Doubt(
            "wide",
            f"Calls that make up {wide_us / total_us:.0%} of the plan have 95 % intervals wider than {share:.0%} of "
            "their times.",
        )
