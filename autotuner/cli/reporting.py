"""Commands that show a configuration to people: as a page, and as figures for papers."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotuner.cli.console import out
from autotuner.cli.options import ConfigurationPath, check_output
from autotuner.files import write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotuner.ir.records import Measurement
    from autotuner.plan.configuration import Configuration
    from autotuner.plan.report import StepComparison
    from autotuner.space import Space

commands = typer.Typer()

SpaceOption = Annotated[
    Path | None,
    typer.Option("--space", help="The search space file that it was made from.", show_default="that of the device"),
]


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
    space: SpaceOption = None,
) -> None:
    """Write a configuration as one HTML page: what was chosen, where the time goes, and what else was measured.

    The page needs no network and no other file. With a database it also lists what failed and what was never measured.
    """
    from autotuner.plan.configuration import load_configuration
    from autotuner.plan.report import render

    found = load_configuration(path)
    page = path.with_suffix(".html") if output is None else output
    check_output(page, path, database, space)
    rows, counts = (None, None) if database is None else _stored_rows(found, database, space)
    write(page, render(found, rows, counts=counts))
    out.print(f"Report written to {page}", soft_wrap=True)


class FigureKind(StrEnum):
    """Kinds of figures."""

    VIOLIN = "violin"
    ROOFLINE = "roofline"
    MEMORY = "memory"
    FRONT = "front"


@commands.command()
def plot(
    path: ConfigurationPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Draw into this file: .svg, .png or .pdf.")],
    kind: Annotated[FigureKind, typer.Option(help="What the figure shows.")] = FigureKind.VIOLIN,
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            help="URL, or path of an SQLite file, with the measurements. A violin needs them; a roofline takes its "
            "ceilings from there.",
            show_default="none",
        ),
    ] = None,
    space: SpaceOption = None,
) -> None:
    """Draw a figure of a configuration, for a paper.

    violin: how the times of all candidates of each step are distributed. roofline: rates of the steps against flop for
    each byte. memory: bytes over the step. front: leaner plans, tokens a second against memory, or time where the
    model's axes do not tell its tokens.
    """
    from autotuner.cli import plots
    from autotuner.plan.configuration import load_configuration
    from autotuner.plan.report.picture import Ceilings, picture

    found = load_configuration(path)
    check_output(output, path, database, space)
    ceilings, times = Ceilings(None, {}), []
    if database is not None:
        from autotuner.database import open_database
        from autotuner.tuner.ceilings import ceilings_of

        with open_database(database, make=False) as opened:
            ceilings = ceilings_of(opened.facts(found.environment_key))
    drawn = picture(found, ceilings)
    if database is not None and kind is FigureKind.VIOLIN:
        times = plots.step_times(drawn, *_measured_space(found, database, space), found)
    plots.plot(kind, drawn, times, output)
    out.print(f"Figure written to {output}", soft_wrap=True)


def _stored_rows(
    found: "Configuration", database: str, space: Path | None
) -> "tuple[Sequence[StepComparison], Mapping[str, int]]":
    """Return each step against what a database holds of a configuration's search space, and counts by status."""
    from autotuner.plan.report import compare, tally

    whole, known = _measured_space(found, database, space)
    return compare(whole, known, found), tally(whole, known)


def _measured_space(
    found: "Configuration", database: str, space: Path | None
) -> "tuple[Space, Mapping[str, Measurement]]":
    """Return a configuration's search space, and what a database holds of it, measured in its environment."""
    from autotuner.database import open_database
    from autotuner.space import build_space, space_file
    from autotuner.tuner import with_known_calls

    whole = build_space(found.graph(), space_file(found.device_type, space), vendor=found.vendor)
    with open_database(database, make=False) as opened:
        whole = with_known_calls(whole, opened, found.environment_key)
        known = opened.find(found.environment_key, tuple(whole.calls))
    return whole, known
