"""Commands of tokens."""

import os
import stat
from pathlib import Path

import pytest

from autotuner.database import Token, open_database
from tests.cli.running import Run


def stored() -> list[Token]:
    with open_database(os.environ["AUTOTUNER_DATABASE"]) as database:
        return database.tokens.all()


def test_a_token_is_printed_once_and_kept_by_its_digest_alone(run: Run) -> None:
    made = run("token", "create", "ci", "--role", "submitter", "--expires-in", "90d")
    secret = made.out.strip()
    assert made.code == 0
    assert secret.startswith("autotuner_")
    assert len(secret) == 53
    (token,) = stored()
    assert (token.name, token.role, token.state) == ("ci", "submitter", "valid")
    assert secret not in made.err
    assert secret.encode() not in b"".join(file.read_bytes() for file in Path().glob("empty.sqlite*"))
    assert secret not in run("token", "list").out + run("token", "list", "--json").out


def test_a_token_in_a_file_is_for_its_owners_eyes(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "token"
    made = run("token", "create", "--output", file)
    assert (made.code, made.out) == (0, "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with open_database(os.environ["AUTOTUNER_DATABASE"]) as database:
        assert database.tokens.find(file.read_text().strip()) == stored()[0]
    assert run("token", "create", "--output", file).code == 2, "nothing is overwritten"
    assert len(stored()) == 1


def test_a_token_that_is_revoked_stays_in_the_list(run: Run) -> None:
    run("token", "create", "a")
    assert run("token", "revoke", "1").out == "token 1 is revoked\n"
    assert run("token", "revoke", "1").code == 0
    assert [(token["id"], token["state"]) for token in run("token", "list", "--json").json] == [(1, "revoked")]
    refused = run("token", "revoke", "2")
    assert (refused.code, "has no token 2: `autotuner token list` lists them" in refused.err) == (2, True)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--role", "king"], "no role 'king'; known: reader, submitter, admin"),
        (["--expires-in", "soon"], "write a number with m, h, d or w, such as 90d"),
        (["--expires-in", "0d"], "write a number with m, h, d or w, such as 90d"),
        (["x" * 101], "give at most 100 printable characters"),
        (["--output", "no/such/folder"], "no new file can be made there"),
    ],
)
def test_what_makes_no_token_says_what_would(run: Run, arguments: list[str], sentence: str) -> None:
    ran = run("token", "create", *arguments)
    assert (ran.code, sentence in ran.err) == (2, True)
    assert stored() == []
