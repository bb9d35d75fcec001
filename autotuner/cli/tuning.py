"""Commands on this machine: tune, and what goes before and after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from autotuner.cli.options import (
    ConfigurationPath,
    DatabaseOption,
    Device,
    Dtype,
    Extent,
    Json,
    Option,
    Output,
    Reference,
    Threads,
    effort,
    given_model,
    repetition,
    with_tuning,
)
from autotuner.cli.outputs import check_output
from autotuner.cli.printing import (
    Shown,
    emit,
    err,
    out,
    print_check,
    print_configuration,
    print_devices,
    print_explanation,
    print_kernels,
    print_measured,
    print_models,
)
from autotuner.errors import CheckError, InputError
from autotuner.settings import TuneKeywords

commands = typer.Typer()


@commands.command()
@with_tuning(repetition, effort)
def tune(
    model: Reference,
    output: Output = None,
    extent: Extent = None,
    option: Option = None,
    dtype: Dtype = None,
    database: DatabaseOption = None,
    device: Device = "cpu",
    threads: Threads = None,
    space: Annotated[Path | None, typer.Option(help="A search space file.", show_default="that of the device")] = None,
    *,
    tuning: TuneKeywords,
    as_json: Json = False,
) -> None:
    """Measure what the database does not know yet, solve, and print the best configuration.

    Interrupt at any moment: what was measured stays, and the next run goes on from there.
    """
    from autotuner import api
    from autotuner.settings import Settings

    check_output(output, model, space, database or Settings.from_environment().database_url)
    chosen = given_model(model, extent, option, dtype)
    with _interruptible(), Shown(quiet=as_json) as show:
        found = api.tune(chosen, database=database, device=device, threads=threads, space=space, watch=show, **tuning)
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
    """Run a configuration and compare output and every gradient with the framework's module in float64."""
    from dataclasses import asdict

    from autotuner.plan.configuration import load_configuration
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
