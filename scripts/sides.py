"""The sides of a benchmark of solvers: each solves in a process of its own, and what they say must agree."""

import multiprocessing
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from autotuner.measure.devices.cpu import cpu_name
from autotuner.solve.problem import Problem
from scripts.bench.integer_program import integer_program
from scripts.pages import commit

FORK = multiprocessing.get_context("fork")
HIGHS = "HiGHS"
NO_ANSWER = "no answer"
# Rounding in sums of thousands of costs, and HiGHS's own tolerance, stay below this share of a total.
TOLERANCE = 1e-6


def in_child(work: Callable[[], Any], patience_s: float | None = None) -> Any:
    """Return what some work returns in a process of its own, or in a word why there is nothing.

    Raises:
        ChildProcessError: the work raised something; its traceback is printed already.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send, args=(sender, work))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(patience_s) else NO_ANSWER
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGKILL:  # that comes from a kernel out of memory
            raise ChildProcessError(f"a child process ended with code {process.exitcode}") from None
        return "killed"
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send(sender: Connection, work: Callable[[], Any]) -> None:
    sender.send(work())
    sender.close()


def clocked(solve: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a side says, with its seconds and the peak of memory above what the process had before."""
    before = _peak_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    found = solve()
    times = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu_began}
    return {**times, "peak_bytes": _peak_bytes() - before, **found}  # seconds that a side took itself replace these


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all runs of a side say: medians of seconds, the largest peak."""
    failed = next((run for run in runs if "seconds" not in run), None)
    if failed:
        return failed
    totals = {run.get("total_us") for run in runs}
    if len(totals) > 1:
        raise AssertionError(f"runs of one side on one problem differ: {totals}")
    seconds = [run["seconds"] for run in runs]
    return runs[0] | {
        "seconds": median(seconds),
        "seconds_of_runs": seconds,
        "cpu_seconds": median(run["cpu_seconds"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def highs(problem: Problem, limit_s: float, budget_bytes: int | None = None) -> dict[str, Any]:
    """Solve as an integer program: the seconds are HiGHS's own, without those of writing the program down."""
    began = time.perf_counter()
    program = integer_program(problem, budget_bytes)
    shape = (len(program.right), len(program.costs))
    matrix = coo_array((program.values, (program.equations, program.places)), shape=shape).tocsc()
    ready = time.perf_counter()
    found = milp(
        program.costs,
        integrality=np.arange(len(program.costs)) < program.state_count,
        bounds=Bounds(0.0, program.upper),
        constraints=LinearConstraint(matrix, program.right, program.right),
        options={"time_limit": limit_s, "mip_rel_gap": 0.0},
    )
    result: dict[str, Any] = {"seconds": time.perf_counter() - ready, "writing_seconds": ready - began}
    if found.status not in (0, 1):
        raise AssertionError(f"{HIGHS} does not solve a problem that has solutions: {found.message}")
    result |= {"status": "time limit" if found.status else "optimal", "equations": shape[0], "columns": shape[1]}
    if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
        result["bound_us"] = float(found.mip_dual_bound) + program.constant
    if found.x is not None:
        states = program.chosen(found.x)
        needed = problem.held_bytes(states)
        if budget_bytes is not None and needed > budget_bytes:
            raise AssertionError(f"{HIGHS} has a plan of {needed} bytes, the budget is {budget_bytes}")
        result["total_us"] = problem.cost_us(states)
    return result


def check(sides: dict[str, dict[str, Any]]) -> str | None:
    """Say which totals and bounds contradict each other, or None."""
    bounds = {side: result["bound_us"] for side, result in sides.items() if result.get("bound_us") is not None}
    totals = {side: result["total_us"] for side, result in sides.items() if "total_us" in result}
    for side, result in sides.items():
        slack = TOLERANCE * (1 + totals.get(side, 0.0))
        if result["status"] == "optimal" and bounds.get(side, 0.0) < totals[side] - slack:
            return f"{side} calls {totals[side]} us optimal, its bound is {bounds.get(side)} us"
    for (side, bound), (other, total) in product(bounds.items(), totals.items()):
        if bound > total + TOLERANCE * (1 + total):
            return f"{side} proves that {bound} us are the least, {other} found {total} us"
    return None


def about(script: str) -> dict[str, Any]:
    """Return where, when and how a benchmark is run."""
    return {
        "machine": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": " ".join([f"scripts/{script}", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": version("scipy")},
    }


def heading(title: str, about: dict[str, Any]) -> list[str]:
    """Return the first lines of a benchmark's page."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return [
        f"# {title}",
        "",
        f"{about['machine']}, {about['cores']} cores, {versions}, {about['date']}, commit {about['commit']}. "
        f"Load before: {about['load_before']:.1f}. `{about['command']}`",
        "",
    ]


def against(side: dict[str, Any], exact: dict[str, Any]) -> str:
    """Return a total and how far it is above the exact one; for a side stopped by its limit, its bound and gap too."""
    if "total_us" not in side:
        text = "no plan" if side["status"] == "time limit" else str(side["status"])
    else:
        rise = side["total_us"] / exact["total_us"] - 1 if "total_us" in exact else None
        relation = "" if rise is None else " (same)" if abs(rise) <= TOLERANCE else f" ({rise:+.1%})"
        text = f"{side['total_us']:,.1f}{relation}"
    if side["status"] == "time limit" and "bound_us" in side:
        text += f"; bound {side['bound_us']:,.1f}"
        text += f", gap {1 - side['bound_us'] / side['total_us']:.1%} of the total" if "total_us" in side else ""
    return text
