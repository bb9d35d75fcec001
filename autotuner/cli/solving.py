"""`autotuner solve`: with what is measured already, or a saved problem."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotuner.cli.options import (
    Budget,
    DatabaseOption,
    Device,
    Dtype,
    Extent,
    Json,
    Option,
    Output,
    Reference,
    Threads,
    given_bytes,
    given_model,
)
from autotuner.cli.outputs import check_output
from autotuner.cli.printing import print_configuration, print_solution
from autotuner.errors import InputError, ProblemError
from autotuner.files import write

if TYPE_CHECKING:
    from autotuner.solve.problem import Problem, Solution

commands = typer.Typer()


@commands.command()
def solve(
    model: Reference,
    solver: Annotated[str, typer.Option(help="exact, or shortest_path (the paper's strategy).")] = "exact",
    budget: Budget = None,
    output: Output = None,
    problem: Annotated[Path | None, typer.Option(help="Write the problem as JSON here.")] = None,
    extent: Extent = None,
    option: Option = None,
    dtype: Dtype = None,
    database: DatabaseOption = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Solve with what the database holds already, measuring nothing; or solve a saved problem (a .json file).

    A budget of a saved problem is for what it holds between forward and backward; of a model, for the simulated peak.
    """
    from autotuner.solve import SOLVERS

    if solver not in SOLVERS:
        raise InputError(f"no solver {solver!r}; known: {', '.join(SOLVERS)}")
    if solver != "exact" and budget is not None:
        raise InputError(f"--solver {solver} with a budget: only exact solves this")
    budget_bytes = given_bytes(budget)
    if model.endswith(".json"):
        _refuse_for_problem({"--output": output, "--problem": problem, "--extent": extent, "--option": option,
                             "--dtype": dtype, "--database": database, "--threads": threads})  # fmt: skip
        print_solution(_solved(_read(Path(model)), solver, budget_bytes), as_json=as_json)
        return
    from autotuner import tuner
    from autotuner.database import open_database
    from autotuner.ir.autodiff import training_graph
    from autotuner.measure import policy_for, rotate_bytes
    from autotuner.measure.devices import environment
    from autotuner.plan.configuration import save_configuration
    from autotuner.settings import Settings
    from autotuner.solve.problem.formulate import formulate
    from autotuner.space import build_space, space_file

    settings = Settings.from_environment()
    stored = database or settings.database_url
    check_output(output, model, stored)
    check_output(problem, model, stored, output)
    chosen = given_model(model, extent, option, dtype)
    graph = training_graph(chosen.graph())
    threads = threads if threads is not None else settings.threads
    here = environment(device, threads, policy_for(device, threads, rotate_bytes(graph, device)).facts())
    saving = budget is not None
    with open_database(stored, make=False) as opened:
        whole = build_space(graph, space_file(device), saving=saving)
        whole = tuner.with_known_calls(whole, opened, here.key)
        known = opened.find(here.key, tuple(whole.calls))
        noise_floor = opened.fact(here.key, tuner.NOISE_FLOOR) if known else None
    costs = {key: m.median_us for key, m in known.items() if m.median_us is not None}
    if problem is not None:
        write(problem, json.dumps(formulate(whole, costs, saving=saving).problem.to_json()))
    failed = sum(measurement.status != "ok" for measurement in known.values())
    counts = {"calls": len(whole.calls), "measured": 0, "reused": len(known), "failed": failed}
    counts |= tuner.cell_counts(whole, known)
    configuration = tuner.build_configuration(
        chosen, whole, known, here, counts, solver=solver, noise_floor=noise_floor, budget_bytes=budget_bytes
    )
    if output is not None:
        save_configuration(configuration, output)
    print_configuration(configuration, as_json=as_json)


def _refuse_for_problem(options: Mapping[str, object]) -> None:
    """Refuse options that are for a model: a saved problem has no names, extents or forms of its own."""
    given = [flag for flag, value in options.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} with a saved problem: it goes with a model, such as bert-encoder:tiny")


def _solved(problem: "Problem", solver: str, budget_bytes: int | None) -> "Solution":
    from autotuner.solve import SOLVERS, budgeted

    return SOLVERS[solver](problem) if budget_bytes is None else budgeted(problem, budget_bytes)


def _read(path: Path) -> "Problem":
    from autotuner.solve.problem import Problem

    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"{path}: this is no problem, it is not JSON ({error})") from error
    return Problem.from_json(value)
