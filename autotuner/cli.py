"""The command line. Whatever is slow to import is imported by the command that needs it."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from autotuner.errors import AutotunerError, CheckError, InputError, ModelError

if TYPE_CHECKING:
    from autotuner.configuration import Configuration
    from autotuner.tuner import Progress as Walked

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest layout and algorithm for every operator of a transformer's training step, as one consistent "
    "whole, and train with it.\n\nExit codes: 0 done; 1 another error; 2 bad input; 3 no such device; 4 database; "
    "5 no plan possible; 6 measuring failed; 7 check failed; 130 interrupted (what was measured is kept).",
)
out = Console()
err = Console(stderr=True)

COVERED_SETS = {"inductor": "connected sets"}
STAGES = {
    "space": "enumerating",
    "compile": "compiling",
    "measure": "measuring",
    "confirm": "confirming",
    "solve": "solving",
    "done": "done",
}

Reference = Annotated[
    str, typer.Argument(help="Model and preset, e.g. bert-encoder:tiny, or the path of a model file.")
]
Extent = Annotated[list[str] | None, typer.Option("--extent", help="Elements along an axis, e.g. l=256. Repeatable.")]
Option = Annotated[list[str] | None, typer.Option("--option", help="A model option, e.g. activation=relu. Repeatable.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64; by default the model's.")]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", help="URL, or path of an SQLite file. [default: $AUTOTUNER_DATABASE]")
]
Device = Annotated[str, typer.Option(help="Device type to tune for; see `devices`.")]
Threads = Annotated[int | None, typer.Option(help="Threads that a kernel may use. [default: all cores]")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ConfigurationPath = Annotated[Path, typer.Argument(help="A configuration, as `tune --output` writes it.")]


@app.command()
def tune(
    model: Reference,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the configuration here.")] = None,
    extent: Extent = None,
    option: Option = None,
    dtype: Dtype = None,
    database: DatabaseOption = None,
    device: Device = "cpu",
    threads: Threads = None,
    space: Annotated[Path | None, typer.Option(help="A search space file. [default: that of the device]")] = None,
    again: Annotated[bool, typer.Option("--again", help="Solve anew; measurements are reused all the same.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Measure once more what has failed.")] = False,
    end_to_end: Annotated[
        bool, typer.Option(help="Time the result against eager and torch.compile, interleaved.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Measure what the database does not know yet, solve, and print the best configuration.

    Interrupt at any moment: what was measured stays, and the next run goes on from there.
    """
    from autotuner import api

    chosen = _model(model, extent, option, dtype)
    with _interruptible(), Shown(quiet=as_json) as show:
        found = api.tune(
            chosen, database=database, device=device, threads=threads, space=space, watch=show, again=again,
            retry=retry, end_to_end=end_to_end,
        )  # fmt: skip
    if output is not None:
        api.save_configuration(found, output)
    _print(found, as_json)
    if output is not None and not as_json:
        out.print(f"Configuration written to {output}")


