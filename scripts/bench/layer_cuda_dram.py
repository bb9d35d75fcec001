"""Bytes that training steps move through DRAM, as Nsight Compute counts them.

All sides of all cases run in one child process under `ncu`. Each is warmed up; then a training step is counted kernel
by kernel in one pass, with clocks and caches as they are, so that nothing runs twice. A kernel finds in the
second-level cache what the last ones left there, but no kernels overlap. What it leaves dirty there is written during
a later one.
Copies and fills that the driver makes are no kernels, and are not counted. The tuned step reads x and its output's
gradient where they are, as it does in the captured step that is timed; what it copies all the same, kernels copy here.
"""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts.bench.all_peers import EAGER  # noqa: E402
from scripts.bench.profiled_sides import RANGE, STEPS, TUNED, Side  # noqa: E402
from scripts.pages import mib, table  # noqa: E402

LIMIT_S = 420
BELOW_EAGER = 0.2291
"""The share of eager's bytes that the paper's layer saves."""
PLACES = ("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu")
KERNEL, READ, WRITTEN = "Kernel Name", "dram__bytes_read.sum", "dram__bytes_write.sum"
SIDE, STEP = re.compile(rf"{RANGE} (\d+)"), re.compile(rf"{RANGE} \d+ step (\d+)")


class NotCounted(Exception):
    """The profiler did not count; the message says why, in its own words where it has some."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel made DRAM read and write, for a side by its number, and for a step of the plan, if any."""

    side: int
    step: int | None
    read_bytes: float
    written_bytes: float

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


def profiler() -> str | None:
    """Return where `ncu` is: on PATH, or in one of its usual places; None where there is none."""
    elsewhere = (str(file) for place in PLACES for file in sorted(Path("/").glob(place), reverse=True))
    return shutil.which("ncu") or next(elsewhere, None)


def counted(sides: Sequence[Side]) -> dict[str, dict[str, Any]]:
    """Count for sides of cases, all in one child process.

    Returns:
        By case: "sides": bytes per training step by side; "steps": bytes by number of the step of the plan; "reason":
        why something is missing, or None.
    """
    found: dict[str, dict[str, Any]] = {side.case: {"sides": {}, "steps": {}, "reason": None} for side in sides}
    ncu = profiler()
    try:
        if ncu is None:
            raise NotCounted("ncu, Nsight Compute's command line, was not found")
        traffic, failed = run_counted(ncu, sides)
    except NotCounted as error:
        return {case: row | {"reason": str(error)} for case, row in found.items()}
    for number, side in enumerate(sides):
        kernels = [kernel for kernel in traffic if kernel.side == number]
        row = found[side.case]
        if number in failed or not kernels:
            said = f"{side.name}: {failed.get(number, 'no kernels')}"
            row["reason"] = said if row["reason"] is None else f"{row['reason']}; {said}"
            continue
        row["sides"][side.name] = {
            "read_bytes": sum(kernel.read_bytes for kernel in kernels) / STEPS,
            "written_bytes": sum(kernel.written_bytes for kernel in kernels) / STEPS,
        }
        if side.name == TUNED:
            row["steps"] = by_step(kernels, STEPS)
    return found


def by_step(kernels: Iterable[Traffic], count: int) -> dict[int, float]:
    """Return the bytes that each step of the plan moves, by its number, of kernels that ran for `count` of each."""
    found: dict[int, float] = {}
    for kernel in kernels:
        if kernel.step is not None:
            found[kernel.step] = found.get(kernel.step, 0.0) + kernel.moved_bytes / count
    return found


def run_counted(ncu: str, sides: Sequence[Side]) -> tuple[list[Traffic], dict[int, str]]:
    """Run sides in a child process under the profiler.

    Returns:
        What each kernel of `STEPS` training steps moved, and why sides failed, by number.

    Raises:
        NotCounted: the profiler failed, or the whole process.
    """
    with TemporaryDirectory() as folder:
        log, wanted, said = (Path(folder, name) for name in ("log.csv", "sides.json", "failed.json"))
        wanted.write_text(json.dumps([vars(side) for side in sides]))
        child = [sys.executable, "-m", "scripts.bench.profiled_sides", str(wanted), str(said)]
        status, output, errors = ran([*command(ncu, log), *child])
        text = log.read_text() if log.exists() else ""
        failed = json.loads(said.read_text()) if said.exists() else {}
    print("\n".join(line for line in output.splitlines() if line.startswith("  ")), flush=True)  # seconds of sides
    complained = complaint("\n".join((text, output, errors)))
    if complained is not None or status != 0:
        words = errors.strip().splitlines() or [f"ncu ended with {status}"]
        raise NotCounted(complained or words[-1])
    return parsed(text), {int(number): reason for number, reason in failed.items()}


def ran(arguments: list[str]) -> tuple[int, str, str]:
    """Return status, output and errors of a program; past the limit it is ended, with what it started.

    Raises:
        NotCounted: it took too long, or could not be started.
    """
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no processes that outlive the child
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
    except OSError as error:
        raise NotCounted(f"{arguments[0]} could not be started: {error}") from error
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise NotCounted(f"it took more than {LIMIT_S} s") from error
    return process.returncode, output, errors


