"""Commands on this machine: tune, and what goes before and after it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from autotuner.cli.options import (
    Again,
    ConfigurationPath,
    DatabaseOption,
    Device,
    Dtype,
    EndToEnd,
    Extent,
    Gap,
    Json,
    MaxMeasurements,
    MaxSeconds,
    Option,
    Output,
    Reference,
    Retry,
    Threads,
    given_model,
)
from autotuner.cli.printing import (
    Shown,
    emit,
    err,
    out,
    print_check,
    print_configuration,
    print_devices,
    print_kernels,
    print_measured,
    print_models,
    print_solution,
    write,
)
from autotuner.errors import CheckError, InputError

commands = typer.Typer()


@commands.command()
def tune(
    model: Reference,
    output: Output = None,
    extent: Extent = None,
    option: Option = None,
    dtype: Dtype = None,
    database: DatabaseOption = None,
    device: Device = "cpu",
    threads: Threads = None,
    space: Annotated[Path | None, typer.Option(help="A search space file. [default: that of the device]")] = None,
    again: Again = False,
    retry: Retry = False,
    end_to_end: EndToEnd = True,
    gap: Gap = None,
    max_seconds: MaxSeconds = None,
    max_measurements: MaxMeasurements = None,
    as_json: Json = False,
) -> None:
    """Measure what the database does not know yet, solve, and print the best configuration.

    Interrupt at any moment: what was measured stays, and the next run goes on from there.
    """
    from autotuner import api

    chosen = given_model(model, extent, option, dtype)
    with _interruptible(), Shown(quiet=as_json) as show:
        found = api.tune(
            chosen, database=database, device=device, threads=threads, space=space, watch=show, again=again,
            retry=retry, end_to_end=end_to_end, gap=gap, limits=api.Limits(max_seconds, max_measurements),
        )  # fmt: skip
    if output is not None:
        api.save_configuration(found, output)
    print_configuration(found, as_json=as_json)
    if output is not None and not as_json:
        out.print(f"Configuration written to {output}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Say what an interrupt means for what was measured."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted; what was measured is kept, the same command goes on from there")
        raise typer.Exit(130) from None


@commands.command()
def solve(
    model: Reference,
    solver: Annotated[str, typer.Option(help="exact, or shortest_path (the paper's strategy).")] = "exact",
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
    """Solve with what the database holds already, measuring nothing; or solve a saved problem (a .json file)."""
    from autotuner.solvers import SOLVERS

    if solver not in SOLVERS:
        raise InputError(f"no solver {solver!r}; known: {', '.join(SOLVERS)}")
    if model.endswith(".json"):
        _solve_problem(Path(model), solver, as_json)
        return
    from autotuner import tuner
    from autotuner.configuration import save_configuration
    from autotuner.database import open_database
    from autotuner.device import environment
    from autotuner.graph.autodiff import training_graph
    from autotuner.measure import cpu_policy, rotate_bytes
    from autotuner.problem.formulate import formulate
    from autotuner.settings import Settings
    from autotuner.space import build_space, space_file

    settings = Settings.from_environment()
    chosen = given_model(model, extent, option, dtype)
    threads = threads if threads is not None else settings.threads
    here = environment(device, threads, cpu_policy(threads, rotate_bytes(training_graph(chosen.graph()))).facts())
    with open_database(database or settings.database_url, make=False) as opened:
        whole = build_space(training_graph(chosen.graph()), space_file(device))
        known = opened.find(here.key, tuple(whole.calls))
        noise_floor = opened.fact(here.key, tuner.NOISE_FLOOR) if known else None
    failed = sum(measurement.status != "ok" for measurement in known.values())
    counts = {"calls": len(whole.calls), "measured": 0, "reused": len(known), "failed": failed}
    found = tuner.build_configuration(chosen, whole, known, here, counts, solver=solver, noise_floor=noise_floor)
    if problem is not None:
        costs = {key: m.median_us for key, m in known.items() if m.median_us is not None}
        write(problem, json.dumps(formulate(whole, costs).problem.to_json()))
    if output is not None:
        save_configuration(found, output)
    print_configuration(found, as_json=as_json)


def _solve_problem(path: Path, solver: str, as_json: bool) -> None:
    from autotuner.errors import ProblemError
    from autotuner.problem import Problem
    from autotuner.solvers import SOLVERS

    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ProblemError(f"{path}: this is no problem, it is not JSON ({error})") from error
    print_solution(SOLVERS[solver](Problem.from_json(value)), as_json=as_json)


@commands.command()
def show(path: ConfigurationPath, as_json: Json = False) -> None:
    """Show a configuration: each kernel with its layouts, its time, and the best measured for the same work."""
    from autotuner.configuration import load_configuration

    print_configuration(load_configuration(path), as_json=as_json, steps=True)


@commands.command()
def check(
    path: ConfigurationPath,
    seed: Annotated[int, typer.Option(help="Of inputs, parameters and masks.")] = 0,
    time: Annotated[bool, typer.Option("--time", help="Time it against eager and torch.compile as well.")] = False,
    as_json: Json = False,
) -> None:
    """Run a configuration and compare output and every gradient with the framework's module in float64."""
    from dataclasses import asdict

    from autotuner.configuration import load_configuration
    from autotuner.runtime import check as run
    from autotuner.runtime import time_peers

    configuration = load_configuration(path)
    report = run(configuration, seed)
    measured = time_peers(configuration, 30) if time and report.ok else None
    if as_json:
        value = asdict(report) | {"ok": report.ok}
        emit(value | ({"measured": asdict(measured), "ratios": measured.ratios} if measured else {}))
    else:
        print_check(report)
        if measured:
            print_measured(measured, configuration.certificate.predicted_us)
    if not report.ok:
        raise CheckError(f"{path}: results differ from the framework's by more than the tolerance")


@commands.command()
def devices(as_json: Json = False) -> None:
    """List what can be tuned on this machine."""
    from dataclasses import asdict

    from autotuner.device import devices as found

    if as_json:
        emit([asdict(device) for device in found()])
        return
    print_devices(found())


@commands.command()
def spaces(as_json: Json = False) -> None:
    """List models with their presets and options, and kernels by device type."""
    from autotuner.models import known_models, load_model, search_spaces_dir
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
