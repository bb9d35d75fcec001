"""Commands on this machine: tune, solve with what is measured, and show, check or report configurations."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotuner.cli.console import emit, err, out
from autotuner.cli.fleet import Address, FleetArguments, FleetMeasurerOption, FleetOption, Gpus, given_fleet
from autotuner.cli.options import (
    Budget,
    ConfigurationPath,
    DatabaseOption,
    Device,
    Dtype,
    Extent,
    Json,
    NumericsOption,
    Option,
    Output,
    ProgressOption,
    Reference,
    Threads,
    check_output,
    effort,
    given_model,
    given_progress,
    repetition,
    with_tuning,
)
from autotuner.cli.printing import (
    print_check,
    print_configuration,
    print_devices,
    print_explanation,
    print_kernels,
    print_measured,
    print_models,
    print_solution,
)
from autotuner.cli.progress import Shown
from autotuner.errors import AutotunerError, CheckError, InputError, ProblemError
from autotuner.files import write
from autotuner.ir.numerics import checked_numerics
from autotuner.settings import TuneKeywords, parsed_bytes

if TYPE_CHECKING:
    from autotuner.solve.problem import Problem, Solution

commands = typer.Typer()

INTERRUPTED = "what was measured is kept, the same command goes on from there"


@commands.command()
@with_tuning(repetition, effort)
def tune(
    model: Reference,
    *,
    output: Output = None,
    extent: Extent = None,
    option: Option = None,
    dtype: Dtype = None,
    database: DatabaseOption = None,
    device: Device = "cpu",
    threads: Threads = None,
    space: Annotated[Path | None, typer.Option(help="A search space file.", show_default="that of the device")] = None,
    fleet: FleetOption = False,
    address: Address = None,
    gpus: Gpus = None,
    measurer: FleetMeasurerOption = None,
    measurer_arguments: FleetArguments = None,
    tuning: TuneKeywords,
    progress: ProgressOption = None,
    as_json: Json = False,
) -> None:
    """Measure what the database does not know yet, solve, and print the best configuration.

    Interrupt at any moment: what was measured stays, and the next run goes on from there.
    """
    from autotuner.api import tuning as here
    from autotuner.plan.configuration import save_configuration
    from autotuner.settings import Settings

    check_output(output, model, space, database or Settings.from_environment().database_url)
    chosen = given_model(model, extent, option, dtype)
    over = given_fleet(fleet, address, gpus, device, measurer, measurer_arguments)
    show = Shown(given_progress(progress, as_json=as_json), chosen.reference)
    with _ended_early(show), show:
        found = here.tune(
            chosen, database=database, device=device, threads=threads, space=space, watch=show, fleet=over, **tuning
        )
        show.found(found)
    if output is not None:
        save_configuration(found, output)
    print_configuration(found, as_json=as_json)
    if output is not None and not as_json:
        out.print(f"Configuration written to {output}")


@contextmanager
def _ended_early(show: Shown) -> Iterator[None]:
    """Say what an interrupt means for what was measured; tell a program that one or an error ended the run."""
    try:
        yield
    except KeyboardInterrupt:
        if not show.tells(KeyboardInterrupt(INTERRUPTED)):
            err.print(f"interrupted; {INTERRUPTED}")
        raise typer.Exit(130) from None
    except AutotunerError as error:
        if not show.tells(error):
            raise
        raise typer.Exit(error.exit_code) from None


@commands.command()
def show(
    path: ConfigurationPath,
    operator: Annotated[str | None, typer.Option(help="Say why this operator is computed as it is.")] = None,
    tensor: Annotated[str | None, typer.Option(help="Say in which forms this tensor exists, and why.")] = None,
    as_json: Json = False,
) -> None:
    """Show a configuration: each kernel with its layouts and times, and how good the plan is proven to be.

    With --operator, why that one was chosen: what it loses against its own best, and what the best plan with another
    way to compute it would take. With --tensor, the same for the forms of a tensor.
    """
    from autotuner.plan.configuration import load_configuration
    from autotuner.plan.explanation import explain_operator, explain_tensor

    found = load_configuration(path)
    if operator is not None and tensor is not None:
        raise InputError(f"--operator {operator} and --tensor {tensor}: give one of the two")
    if operator is not None:
        print_explanation(explain_operator(found, operator), as_json=as_json)
    elif tensor is not None:
        print_explanation(explain_tensor(found, tensor), as_json=as_json)
    else:
        print_configuration(found, as_json=as_json, steps=True)


@commands.command()
def check(
    path: ConfigurationPath,
    seed: Annotated[int, typer.Option(help="Of inputs, parameters and masks.")] = 0,
    time: Annotated[bool, typer.Option("--time", help="Time it against eager and torch.compile as well.")] = False,
    as_json: Json = False,
) -> None:
    """Run a configuration and compare outputs and every gradient with a reference in float64."""
    from dataclasses import asdict

    from autotuner.plan.configuration import load_configuration
    from autotuner.runtime import check as run
    from autotuner.runtime import time_peers

    configuration = load_configuration(path)
    report = run(configuration, seed)
    measured = time_peers(configuration, 30) if time and report.ok else None
    if as_json:
        value = asdict(report) | {"allowed": report.allowed, "ok": report.ok}
        emit(value | ({"measured": asdict(measured), "ratios": measured.ratios} if measured else {}))
    else:
        print_check(report)
        if measured:
            print_measured(measured, configuration.kernels_us)
    if not report.ok:
        raise CheckError(f"{path}: results differ from the framework's by more than is allowed")


@commands.command()
def devices(as_json: Json = False) -> None:
    """List what can be tuned on this machine."""
    from dataclasses import asdict

    from autotuner.measure.devices import devices as found

    if as_json:
        emit([asdict(device) for device in found()])
        return
    print_devices(found())


@commands.command()
def spaces(as_json: Json = False) -> None:
    """List models with their presets and options, and kernels by device type."""
    from autotuner.ir.models import known_models, load_model, search_spaces_dir
    from autotuner.space import describe, load_space

    definitions = {name: load_model(name).definition for name in known_models()}
    files = {path.stem: load_space(path) for path in sorted((search_spaces_dir() / "kernels").glob("*.yaml"))}
    if as_json:
        emit({
            "models": {name: d.model_dump(mode="json") for name, d in definitions.items()},
            "kernels": {name: describe(file) for name, file in files.items()},
        })  # fmt: skip
        return
    print_models(definitions)
    for name, file in files.items():
        print_kernels(name, describe(file))


@commands.command()
def solve(
    model: Reference,
    *,
    solver: Annotated[str, typer.Option(help="exact, or shortest_path (the paper's strategy).")] = "exact",
    budget: Budget = None,
    numerics: NumericsOption = "exact",
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
    budget_bytes = parsed_bytes(budget, "--budget")
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
    saving, allowed = budget is not None, checked_numerics(numerics)
    with open_database(stored, make=False) as opened:
        whole = build_space(graph, space_file(device), saving=saving, numerics=allowed, vendor=here.vendor)
        whole = tuner.with_known_calls(whole, opened, here.key)
        known = opened.find(here.key, tuple(whole.calls))
        noise_floor = opened.fact(here.key, tuner.NOISE_FLOOR) if known else None
    costs = {key: m.median_us for key, m in known.items() if m.median_us is not None}
    if problem is not None:
        asked = formulate(whole if saving else whole.exact, saving=saving)
        write(problem, json.dumps(asked.priced(costs).problem.to_json()))
    failed = sum(measurement.status != "ok" for measurement in known.values())
    counts = {"calls": len(whole.calls), "measured": 0, "reused": len(known), "failed": failed}
    counts |= tuner.cell_counts(whole, known)
    configuration = tuner.build_configuration(
        chosen, whole, known, here, counts, solver=solver, noise_floor=noise_floor, budget_bytes=budget_bytes,
        numerics=allowed,
    )  # fmt: skip
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
