import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from autotuner.database import open_database
from autotuner.database.engine import make_engine, read_url, shown
from autotuner.errors import DatabaseError, MissingError
from autotuner.ir.records import Environment

NOBODY = 65534


def test_a_path_a_path_as_text_and_a_url_open_the_same_file(tmp_path: Path, environment: Environment) -> None:
    file = tmp_path / "timings.sqlite"
    with open_database(file) as database:
        database.remember(environment)
    for name in (str(file), f"sqlite:///{file}"):
        with open_database(name) as database:
            assert database.environments() == [environment]


@pytest.mark.parametrize("name", ["a b.sqlite", "50%.sqlite", "%41.sqlite", "a?b#c.sqlite", "é+1.sqlite"])
def test_a_path_may_hold_any_character(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name.replace(".sqlite", "")
    directory.mkdir()
    open_database(directory / name).close()
    assert [path.name for path in directory.iterdir()] == [name]


def test_a_relative_path_is_one_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_database("timings.sqlite").close()
    assert (tmp_path / "timings.sqlite").is_file()


def test_sqlite_is_opened_with_wal_foreign_keys_and_a_busy_timeout(tmp_path: Path) -> None:
    engine = make_engine(read_url(tmp_path / "timings.sqlite"))
    with engine.connect() as connection:
        pragmas = ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        values = [connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() for pragma in pragmas]
    engine.dispose()
    assert values == ["wal", 1, 1_000, 1]


def test_a_closed_database_is_one_file(tmp_path: Path, environment: Environment) -> None:
    with open_database(tmp_path / "timings.sqlite") as database:
        database.remember(environment)
    assert [path.name for path in tmp_path.iterdir()] == ["timings.sqlite"]


@pytest.mark.slow
def test_a_migrated_database_opens_without_alembic(tmp_path: Path) -> None:
    file = tmp_path / "timings.sqlite"
    open_database(file).close()
    code = "import sys; from autotuner.database import open_database; open_database(sys.argv[1]); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True).stdout
    assert "sqlalchemy" in modules.split()
    assert "alembic" not in modules.split()
    assert "torch" not in modules.split()


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    file = tmp_path / "timings.sqlite"
    file.touch()
    with open_database(file) as database:
        assert database.environments() == []


def refusal(url_or_path: str | Path) -> str:
    with pytest.raises(DatabaseError) as caught:
        open_database(url_or_path)
    return str(caught.value)


def test_a_directory_is_refused_with_a_file_in_it_as_the_proposal(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"database {tmp_path} is a directory: give a file in it, such as {tmp_path}/autotuner.sqlite"
    )


def test_a_file_in_a_directory_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no" / "t.sqlite") == (
        f"database {tmp_path}/no/t.sqlite cannot be made, there is no directory {tmp_path}/no: make it, or give a file "
        "in one that exists"
    )


def test_a_file_that_is_not_sqlite_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are notes, and more than the hundred bytes of a header" * 10)
    before = file.read_bytes()
    assert refusal(file) == (
        f"database {file} is damaged or no SQLite file (file is not a database): give another path, or an SQLite file"
    )
    assert file.read_bytes() == before


def test_a_database_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "timings.sqlite"
    open_database(file).close()
    file.write_bytes(file.read_bytes()[:5000])
    assert f"database {file} is damaged or no SQLite file" in refusal(file)


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A directory that this process may read and not write; as root, by becoming nobody for a moment."""
    with tempfile.TemporaryDirectory() as name:
        directory, user = Path(name), os.geteuid()
        (directory / "there.sqlite").touch()
        open_database(directory / "there.sqlite").close()
        (directory / "there.sqlite").chmod(0o444)
        directory.chmod(0o555)
        if user == 0:
            os.seteuid(NOBODY)
        yield directory
        if user == 0:
            os.seteuid(user)
        directory.chmod(0o755)


def test_a_directory_that_cannot_be_written_is_refused(unwritable: Path) -> None:
    file = unwritable / "t.sqlite"
    assert refusal(file) == (
        f"database {file} cannot be written (unable to open database file): give a file that can be written, in a "
        "directory that can be written"
    )


def test_a_file_that_cannot_be_written_is_refused(unwritable: Path) -> None:
    assert f"database {unwritable}/there.sqlite cannot be written" in refusal(unwritable / "there.sqlite")


VALID = "give the path of an SQLite file, sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"


@pytest.mark.parametrize(
    "url, start",
    [
        ("sqlite://", "database sqlite:// names no file, so nothing measured would be kept: "),
        (":memory:", "database :memory: names no file, so nothing measured would be kept: "),
        ("sqlite://timings.sqlite", "database sqlite://timings.sqlite is no database that can be used: "),
        ("mysql://me:secret@host/t", "database mysql://me:***@host/t is no database that can be used: "),
        ("postgresql://me:secret@host:port/t", "'postgresql://me:***@host:port/t' is no database URL: "),
        ("://", "'://' is no database URL: "),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str, start: str) -> None:
    assert refusal(url) == start + VALID


def test_a_url_whose_driver_is_missing_says_which(tmp_path: Path) -> None:
    message = refusal(f"sqlite+pysqlcipher:///{tmp_path}/t.sqlite")
    assert "needs a driver that cannot be loaded: No module named" in message


def test_without_psycopg_the_extra_is_named_and_the_password_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingError) as raised:
        make_engine(make_url("postgresql+psycopg://me:secret@host/t"))
    assert str(raised.value) == (
        "database postgresql+psycopg://me:***@host/t needs psycopg, which is not installed: "
        'install "autotuner[postgresql]"'
    )


def test_messages_hide_the_password() -> None:
    assert shown(make_url("postgresql://me:secret@host/t")) == "database postgresql://me:***@host/t"
