"""The program: all commands as one, and an exit code for every error."""

import sys
import warnings
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from autotuner.cli import asking, databases, fleet, reporting, serving, tokens, tuning
from autotuner.cli.console import err
from autotuner.errors import AutotunerError
from autotuner.extras import missing_of
from autotuner.plan.phrases import plain
from autotuner.settings import package_version

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest layout and algorithm for every operator of a transformer's training step, as one consistent "
    "whole, and train with it.\n\nExit codes: 0 done; 1 another error; 2 bad input; 3 no such device; 4 database; "
    "5 no plan possible; 6 measuring failed; 7 check failed; 8 no service; 9 no token of the cluster; 10 a "
    "package is not installed; 130 interrupted (what was measured is kept).",
)
for module in (tuning, reporting, serving, fleet, asking, tokens, databases):
    app.add_typer(module.commands)


def say_version(wanted: bool) -> None:
    if wanted:
        print(f"autotuner {package_version()}")
        raise typer.Exit


@app.callback()
def of_all_commands(
    _: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as a line of its own: where in the code it came from means nothing to whoever gave a command."""
    err.print(Text.assemble(("warning", "bold yellow"), f": {plain(str(message))}"), soft_wrap=True)


def main() -> None:
    """Run the command line; every error that was raised on purpose becomes one line and an exit code."""
    warnings.showwarning = _show_warning
    try:
        app()
    except ModuleNotFoundError as error:
        missing = missing_of("this command", error)
        if missing is None:
            raise
        _end_with(missing)
    except AutotunerError as error:
        _end_with(error)


def _end_with(error: AutotunerError) -> NoReturn:
    """Print an error as a line, and end with its exit code."""
    err.print(Text.assemble(("error", "bold red"), f" {type(error).__name__}: "), end="")
    err.print(Text("\n  ".join(plain(line) for line in str(error).splitlines())), soft_wrap=True)
    sys.exit(error.exit_code)