@app.command()
def solve(
    model: Reference,
    solver: Annotated[str, typer.Option(help="exact, or shortest_path (the paper's strategy).")] = "exact",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the configuration here.")] = None,
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
    from autotuner.api import rotate_bytes, save_configuration, space_file
    from autotuner.database import open_database
    from autotuner.device import environment
    from autotuner.graph.autodiff import training_graph
    from autotuner.measure import cpu_policy
    from autotuner.problem.formulate import formulate
    from autotuner.settings import Settings
    from autotuner.space import build_space

    settings = Settings.from_environment()
    chosen = _model(model, extent, option, dtype)
    threads = threads if threads is not None else settings.threads
    here = environment(device, threads, cpu_policy(threads, rotate_bytes(chosen)).facts())
    with open_database(database or settings.database_url) as opened:
        whole = build_space(training_graph(chosen.graph()), space_file(device))
        known = opened.find(here.key, tuple(whole.calls))
        noise_floor = opened.fact(here.key, tuner.NOISE_FLOOR) if known else None
    failed = sum(measurement.status != "ok" for measurement in known.values())
    counts = {"calls": len(whole.calls), "measured": 0, "reused": len(known), "failed": failed}
    found = tuner.build_configuration(chosen, whole, known, here, counts, solver=solver, noise_floor=noise_floor)
    if problem is not None:
        costs = {key: m.median_us for key, m in known.items() if m.median_us is not None}
        _write(problem, json.dumps(formulate(whole, costs).problem.to_json()))
    if output is not None:
        save_configuration(found, output)
    _print(found, as_json)


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
    solution = SOLVERS[solver](Problem.from_json(value))
    if as_json:
        _emit({"solver": solution.solver, "total_us": solution.total_us, "lower_bound_us": solution.lower_bound_us,
               "gap": solution.gap, "states": dict(solution.states)})  # fmt: skip
        return
    out.print(
        f"{solution.solver}: {solution.total_us:.1f} us, bound {solution.lower_bound_us:.1f}, gap {solution.gap:.2%}"
    )
    for name, state in solution.states.items():
        out.print(f"  {name}: {state}", markup=False, highlight=False)


@app.command()
def show(path: ConfigurationPath, as_json: Json = False) -> None:
    """Show a configuration: each kernel with its layouts, its time, and the best measured for the same work."""
    from autotuner.configuration import load_configuration

    _print(load_configuration(path), as_json, steps=True)


@app.command()
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
        _emit(value | ({"measured": asdict(measured), "ratios": measured.ratios} if measured else {}))
    else:
        table = Table("result", "largest relative error", "allowed", "", title="against the framework, in float64")
        for name, error in report.errors.items():
            verdict = "ok" if error <= report.tolerance else "[red]WRONG"
            table.add_row(name, f"{error:.1e}", f"{report.tolerance:.1e}", verdict)
        for name, mask in report.masks.items():
            kept = f"keeps {mask.share:.4f}"
            table.add_row(name, kept, f"{mask.expected:.4f} +- {mask.allowed:.4f}", "ok" if mask.ok else "[red]WRONG")
        out.print(table)
        if measured:
            _print_measured(measured, configuration.certificate.predicted_us)
    if not report.ok:
        raise CheckError(f"{path}: results differ from the framework's by more than the tolerance")


@app.command()
def devices(as_json: Json = False) -> None:
    """List what can be tuned on this machine."""
    from dataclasses import asdict

    from autotuner.device import devices as found

    if as_json:
        _emit([asdict(device) for device in found()])
        return
    table = Table("type", "name")
    for device in found():
        table.add_row(device.device_type, device.name)
    out.print(table)


@app.command()
def spaces(as_json: Json = False) -> None:
    """List models with their presets and options, and kernels by device type."""
    from autotuner.models import known_models, load_model, search_spaces_dir
    from autotuner.space import describe, load_space

    definitions = {name: load_model(name).definition for name in known_models()}
    files = {path.stem: load_space(path) for path in sorted((search_spaces_dir() / "kernels").glob("*.yaml"))}
    if as_json:
        _emit({
            "models": {name: d.model_dump(mode="json") for name, d in definitions.items()},
            "kernels": {name: describe(file) for name, file in files.items()},
        })  # fmt: skip
        return
    models = Table("model", "presets", "options", title="models")
    for name, definition in definitions.items():
        presets = "\n".join(f"{p}: {' '.join(f'{a}={n}' for a, n in e.items())}" for p, e in definition.presets.items())
        options = "\n".join(f"{o}={v.default}" for o, v in definition.options.items())
        models.add_row(name, presets, options)
    out.print(models)
    for name, file in files.items():
        kernels = Table(
            Column("kernel", overflow="fold"), "covers", "layouts", "parameters", title=f"kernels on {name}"
        )
        for kernel, entry in describe(file)["kernels"].items():
            params = " ".join(f"{p}={v}" for p, v in entry["params"].items())
            kernels.add_row(
                kernel,
                " + ".join(entry["covers"]) or COVERED_SETS.get(kernel, "siblings, stacked"),
                entry["layouts"],
                params,
            )
        out.print(kernels)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Say what an interrupt means for what was measured."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted; what was measured is kept, the same command goes on from there")
        raise typer.Exit(130) from None


def _model(reference: str, extent: Sequence[str] | None, option: Sequence[str] | None, dtype: str | None) -> Any:
    from autotuner.api import named_model

    extents: dict[str, int] = {}
    for axis, text in _pairs(extent, "--extent", "l=256"):
        if not text.isdigit():
            raise ModelError(f"--extent {axis}={text}: write a whole number above 0, e.g. {axis}=256")
        extents[axis] = int(text)
    options = {name: yaml.safe_load(text) for name, text in _pairs(option, "--option", "activation=relu")}
    return named_model(reference, extents=extents, options=options, dtype=dtype)


def _pairs(texts: Sequence[str] | None, flag: str, example: str) -> list[tuple[str, str]]:
    found = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{flag} {text!r}: write name=value, e.g. {flag} {example}")
        found.append((name, value))
    return found


