"""The sides of a benchmark of solvers: each solves in a process of its own, and what they say must agree."""

import multiprocessing
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from math import inf
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from autotuner.measure.devices.cpu import cpu_name
from autotuner.solve.arc_consistency import arc_consistent
from autotuner.solve.budgeted import budget_of
from autotuner.solve.integer_program import IntegerProgram, integer_program, solved
from autotuner.solve.lagrangian_dual import lagrangian_dual
from autotuner.solve.lagrangian_relaxation import encoded
from autotuner.solve.limits import SolverLimits
from autotuner.solve.problem import Problem
from autotuner.solve.tables import encode
from scripts.bench.synthetic import UNIT_US
from scripts.pages import commit

FORK = multiprocessing.get_context("fork")
HIGHS = "HiGHS"
CP_SAT = "CP-SAT"
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
    """Solve the compact program with HiGHS."""
    ends_at = time.perf_counter() + limit_s
    program, named = compact(problem, budget_bytes)
    written = time.perf_counter()
    found = solved(program, ends_at - written)
    return {
        "status": "optimal" if found.is_optimal else "time limit",
        "solving_seconds": time.perf_counter() - written,
        **_told(problem, program, budget_bytes, None if found.codes is None else named(found.codes), found.bound_us),
    }


def cp_sat(problem: Problem, limit_s: float, budget_bytes: int | None = None) -> dict[str, Any]:
    """Solve the compact program with CP-SAT, on one core; costs are rounded to whole units of 1/64 us."""
    try:
        from ortools.sat.python import cp_model  # type: ignore[import-not-found]
    except ImportError:
        return {"status": "skipped", "why": "ortools is not installed"}
    ends_at = time.perf_counter() + limit_s
    program, named = compact(problem, budget_bytes)
    model = cp_model.CpModel()
    columns = [model.new_bool_var("") for _ in program.costs]
    rows = program.matrix.tocsr()
    for number, (lowest, highest) in enumerate(zip(program.lowest, program.highest, strict=True)):
        entries = slice(rows.indptr[number], rows.indptr[number + 1])
        total = cp_model.LinearExpr.weighted_sum(
            [columns[place] for place in rows.indices[entries]], [int(value) for value in rows.data[entries]]
        )
        if lowest == highest:
            model.add(total == int(lowest))
        else:
            model.add(total <= int(highest))
    model.minimize(cp_model.LinearExpr.weighted_sum(columns, [round(cost / UNIT_US) for cost in program.costs]))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = 0.0
    written = time.perf_counter()
    solver.parameters.max_time_in_seconds = max(0.0, ends_at - written)
    status = solver.solve(model)
    states = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        states = named(program.codes(np.array([float(solver.boolean_value(column)) for column in columns])))
    # A cost is rounded by half a unit at most, and each variable has one.
    rounding_us = UNIT_US / 2 * len(program.variables) * float((program.costs % UNIT_US).any())
    bound_us = program.constant + solver.best_objective_bound * UNIT_US - rounding_us
    return {
        "status": "optimal" if status == cp_model.OPTIMAL and not rounding_us else "time limit",
        "solving_seconds": time.perf_counter() - written,
        **_told(problem, program, budget_bytes, states, bound_us if np.isfinite(bound_us) else -np.inf),
    }


def compact(
    problem: Problem, budget_bytes: int | None
) -> tuple[IntegerProgram, Callable[[Mapping[int, int]], dict[str, str]]]:
    """Return a problem as a compact integer program, and what names the states of a plan of it."""
    if budget_bytes is None:
        network = encode(problem)
        return integer_program(arc_consistent(network), network.state_counts), network.named
    found = encoded(problem)
    start = found.start
    return integer_program(start.left, start.state_counts, budget_of(start, budget_bytes)), found.states


def least_bytes(problem: Problem, limit_s: float = inf) -> int:
    """Return the fewest bytes that a plan was found to hold."""
    plan, _ = lagrangian_dual(problem, SolverLimits(ends_at=time.monotonic() + limit_s)).leanest()
    return plan.held_bytes


def _told(
    problem: Problem,
    program: IntegerProgram,
    budget_bytes: int | None,
    states: dict[str, str] | None,
    bound_us: float,
) -> dict[str, Any]:
    """Return the size of a program, and total and bound as far as they are known."""
    told: dict[str, Any] = {"equations": len(program.lowest), "columns": len(program.costs)}
    if np.isfinite(bound_us):
        told["bound_us"] = bound_us
    if states is not None:
        needed = problem.held_bytes(states)
        if budget_bytes is not None and needed > budget_bytes:
            raise AssertionError(f"a plan of {needed} bytes was found, the budget is {budget_bytes}")
        told["total_us"] = problem.cost_us(states)
    return told


def check(sides: dict[str, dict[str, Any]]) -> str | None:
    """Say which totals and bounds contradict each other, or None."""
    bounds = {side: result["bound_us"] for side, result in sides.items() if result.get("bound_us") is not None}
    totals = {side: result["total_us"] for side, result in sides.items() if "total_us" in result}
    for side, result in sides.items():
        slack = 2 * TOLERANCE * (1 + totals.get(side, 0.0))  # HiGHS's bounds are rounded down by that much once more
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
