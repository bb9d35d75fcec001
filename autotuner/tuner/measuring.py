"""Which calls of a space are measured, in which races, and when results are stored."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from autotuner.database import Database
from autotuner.kernels import KERNELS
from autotuner.records import Call, Measurement
from autotuner.space import Space
from autotuner.tuner.answer import solved
from autotuner.tuner.asked import Asked, Progress, Result, Watch

STORE_AFTER_RESULTS = 32
STORE_AFTER_S = 1.0
CONFIRM_ROUNDS = 4


def measure_missing(
    space: Space, database: Database, measurer: Asked, watch: Watch, *, retry: bool = False
) -> tuple[dict[str, Measurement], dict[str, int], frozenset[str]]:
    """Measure the calls of a space that the database lacks, storing as results come.

    Returns:
        All that is known, by call key; counts; the keys of what was measured now.
    """
    environment = measurer.environment.key
    calls = space.calls
    known = database.find(environment, tuple(calls))
    if retry:
        known = {key: measurement for key, measurement in known.items() if measurement.status == "ok"}
    reused = len(known)
    missing = [call for key, call in calls.items() if key not in known]
    failed = 0
    new: list[Result] = []
    stored_at = time.monotonic()

    def flush() -> None:
        nonlocal new, stored_at
        database.store(environment, new)
        new, stored_at = [], time.monotonic()

    def learn(call: Call, measurement: Measurement) -> None:
        nonlocal failed
        known[call.key] = measurement
        new.append((call, measurement))
        failed += measurement.status != "ok"
        if len(new) >= STORE_AFTER_RESULTS or time.monotonic() - stored_at > STORE_AFTER_S:
            flush()

    try:
        compiled = [call for call in missing if KERNELS[call.candidate.kernel].compiles]
        for done, (call, problem) in enumerate(measurer.prepare(compiled), start=1):
            if problem is not None:
                learn(call, problem)
            watch(Progress("compile", done, len(compiled), reused, failed))
        total = sum(1 for call in missing if call.key not in known)
        watch(Progress("measure", 0, total, reused, failed))
        races = list(_races(space, {call.key for call in missing if call.key not in known}))
        for done, (call, measurement) in enumerate(measurer.measure(races), start=1):
            learn(call, measurement)
            watch(Progress("measure", done, total, reused, failed))
    finally:
        if new:
            flush()
    counts = {
        "choices": len(space.choices) + len(space.conversions),
        "calls": len(calls),
        "measured": len(known) - reused,
        "reused": reused,
        "unknown": len(calls) - len(known),
        "failed": sum(1 for measurement in known.values() if measurement.status != "ok"),
    }
    statuses = Counter(measurement.status for measurement in known.values())
    counts |= {f"status_{status}": count for status, count in sorted(statuses.items())}
    return known, counts, frozenset(call.key for call in missing if call.key in known)


def confirm_chosen(
    space: Space,
    known: Mapping[str, Measurement],
    fresh: frozenset[str],
    database: Database,
    measurer: Asked,
    watch: Watch,
) -> dict[str, Measurement]:
    """Measure what would be chosen once more, and solve again, until nothing new is chosen.

    The least of many noisy timings is too low on average; a second timing of the same call is not. Only calls that were
    measured in this walk are confirmed. A call that fails the second time keeps its first measurement.
    """
    found = dict(known)
    left = set(fresh)
    for _ in range(CONFIRM_ROUNDS):
        problem, solution = solved(space, found, "exact")
        chosen = [choice.call for choice in problem.chosen(solution)]
        chosen += [conversion.call for conversion in problem.converted(solution)]
        calls = {call.key: call for call in chosen if call.key in left}
        if not calls:
            break
        left -= calls.keys()
        again = []
        for done, (call, measurement) in enumerate(measurer.measure([[call] for call in calls.values()]), start=1):
            if measurement.status == "ok":
                again.append((call, measurement))
            watch(Progress("confirm", done, len(calls)))
        database.store(measurer.environment.key, again, replace=True)
        found |= {call.key: measurement for call, measurement in again}
    return found


def _races(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield calls that compute the same thing, declared layouts first, so that the incumbent is good early."""
    races: dict[object, dict[str, Call]] = defaultdict(dict)
    for choice in space.choices:
        if choice.call.key in keys:
            kinds = (choice.call.subgraph.kinds, choice.cover.operators)
            races[kinds].setdefault(choice.call.key, choice.call)
    for conversion in space.conversions:
        if conversion.call.key in keys:
            races["conversion", space.graph.shape(conversion.tensor)].setdefault(conversion.call.key, conversion.call)
    seen: set[str] = set()
    for race in races.values():
        fresh = [call for key, call in race.items() if key not in seen]
        seen |= race.keys()
        if fresh:
            yield fresh