class Shown:
    """A progress bar that a walk calls; nothing where the output is for a program."""

    def __init__(self, *, quiet: bool) -> None:
        self.bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"), console=err,
        )  # fmt: skip
        self.context = nullcontext() if quiet else self.bars
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> "Shown":
        self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def __call__(self, progress: "Walked") -> None:
        if progress.stage not in self.tasks:
            self.tasks[progress.stage] = self.bars.add_task(STAGES[progress.stage], total=None, note="")
        notes = [f"{n} {word}" for n, word in ((progress.reused, "reused"), (progress.failed, "failed")) if n]
        self.bars.update(
            self.tasks[progress.stage], total=progress.total or 1, note=", ".join(notes),
            completed=progress.done if progress.total else 1,
        )  # fmt: skip


def _print(found: "Configuration", as_json: bool, *, steps: bool = False) -> None:
    if as_json:
        _emit(found.to_json())
        return
    from autotuner.analysis import reduction
    from autotuner.tuner import kernels_by_cover

    model, certificate = found.model, found.certificate
    extents = " ".join(f"{axis}={extent}" for axis, extent in model.extents.items())
    out.print(f"[bold]{model.reference}[/bold] {model.dtype}  {extents}", highlight=False)
    out.print(f"on {found.environment['device_name']}, {found.created_at}", highlight=False)
    kernels = Table(
        "computes", "kernel", "forms written", "us", "best us", title="chosen" if steps else "chosen kernels"
    )
    for column in (3, 4):
        kernels.columns[column].justify = "right"
    shown = [*kernels_by_cover(found)]
    if not steps:
        shown = sorted(shown, key=lambda pair: -pair[1].predicted_us)[:12]
        kernels.title = f"the {len(shown)} longest of {len(found.steps)} chosen kernels"
    for label, step in shown:
        forms = ", ".join(form.split("#")[0] for _, form in step.outputs[:3]) + (" ..." if step.outputs[3:] else "")
        kernels.add_row(label, step.kernel, forms, f"{step.predicted_us:.1f}", f"{step.bound_us:.1f}")
    out.print(kernels)
    if steps:
        fusions = Table(
            "could be one kernel", "fastest", "us", "chosen steps, us", "", title="fused sets, by measurement"
        )
        for column in (2, 3):
            fusions.columns[column].justify = "right"
        for fusion in found.fusions:
            verdict = "chosen" if fusion.chosen else "rejected"
            best = "none works" if fusion.best_us is None else f"{fusion.best_us:.1f}"
            fusions.add_row(" + ".join(fusion.operators), fusion.kernel, best, f"{fusion.instead_us:.1f}", verdict)
        out.print(fusions)
    summary = Table("", "", show_header=False)
    conversions = [step for step in found.steps if step.is_conversion]
    saved = reduction(found.bytes_moved["unfused"], found.bytes_moved["chosen"])
    noise = "not measured" if certificate.noise_floor is None else f"{certificate.noise_floor:.1%}"
    counts = [f"{found.counts.get(key, 0):,}" for key in ("measured", "reused", "failed")]
    rows = [
        ("predicted, kernels of one training step", f"{certificate.predicted_us:,.1f} us"),
        ("sum of each operator's best", f"{certificate.lower_bound_us:,.1f} us (gap {certificate.gap:.2%})"),
        ("the paper's shortest path", _us(certificate.baseline_us)),
        ("every operator alone, as declared", _us(certificate.default_us)),
        ("conversions", f"{len(conversions)}, {sum(step.predicted_us for step in conversions):,.1f} us"),
        ("bytes moved against unfused", f"{-saved:+.1f} %"),
        ("calls measured / reused / failed", " / ".join(counts)),
        ("noise floor of this device", noise),
    ]  # fmt: skip
    for label, text in rows:
        summary.add_row(label, text)
    out.print(summary)
    if found.measured:
        _print_measured(found.measured, certificate.predicted_us)


def _print_measured(measured: Any, predicted_us: float) -> None:
    table = Table("one training step", "median us", "against the plan", title="end to end, interleaved in one run")
    difference = measured.predicted_over_measured(predicted_us)
    table.add_row("this configuration", f"{measured.plan_us:,.1f}", f"predicted {difference:+.1%}")
    table.add_row("  of it beside kernels", f"{measured.overhead_us:,.1f}", "")
    for name, peer_us in measured.peers_us.items():
        table.add_row(name, f"{peer_us:,.1f}", f"{peer_us / measured.plan_us:.2f}x")
    out.print(table)


def _us(value: float | None) -> str:
    return "no plan" if value is None else f"{value:,.1f} us"


def _emit(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that can") from error


def main() -> None:
    """Run the command line; every error that was raised on purpose becomes one line and an exit code."""
    try:
        app()
    except AutotunerError as error:
        err.print(f"[bold red]error[/bold red] {type(error).__name__}: ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
