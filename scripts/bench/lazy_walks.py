"""Walks through variants of what was recorded, each with an optimum of its own: is an estimated gap right, and when?"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from time import process_time
from typing import Any

from autotuner.errors import InfeasibleError
from autotuner.tuner.bounds import Bounds, CheapestPlan, bounds
from autotuner.tuner.learned import Costs, learned_costs
from autotuner.tuner.progress import gap
from scripts.bench.lazy_cases import Case

LEFT_OUT = 0.3
"""Of the calls of a recording, each walk leaves out this share, drawn at random."""

DISTURBED = 0.15
"""By up to this share, the time of each call differs from what was recorded, in walks that say what to expect."""

BARS = (0.05, 0.01)


@dataclass(frozen=True)
class Reached:
    """Where a walk first estimated a gap of at most `bar`.

    Args:
        share: of the calls, measured by then.
        regret: by how much the best measured plan truly was longer than the optimum.
    """

    bar: float
    share: float
    regret: float

    @property
    def is_right(self) -> bool:
        return self.regret <= self.bar


def cross_validated(case: Case, walks: int) -> dict[str, Any]:
    """Walk through parts of a case until the least gap is estimated, and say when the estimates came and were right."""
    began = process_time()
    found = [reached for seed in range(walks) for reached in expected_walk(case.without(LEFT_OUT, seed))]
    return {
        "title": case.title, "walks": walks, "cpu_s": process_time() - began,
        "reached": [asdict(reached) for reached in found],
    }  # fmt: skip


def expected_walk(case: Case) -> list[Reached]:
    """Measure the calls of one plan after another, each the cheapest by learned costs; return where gaps were reached.

    So does a tuning until a gap of 1 % is estimated, where it measures the calls of each plan alone.
    """
    best_us = case.solve(case.true_us).total_us
    measured = {key: case.true_us[key] for key in case.first}
    reached: list[Reached] = []
    while len(reached) < len(BARS):
        every = case.optimistic_us(measured)
        learned = learned_costs(case.traits, {key: every[key] for key in case.true_us}, measured)
        plan = case.solve({**learned.likely_us, **measured})
        found_us = _best_us(case, measured, plan)
        distance = gap(found_us, plan.bound_us)
        while distance is not None and len(reached) < len(BARS) and distance <= BARS[len(reached)]:
            assert found_us is not None
            reached.append(Reached(BARS[len(reached)], len(measured) / len(case.true_us), found_us / best_us - 1))
        measured |= {key: case.true_us[key] for key in plan.keys}
    return reached


def looked(case: Case, measured: Costs) -> tuple[Bounds, Costs]:
    """Return what is known when some calls are measured, and what the others are expected to take."""
    every = case.optimistic_us(measured)
    optimistic = {key: every[key] for key in case.true_us}
    left = {key: us for key, us in optimistic.items() if key not in measured}
    learned = learned_costs(case.traits, optimistic, measured)
    return bounds(case.solve, measured, left, learned), learned.likely_us


def next_batch(found: Bounds, measured: Costs) -> Sequence[str]:
    """Return the calls that a walk measures before it looks again."""
    return found.following(int(found.more(len(measured)))) or found.wanted[:1]


def disturbed(case: Case, walks: int) -> dict[str, Any]:
    """Walk through a case at times that are disturbed, until the least gap is estimated, as often as is said."""
    began = process_time()
    found = [reached for seed in range(walks) for reached in tuned_walk(case.disturbed(DISTURBED, seed))]
    return {
        "title": case.title, "walks": walks, "cpu_s": process_time() - began,
        "reached": [asdict(reached) for reached in found],
    }  # fmt: skip


def tuned_walk(case: Case) -> list[Reached]:
    """Measure batch after batch as a tuning does; return where gaps were estimated first."""
    best_us = case.solve(case.true_us).total_us
    measured = {key: case.true_us[key] for key in case.first}
    reached: list[Reached] = []
    while len(reached) < len(BARS):
        found, _ = looked(case, measured)
        gap_now = found.estimated_gap
        while gap_now is not None and len(reached) < len(BARS) and gap_now <= BARS[len(reached)]:
            assert found.best_us is not None
            reached.append(Reached(BARS[len(reached)], len(measured) / len(case.true_us), found.best_us / best_us - 1))
        measured |= {key: case.true_us[key] for key in next_batch(found, measured)}
    return reached


def expectations(found: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows of a table: case, gap, walks, calls until it was estimated, and how far off the plan was."""
    rows: list[tuple[str, ...]] = []
    for row in found:
        for bar in BARS:
            own = [Reached(**each) for each in row["reached"] if each["bar"] == bar]
            calls, regrets = [each.share for each in own], [each.regret for each in own]
            right = sum(each.is_right for each in own)
            rows.append(
                (
                    row["title"], f"{bar:.0%}", f"{mean(calls):.1%} ± {_spread(calls):.1%}", f"{max(calls):.1%}",
                    f"{mean(regrets):.2%} ± {_spread(regrets):.2%}", f"{max(regrets):.2%}", f"{right} of {len(own)}",
                )
            )  # fmt: skip
    return rows


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _best_us(case: Case, measured: Mapping[str, float], plan: CheapestPlan) -> float | None:
    if plan.keys <= measured.keys():
        return plan.total_us
    try:
        return case.solve(measured).total_us
    except InfeasibleError:
        return None


def sentences(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return lines on how often estimates were right, by case and in all."""
    found = list(found)
    lines = []
    for row in (*found, _in_all(found)) if len(found) > 1 else found:
        reached = [Reached(**each) for each in row["reached"]]
        lines += [f"- {row['title']}: {'; '.join(_told(reached, bar) for bar in BARS)}."]
    return lines


def _in_all(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {"title": "In all", "reached": [each for row in found for each in row["reached"]]}


def _told(reached: Iterable[Reached], bar: float) -> str:
    """Return how often the estimate of a gap was right, when it came, and how far off the worst one was."""
    own = [each for each in reached if each.bar == bar]
    shares = [each.share for each in own]
    return (
        f"an estimated {bar:.0%} was right in {sum(each.is_right for each in own)} of {len(own)} recorded walks (truly "
        f"{max(each.regret for each in own):.1%} above the optimum at most), after {sum(shares) / len(own):.1%} of the "
        f"calls in the mean, {max(shares):.1%} at most"
    )
