"""The command that writes a configuration as a page for people."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotuner.cli.options import ConfigurationPath
from autotuner.cli.outputs import check_output
from autotuner.cli.printing import out
from autotuner.files import write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotuner.plan.configuration import Configuration
    from autotuner.plan.report import StepComparison

commands = typer.Typer()


@commands.command()
def report(
    path: ConfigurationPath,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the page here.", show_default="beside it, as .html"),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            help="URL, or path of an SQLite file, with the measurements that the configuration was made from: the page "
            "then sets each kernel against the best and worst of its work.",
            show_default="none",
        ),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(help="The search space file that it was made from.", show_default="that of the device"),
    ] = None,
) -> None:
    """Write a configuration as one HTML page: what was chosen, where the time goes, and what else was measured.

    The page needs no network and no other file. With a database it also lists what failed and what was never measured.
    """
    from autotuner.plan.configuration import load_configuration
    from autotuner.plan.report import render

    found = load_configuration(path)
    page = path.with_suffix(".html") if output is None else output
    check_output(page, path, database, space)
    rows, counts = (None, None) if database is None else _measured(found, database, space)
    write(page, render(found, rows, counts=counts))
    out.print(f"Report written to {page}", soft_wrap=True)


def _measured(
    found: "Configuration", database: str, space: Path | None
) -> "tuple[Sequence[StepComparison], Mapping[str, int]]":
    """Return what a database holds of a configuration's search space, measured in its environment."""
    from autotuner.database import open_database
    from autotuner.plan.report import compare, tally
    from autotuner.space import build_space, space_file
    from autotuner.tuner import with_known_calls

    whole = build_space(found.graph(), space_file(found.environment["device_type"], space))
    with open_database(database, make=False) as opened:
        whole = with_known_calls(whole, opened, found.environment_key)
        known = opened.find(found.environment_key, tuple(whole.calls))
    return compare(whole, known, found), tally(whole, known)
