"""Commands of tokens: who may ask a service. They work on the database itself; no service needs to run."""

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from autotuner.cli.console import emit, err, out
from autotuner.cli.options import DatabaseOption, Json
from autotuner.errors import InputError

if TYPE_CHECKING:
    from autotuner.database import Database, Token

commands = typer.Typer()
group = typer.Typer(no_args_is_help=True, help="Make, list and revoke the tokens of a service's clients.")
commands.add_typer(group, name="token")

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@group.command()
def create(
    name: Annotated[str, typer.Argument(help="Whom it is for, as `token list` shows it.")] = "",
    role: Annotated[
        str,
        typer.Option(
            help="reader (asks), submitter (also submits jobs, and cancels its own) or admin (also cancels all)."
        ),
    ] = "reader",
    expires_in: Annotated[
        str | None, typer.Option(help="For how long it is valid, e.g. 12h, 90d or 52w.", show_default="until revoked")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it to this new file, for its owner's eyes only.")
    ] = None,
    database: DatabaseOption = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it. It cannot be shown again: the database keeps only its digest.

    Clients read it from $AUTOTUNER_TOKEN, or from the file that $AUTOTUNER_TOKEN_FILE names.
    """
    from autotuner.database import ROLES

    chosen = next((known for known in ROLES if known == role), None)
    if chosen is None:
        raise InputError(f"no role {role!r}; known: {', '.join(ROLES)}")
    expires_at = None if expires_in is None else datetime.now(UTC) + _duration(expires_in)
    file = None if output is None else _new_file(output)
    with _opened(database) as opened:
        token, secret = opened.tokens.create(name, chosen, expires_at)
    if file is not None:
        with os.fdopen(file, "w") as written:
            written.write(secret + "\n")
    if as_json:
        emit(_json(token) | ({"token": secret} if output is None else {}))
        return
    until = "until it is revoked" if expires_at is None else f"until {_moment(expires_at)} UTC"
    err.print(f"token {token.id}, role {token.role}, valid {until}; it is shown only now" if output is None else
              f"token {token.id}, role {token.role}, valid {until}; written to {output}", soft_wrap=True)  # fmt: skip
    if output is None:
        print(secret)


@group.command("list")
def show(database: DatabaseOption = None, as_json: Json = False) -> None:
    """List all tokens that were made, without what their owners send."""
    with _opened(database) as opened:
        found = opened.tokens.all()
    if as_json:
        emit([_json(token) for token in found])
        return
    table = Table("token", "name", "role", "state", "created (UTC)", "expires (UTC)")
    for token in found:
        expires = "never" if token.expires_at is None else _moment(token.expires_at)
        table.add_row(str(token.id), token.name, token.role, token.state, _moment(token.created_at), expires)
    out.print(table)


@group.command()
def revoke(
    token: Annotated[int, typer.Argument(help="Number of a token, as `token list` prints it.")],
    database: DatabaseOption = None,
) -> None:
    """End a token: services refuse it within seconds."""
    with _opened(database) as opened:
        opened.tokens.revoke(token)
    out.print(f"token {token} is revoked")


def _opened(database: str | None) -> "Database":
    from autotuner.database import open_database
    from autotuner.settings import Settings

    return open_database(database or Settings.from_environment().database_url)


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,4})([mhdw])", text)
    if match is None:
        raise InputError(f"--expires-in {text!r}: write a number with m, h, d or w, such as 90d")
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def _new_file(path: Path) -> int:
    """Return a descriptor of a new file that only its owner may read."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InputError(f"{path}: no new file can be made there ({error.strerror}): name another one") from error


def _json(token: "Token") -> dict[str, Any]:
    return {
        "id": token.id, "name": token.name, "role": token.role, "state": token.state,
        "created_at": token.created_at.isoformat(),
        "expires_at": None if token.expires_at is None else token.expires_at.isoformat(),
    }  # fmt: skip


def _moment(at: datetime) -> str:
    return at.isoformat(sep=" ", timespec="minutes").removesuffix("+00:00")
