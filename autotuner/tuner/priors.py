"""Priors: how far above the roofline kernels were wherever they were measured. They prove nothing.

A call of which neither its own shape nor another one is known is expected to be as far above its optimistic cost as
most calls of its kernel were on other operators: in the recordings that come with the package, on an H200. So a first
tuning does not try kernels one behind the other which look fast because nothing is known of them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from autotuner.database import Database, Filter
from autotuner.ir.device import CPU
from autotuner.ir.records import Call
from autotuner.measure.roofline import Roofline, work_of
from autotuner.tuner.learned import COVERAGE, NO_PRIORS, Priors, exceeded, prior_names

FILE = Path(__file__).resolve().parent.parent / "recordings" / "priors.json"


@cache
def shipped_priors(device_type: str) -> Priors:
    """Return what comes with the package for devices of a type; nothing for CPUs, which no recording is of."""
    if device_type == CPU:
        return NO_PRIORS
    return {name: (likely, median) for name, (likely, median) in json.loads(FILE.read_text()).items()}


def priors_of_database(database: Database) -> dict[str, tuple[float, float]]:
    """Return what the first environment of a database says of kernels."""
    environment = database.environments()[0]
    rows = database.measurements(Filter(environment.key), limit=1_000_000)
    times = ((row.call, row.measurement.median_us) for row in rows)
    return priors_of(
        ((call, us) for call, us in times if us is not None), Roofline.from_facts(database.facts(environment.key))
    )


def priors_of(recorded: Iterable[tuple[Call, float]], ceilings: Roofline) -> dict[str, tuple[float, float]]:
    """Return the ratios of times to optimistic costs that nine in ten, and half, of the calls of a name reach.

    Args:
        recorded: calls with the microseconds that they took.
        ceilings: of the device that took them.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for call, us in recorded:
        optimistic_us = ceilings.optimistic_us(work_of(call))
        if optimistic_us > 0:
            for name in prior_names(call):
                ratios[name].append(us / optimistic_us)
    found = {}
    for name, seen in sorted(ratios.items()):
        ordered = sorted(seen)
        likely, median = (exceeded(ordered, share) or ordered[0] for share in (COVERAGE, 0.5))
        found[name] = (round(likely, 3), round(median, 3))
    return found


def written(priors: Mapping[str, tuple[float, float]]) -> str:
    """Return priors as text, one a line."""
    lines = (f" {json.dumps(name)}: [{likely}, {median}]" for name, (likely, median) in priors.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
