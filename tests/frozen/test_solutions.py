"""Plans of the recorded sweeps, by every solver, and what tuning by need asks to be measured.

See `tests.frozen.golden` for how a golden value is written anew.
"""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from autotuner.database import open_database
from autotuner.plan.request import Request
from autotuner.settings import TuneOptions
from autotuner.solve import SOLVERS, budgeted
from autotuner.solve.problem import Solution
from autotuner.solve.problem.formulate import Formulation, formulate
from autotuner.tuner import TuningPolicy, tune
from scripts.sides import least_bytes
from tests.frozen.golden import RECORDINGS, TINY, assert_same, golden, write_golden
from tests.tuner.asking import Asking

NAMES = ("tiny", "large")
METHODS = ("exact", "shortest_path", "greedy")
SHARES = (0.25, 0.6)
"""Of what the fastest plan holds more than the plan that holds least."""
GAPS = (0.5,)
LOOKS_ALWAYS = TuningPolicy(few_calls=0, solutions=0, explaining_s=1000.0)
"""Measures lazily and explains whatever that costs: else the machine's speed decides."""


def told(formulation: Formulation, solution: Solution) -> dict[str, Any]:
    """Return what a solution takes, the kernel and forms of each operator, and its conversions."""
    operators = {
        name: [choice.candidate.kernel, list(choice.forms)]
        for choice in formulation.chosen(solution)
        for name in choice.cover.operators
    }
    again = {name: [c.candidate.kernel, list(c.forms)] for name, c in formulation.repeated(solution).items()}
    converted = sorted([c.tensor, c.source, c.target, c.candidate.kernel] for c in formulation.converted(solution))
    return {
        "total_us": solution.total_us,
        "operators": operators,
        "again": again,
        "converted": converted,
        "calls": sorted(formulation.calls(solution)),
    }


def solved(name: str) -> dict[str, Any]:
    recording = RECORDINGS[name]
    formulation = formulate(recording.space()).priced(recording.costs_us)
    return {method: told(formulation, SOLVERS[method](formulation.problem)) for method in METHODS}


def within_budgets() -> dict[str, Any]:
    formulation = formulate(TINY.space(), saving=True).priced(TINY.costs_us)
    problem = formulation.problem
    most = problem.held_bytes(SOLVERS["exact"](problem).states)
    least = least_bytes(problem)
    found = {}
    for share in SHARES:
        budget_bytes = int(least + share * (most - least))
        solution = budgeted(problem, budget_bytes)
        held_bytes = problem.held_bytes(solution.states)
        assert held_bytes <= budget_bytes
        plan = told(formulation, solution)
        found[str(share)] = plan | {"budget_bytes": budget_bytes, "held_bytes": held_bytes}
    return found


def asked(gap: float, file: Path) -> dict[str, Any]:
    """Return what tuning asks to be measured where it looks after every race at what could still matter."""
    asking = Asking(TINY.measurements, TINY.environment, ceilings=TINY.ceilings)
    request = Request(TINY.model, options=TuneOptions(gap=gap, end_to_end=False))
    with open_database(file) as database:
        found = tune(request, TINY.file, database, asking, policy=LOOKS_ALWAYS).configuration
    return {
        "asked": len(asking.asked),
        "calls": hashlib.sha256("\n".join(sorted(asking.asked)).encode()).hexdigest(),
        "confirmed": len(asking.confirmed),
        "predicted_us": found.certificate.predicted_us,
        "lower_bound_us": found.certificate.lower_bound_us,
        "counts": dict(found.counts),
    }


def write() -> None:
    """Write the golden values of this module anew."""
    for name in NAMES:
        write_golden(f"solutions_{name}.json", solved(name))
    write_golden("solutions_budget.json", within_budgets())
    with TemporaryDirectory() as folder:
        write_golden("asked.json", {str(gap): asked(gap, Path(folder) / f"{gap}.sqlite") for gap in GAPS})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_solvers_choose_what_they_chose(name: str) -> None:
    assert_same(solved(name), golden(f"solutions_{name}.json"))


@pytest.mark.slow
def test_within_a_budget_they_choose_what_they_chose() -> None:
    assert_same(within_budgets(), golden("solutions_budget.json"))


@pytest.mark.slow
@pytest.mark.parametrize("gap", GAPS)
def test_tuning_asks_for_what_it_asked_for(gap: float, tmp_path: Path) -> None:
    assert_same(asked(gap, tmp_path / "lazy.sqlite"), golden("asked.json")[str(gap)])
