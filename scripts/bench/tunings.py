"""Tunings from an empty database: each in a process of its own, the regret of their plans, and the page of results."""

import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import autotuner
from autotuner.database import Filter, open_database
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement, digest
from autotuner.kernels import KERNELS
from autotuner.measure import Measurer
from autotuner.plan.configuration import Configuration, load_configuration, save_configuration
from scripts.pages import table

STAGES = ("search", "compile", "measure", "confirm", "solve")
CALLS_MAX = 100
"""Calls of each library that the rate is taken from."""
LAST_WORDS = 200

Timings = Mapping[str, Measurement]
Run = dict[str, Any]


class TuningError(Exception):
    """A tuning failed, or was not over in time."""


def tune(model: Model, device: str, stem: Path, *, end_to_end: bool = False) -> None:
    """Tune, and leave database, configuration and figures beside each other: STEM.sqlite, .json, .run."""
    seconds: dict[str, float] = defaultdict(float)
    last = began = time.perf_counter()

    def watch(progress: autotuner.Progress) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[progress.stage] += now - last
        last = now

    os.environ["AUTOTUNER_CACHE"] = str(cache_of(stem))
    found = autotuner.tune(model, database=database_of(stem), device=device, end_to_end=end_to_end, watch=watch)
    total_s = time.perf_counter() - began
    save_configuration(found, stem.with_suffix(".json"))
    run = {
        "seconds": total_s,
        "seconds_by_stage": dict(seconds),
        "calls": found.counts["measured"],
        "failed": found.counts["failed"],
        "calls_per_s": found.counts["measured"] / total_s,
        "predicted_us": found.certificate.predicted_us,
        "doubts": [doubt.reason for doubt in found.doubts],
    }
    stem.with_suffix(".run").write_text(json.dumps(run))


