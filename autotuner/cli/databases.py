"""Commands of a database: bring its tables up to date, remove what has no use, write out and take over measurements."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from autotuner.cli.console import emit, err, out
from autotuner.cli.options import DatabaseOption, Json
from autotuner.errors import InputError
from autotuner.files import check_writable, write_parts

if TYPE_CHECKING:
    from autotuner.database import Database, Pruned

commands = typer.Typer()
group = typer.Typer(no_args_is_help=True, help="Upgrade, prune, export or import a database. No service needs to run.")
commands.add_typer(group, name="db")

When = Annotated[str | None, typer.Option(help="A day such as 2026-01-31 (UTC), or an age such as 90d.")]
Environments = Annotated[
    list[str] | None,
    typer.Option(
        "--environment", help="The first characters of an environment's key, as `devices` of a service has it."
    ),
]


@group.command()
def upgrade(database: DatabaseOption = None, as_json: Json = False) -> None:
    """Bring the tables of a database up to date with this version.

    An SQLite file is upgraded whenever it is opened. On PostgreSQL, services and workers refuse tables of an earlier
    version: end those of that version, make a backup, and run this once.
    """
    from autotuner.database import upgraded

    was, now = upgraded(_url(database))
    if as_json:
        emit({"was": was, "now": now})
    elif was is None:
        out.print(f"the tables are made, at migration {now}")
    else:
        out.print(f"up to date, at migration {now}" if was == now else f"upgraded from migration {was} to {now}")


@group.command()
def prune(
    jobs_before: When = None,
    unused_since: When = None,
    environment: Environments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    database: DatabaseOption = None,
    as_json: Json = False,
) -> None:
    """Remove old jobs, and measurements of environments that nobody uses.

    --jobs-before removes jobs that ended before. --unused-since removes the measurements of environments in which
    nothing was measured, answered or asked for since; --environment those of one, whatever its use. Configurations
    are never removed: they run as before.
    """
    if jobs_before is None and unused_since is None and not environment:
        raise InputError("give --jobs-before, --unused-since or --environment: what is to be removed")
    before, since = _moment("--jobs-before", jobs_before), _moment("--unused-since", unused_since)
    with _opened(database) as opened:
        found = opened.pruning.find(jobs_before=before, unused_since=since, environment_keys=environment or ())
        if not dry_run:
            opened.pruning.remove(found, before)
    if as_json:
        emit(_json(found, dry_run=dry_run))
    else:
        _print_pruned(found, dry_run=dry_run)


@group.command()
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the file here.")],
    environment: Annotated[
        str | None,
        typer.Option(help="The first characters of an environment's key; needed where there are several."),
    ] = None,
    database: DatabaseOption = None,
) -> None:
    """Write the measurements of an environment as JSON in the community's format (T4 results, version 1.0.0)."""
    from autotuner.database import Filter, matching, results_file

    check_writable(output)
    with _opened(database) as opened:
        environments = {found.key: found for found in opened.environments()}
        if environment is None and len(environments) > 1:
            known = ", ".join(f"{key[:12]} ({found.device_name})" for key, found in environments.items())
            raise InputError(f"--environment: the database has several, name one: {known}")
        chosen = environments[matching(environment or next(iter(environments), ""), environments)]
        write_parts(output, results_file(opened, chosen))
        number = sum(opened.statistics(Filter(chosen.key)).statuses.values())
    err.print(f"{number:,} measurements on {chosen.device_name} written to {output}", soft_wrap=True)


@group.command("import")
def import_(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A database that has measurements: an SQLite file, or a URL. By default, those that come with this "
            "package."
        ),
    ] = None,
    environment: Environments = None,
    database: DatabaseOption = None,
    as_json: Json = False,
) -> None:
    """Take over what another database has measured, of all its environments or of those that --environment names.

    Measurements keep their environment. Those of another driver or version say what to try first, and are never taken
    for this machine's. What the database has itself stays.
    """
    from autotuner.database import import_measurements, matching, open_database, recorded
    from autotuner.tuner.measuring import DECIDED

    def is_wanted(fact: str) -> bool:
        return not fact.startswith(DECIDED)  # by the pace of that machine

    with ExitStack() as stack:
        opened = stack.enter_context(open_database(_url(database)))
        sources = (
            [source]
            if source is not None
            else [stack.enter_context(recorded.unpacked(f)) for f in recorded.recordings()]
        )
        others = [stack.enter_context(open_database(each, make=False)) for each in sources]
        found_in = {found.key: (found, other) for other in others for found in other.environments()}
        named = [matching(each, found_in) for each in environment or found_in]
        chosen = [found_in[key][0] for key in named]
        written = {key: import_measurements(found_in[key][1], opened, found_in[key][0], is_wanted) for key in named}
    if as_json:
        emit({"environments": [{"key": key, "written": number} for key, number in written.items()]})
        return
    table = Table("environment", "device", "measurements written")
    table.columns[2].justify = "right"
    for found in chosen:
        table.add_row(found.key[:12], found.device_name, f"{written[found.key]:,}")
    out.print(table)


def _url(database: str | None) -> str:
    from autotuner.settings import Settings

    return database or Settings.from_environment().database_url


@contextmanager
def _opened(database: str | None) -> "Iterator[Database]":
    from autotuner.database import open_database

    with open_database(_url(database), make=False) as opened:
        yield opened


def _moment(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    age = re.fullmatch(r"([1-9][0-9]{0,4})d", text)
    if age is not None:
        return datetime.now(UTC) - timedelta(days=int(age[1]))
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise InputError(f"{name} {text!r}: write a day such as 2026-01-31, or an age such as 90d") from None


def _json(found: "Pruned", *, dry_run: bool) -> dict[str, Any]:
    return {
        "removed": not dry_run, "jobs": found.jobs,
        "environments": [
            {
                "key": each.key, "device_type": each.device_type, "device_name": each.device_name,
                "last_used": None if each.last_used is None else each.last_used.isoformat(),
                "measurements": each.measurements,
            }
            for each in found.environments
        ],
    }  # fmt: skip


def _print_pruned(found: "Pruned", *, dry_run: bool) -> None:
    if found.environments:
        table = Table("environment", "device", "last used (UTC)", "measurements")
        table.columns[3].justify = "right"
        for each in found.environments:
            last = "never" if each.last_used is None else f"{each.last_used:%Y-%m-%d %H:%M}"
            table.add_row(each.key[:12], each.device_name, last, f"{each.measurements:,}")
        out.print(table)
    number = sum(each.measurements for each in found.environments)
    what = f"{found.jobs:,} jobs and {number:,} measurements of {len(found.environments)} environments"
    out.print(f"{what} would be removed" if dry_run else f"{what} removed")