def command(ncu: str, log: Path) -> list[str]:
    """Return how the profiler is called, up to the program's own command line."""
    return [
        ncu, "--profile-from-start", "off", "--replay-mode", "kernel", "--clock-control", "none", "--cache-control",
        "none", "--metrics", f"{READ},{WRITTEN}", "--csv", "--page", "raw", "--print-units", "base", "--nvtx",
        "--print-nvtx-rename", "kernel", "--target-processes", "application-only", "--log-file", str(log),
    ]  # fmt: skip


def complaint(text: str) -> str | None:
    """Return the first error in what the profiler printed, None without any."""
    errors = (line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR=="))
    return next(errors, None)


def parsed(text: str) -> list[Traffic]:
    """Return what each kernel in the profiler's log moved; kernels outside of all sides are left out.

    Args:
        text: lines of its own, then CSV: a row of names, a row of units, a row per kernel. Ranges in which a kernel ran
            are in a column of their own, and before its name.

    Raises:
        NotCounted: there are no kernels, or their units are not bytes.
    """
    rows = [*csv.reader(line for line in text.splitlines() if line.startswith('"'))]
    if len(rows) < 3 or not {KERNEL, READ, WRITTEN} <= {*rows[0]}:
        raise NotCounted("the profiler's log has no kernels")
    names, units, *kernels = rows
    read, written = (names.index(column) for column in (READ, WRITTEN))
    if units[read] != "byte" or units[written] != "byte":
        raise NotCounted(f"the profiler counted in {units[read]} and {units[written]}, not in byte")
    found = []
    for row in kernels:
        ranges = " ".join(row)
        side, step = SIDE.search(ranges), STEP.search(ranges)
        if side:
            moved = (float(row[column].replace(",", "")) for column in (read, written))
            found.append(Traffic(int(side[1]), int(step[1]) if step else None, *moved))
    return found


def totals_of(sides: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {name: part["read_bytes"] + part["written_bytes"] for name, part in sides.items()}


def shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Return by side how many fewer bytes the tuned one moves, as a share of the side's."""
    if TUNED not in totals:
        return {}
    return {name: 1 - totals[TUNED] / total for name, total in totals.items() if name != TUNED}


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the part of a page on what went through DRAM, or on why nobody counted it."""
    missing = [] if found["reason"] is None else [f"Not all bytes through DRAM were counted: {found['reason']}."]
    sides = found["sides"]
    if not sides:
        return missing
    totals = totals_of(sides)
    said = [
        "Bytes through DRAM per training step, MiB, as Nsight Compute counts them, kernel by kernel, without CUDA "
        "graphs. The tuned step reads x and its output's gradient where they are, as in the captured step; what it "
        "copies is counted as kernels, and other copies and fills by the driver are left out.",
        "",
        *table(
            ("side", "read", "written", "together"),
            ((n, mib(part["read_bytes"]), mib(part["written_bytes"]), mib(totals[n])) for n, part in sides.items()),
        ),
    ]
    for name, share in shares(totals).items():
        goal = BELOW_EAGER if name == EAGER else 0.0
        verdict = "reached" if share >= goal else "missed"
        words = f"{abs(share):.2%} {'fewer' if share >= 0 else 'more'} bytes"
        said += ["", f"Tuned against {name}: {words}; at least {goal:.2%} fewer is the goal: {verdict}."]
    return [*said, "", *missing] if missing else said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "plans", type=Path, nargs="?", help="as scripts/bench_layer_cuda writes them: bench_layer_cuda_plans.json"
    )
    parser.add_argument("--case", action="append", help="of the file; repeatable [all]")
    parser.add_argument("--side", action="append", help="of each case; repeatable [tuned, eager and its fastest peer]")
    parser.add_argument("--output", type=Path, help="write what is counted as JSON")
    arguments = parser.parse_args()
    if arguments.plans is None:
        parser.error("give the file of plans")
    plans = json.loads(arguments.plans.read_text())
    unknown = [case for case in arguments.case or () if case not in plans]
    if unknown:
        parser.error(f"no plan for {' and '.join(unknown)}: {arguments.plans} has {', '.join(plans)}")
    chosen = {case: plan for case, plan in plans.items() if arguments.case is None or case in arguments.case}
    found = counted_plans(chosen, arguments.side)
    for case, row in found.items():
        print("\n".join([f"## {case}", "", *lines(row), ""]))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def counted_plans(
    plans: Mapping[str, Mapping[str, Any]], names: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Count for cases by name, each with its "layer", "configuration" and fastest "peer".

    Args:
        names: of sides; None for the tuned, the eager one and the peer.
    """
    with TemporaryDirectory() as folder:
        sides = []
        for case, plan in plans.items():
            file = Path(folder, f"{case}.json")
            file.write_text(json.dumps(plan["configuration"]))
            own = [TUNED, EAGER, *([plan["peer"]] if plan.get("peer") else [])]
            sides += [Side(case, name, plan["layer"], str(file)) for name in names or dict.fromkeys(own)]
        return counted(sides)


if __name__ == "__main__":
    main()