def tuned_apart(command: Sequence[str], stem: Path, limit_s: float, *, begins_empty: bool = True) -> Run:
    """Run the command that tunes, and return the figures that it leaves.

    Args:
        begins_empty: whether there may be no database yet.

    Raises:
        TuningError: it failed, or was not over in time; then it is killed.
    """
    if begins_empty and database_of(stem).exists():
        raise TuningError(f"{database_of(stem)} exists, and a tuning starts with an empty database")
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TuningError(f"not over after {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise TuningError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:LAST_WORDS])
    run: Run = json.loads(stem.with_suffix(".run").read_text())
    return run


def tunings(stems: Sequence[Path], tune_one: Callable[[Path, float], Run], limit_s: float) -> list[Run]:
    """Tune several times; a tuning that fails, or takes more than half of the limit, costs the others nothing else."""
    ends_at = time.monotonic() + limit_s
    return [tuned_within(stem, tune_one, min(limit_s / 2, ends_at - time.monotonic())) for stem in stems]


def tuned_within(stem: Path, tune_one: Callable[[Path, float], Run], limit_s: float) -> Run:
    """Tune once within a limit, print the figures and return them; those of a failure say why."""
    began = time.monotonic()
    try:
        if limit_s <= 0:
            raise TuningError("not begun: the time is over")
        run = tune_one(stem, limit_s)
    except TuningError as error:
        run = {"failure": str(error), "seconds": time.monotonic() - began}
    print(json.dumps(run), flush=True)
    return run


def copied(source: Path, target: Path) -> None:
    """Have a tuning begin with what another one measured.

    Args:
        source: the other tuning's stem, as is `target`.
    """
    shutil.copy(database_of(source), database_of(target))


def copied_as_older(source: Path, target: Path) -> None:
    """Have a tuning begin with what another one measured, as if that had been under an older driver."""
    with open_database(database_of(source)) as known, open_database(database_of(target)) as made:
        for environment in known.environments():
            older = replace(environment, facts=tuple((dict(environment.facts) | {"driver": "older"}).items()))
            made.remember(older)
            rows = known.measurements(Filter(environment.key))
            made.store(older.key, [(row.call, row.measurement) for row in rows])


def database_of(stem: Path) -> Path:
    return stem.with_suffix(".sqlite")


def cache_of(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}_cache")


def timings_of(stem: Path) -> dict[Call, Measurement]:
    """Return everything that a tuning measured."""
    with open_database(database_of(stem)) as opened:
        return {row.call: row.measurement for row in opened.measurements()}


def plan_of(stem: Path) -> list[Call]:
    """Return the calls of a tuning's plan, in the form in which they were measured."""
    found: Configuration = load_configuration(stem.with_suffix(".json"))
    graph = found.graph()
    return [step.measured_call(graph) for step in found.steps]


def measured_apart(plans: Sequence[Sequence[Call]], timings: Sequence[Timings], measurer: Measurer) -> Timings:
    """Measure once what some plan runs and some tuning has not timed, each such call alone."""
    calls = {call.key: call for plan in plans for call in plan}
    lacking = [[call] for key, call in calls.items() if any(_us(known, key) is None for known in timings)]
    return {call.key: measurement for call, measurement in measurer.measure(lacking)}


def regrets(plans: Sequence[Sequence[Call]], timings: Sequence[Timings], others: Timings) -> list[list[float]]:
    """Return by what share each plan takes longer, by each tuning's timings, than that tuning's own plan.

    Args:
        others: timings of calls that some tuning has not timed.

    Raises:
        TuningError: a tuning's plan runs a call that the tuning has not timed.
    """
    for number, (plan, known) in enumerate(zip(plans, timings, strict=True), start=1):
        for call in plan:
            if _us(known, call.key) is None:
                raise TuningError(
                    f"plan {number} runs {call.candidate.kernel} {call.key}, which its tuning did not time"
                )
    totals = [
        [sum(_us(known, call.key) or _us(others, call.key) or float("inf") for call in plan) for known in timings]
        for plan in plans
    ]
    return [[total / totals[place][place] - 1 for place, total in enumerate(row)] for row in totals]


def _us(known: Timings, key: str) -> float | None:
    return known[key].median_us if key in known else None


def rates(calls: Iterable[Call], measurer: Measurer, limit_s: float) -> dict[str, dict[str, float]]:
    """Return, by library, how many calls were set up, verified and raced, and in how many seconds.

    Calls of one kernel on the same operands race; what compiles was compiled before.
    """
    races: dict[str, dict[tuple[str, str], list[Call]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        library = call.candidate.kernel.split("_")[0]
        if sum(map(len, races[library].values())) < CALLS_MAX:
            races[library][call.candidate.kernel, call.subgraph.signature].append(call)
    ends_at = time.monotonic() + limit_s
    found: dict[str, dict[str, float]] = {}
    for library, chosen in sorted(races.items()):
        list(measurer.prepare([call for race in chosen.values() for call in race]))
        began = time.perf_counter()
        count = 0
        for race in chosen.values():
            if time.monotonic() < ends_at:
                count += sum(1 for _ in measurer.measure([race]))
        if count:
            found[library] = {"calls": count, "seconds": time.perf_counter() - began}
    return found


def page(found: Mapping[str, Any]) -> str:
    """Return the page: what each tuning took, calls a second by library, and the regret of each plan."""
    about, runs = found["about"], list(enumerate(found["runs"], start=1))
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    fine = [(number, run) for number, run in runs if "failure" not in run]
    heads = ("tuning", "seconds", *STAGES, "calls", "failed", "calls / s", "predicted, us")
    lines = [
        "# Tuning from an empty database",
        "",
        f"{about['model']} {about['dtype']}, {about['device']}, {versions}, {about['date']}, commit {about['commit']}. "
        f"`{about['command']}`",
        "",
        *table(heads, (_row(number, run) for number, run in fine)),
        "",
        "Database and cache of compiled kernels are empty at first. `search`: sampled cells, compiled and raced. "
        "`compile`: while nothing that was compiled was left to be timed.",
    ]
    lines += [f"\nTuning {number} failed: {run['failure']}." for number, run in runs if "failure" in run]
    if found.get("known"):
        lines += [
            "",
            "Once more, each with an empty cache of compiled kernels, and with the time of the whole plan beside the "
            "times of its kernels. *Older driver*: all of it was measured before, but not under this driver.",
            "",
            *table(
                ("shape", "known before", "seconds", "calls", "predicted, us"),
                (_known_row(each) for each in found["known"]),
            ),
        ]
    if found["rates"]:
        rows = (
            (library, f"{rate['calls']:.0f}", f"{rate['seconds']:.1f}", f"{rate['calls'] / rate['seconds']:.0f}")
            for library, rate in found["rates"].items()
        )
        lines += [
            "",
            "Calls of each library, set up, verified and raced once more:",
            "",
            *table(("library", "calls", "seconds", "calls / s"), rows),
        ]
    if len(fine) > 1:
        shares = ([f"{share:.2%}" for share in row] for row in found["regrets"])
        lines += [
            "",
            f"Regret: by what share a plan takes longer, by a tuning's timings, than that tuning's own plan. "
            f"{found['measured_apart']} calls of plans that not every tuning had timed were measured once more.",
            "",
            *table(
                ("plan of tuning", *(f"by timings of {number}" for number, _ in fine)),
                ((str(number), *row) for (number, _), row in zip(fine, shares, strict=True)),
            ),
        ]
    return "\n".join(lines) + "\n"


def _row(number: int, run: Run) -> tuple[str, ...]:
    return (
        str(number),
        f"{run['seconds']:.1f}",
        *(f"{run['seconds_by_stage'].get(stage, 0.0):.1f}" for stage in STAGES),
        f"{run['calls']:,}",
        str(run["failed"]),
        f"{run['calls_per_s']:.1f}",
        f"{run['predicted_us']:,.1f}",
    )


def _known_row(run: Run) -> tuple[str, ...]:
    shape = ", ".join(f"{axis} {extent}" for axis, extent in run["extents"].items()) or "the model's own"
    if "failure" in run:
        return shape, run["before"], f"{run['seconds']:.1f}", "", run["failure"]
    return shape, run["before"], f"{run['seconds']:.1f}", f"{run['calls']:,}", f"{run['predicted_us']:,.1f}"


def fresh_calls(timings: Sequence[Mapping[Call, Measurement]]) -> list[Call]:
    """Return the calls that worked in some tuning, those of library kernels first, calls of one subgraph together.

    Subgraphs have an order that does not depend on which was measured first.
    """
    worked = {call.key: call for known in timings for call, m in known.items() if m.status == "ok"}
    return sorted(
        worked.values(),
        key=lambda call: (KERNELS[call.candidate.kernel].compiles, digest(call.subgraph.signature), call.key),
    )
