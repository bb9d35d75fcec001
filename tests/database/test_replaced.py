"""An SQLite file that is deleted or replaced while it is in use."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotuner.database import Database, Job, open_database
from autotuner.database.job_rows import JobRows
from autotuner.errors import DatabaseError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "timings.sqlite"


@pytest.fixture
def database(file: Path) -> Iterator[Database]:
    with open_database(file) as opened:
        enqueue(opened)
        yield opened


def enqueue(database: Database) -> Job:
    return database.queue.enqueue(model="m:p", request={}, device_type="cpu")


def test_a_file_that_was_deleted_is_neither_written_nor_made_anew(file: Path, database: Database) -> None:
    file.unlink()
    for use in (lambda: enqueue(database), lambda: database.queue.jobs()):
        with pytest.raises(DatabaseError, match=rf"^database {file} was deleted while it was in use, and what was"):
            use()
    assert not file.exists()


def test_a_file_that_was_put_back_is_gone_on_with(file: Path, database: Database) -> None:
    away = file.with_name("away")
    file.rename(away)
    with pytest.raises(DatabaseError, match="was deleted"):
        enqueue(database)
    away.rename(file)
    assert enqueue(database).id == 2


def test_a_file_that_was_replaced_is_an_error_until_it_is_reopened_without_the_old_log(
    file: Path, database: Database
) -> None:
    """SQLite would take the log of the old file for that of the new one, and write it into that."""
    other = file.with_name("other")
    open_database(other).close()
    other.replace(file)
    with pytest.raises(DatabaseError, match="was replaced by another file while it was in use"):
        enqueue(database)
    with pytest.raises(DatabaseError, match=f"remove {file}-wal and {file}-shm, or put the old file back"):
        database.reopen()
    for suffix in ("-wal", "-shm"):
        Path(f"{file}{suffix}").unlink()
    database.reopen()
    assert (enqueue(database).id, len(database.queue.jobs())) == (1, 1)


def test_who_reopens_goes_on_with_a_file_that_took_the_place_and_makes_its_tables(file: Path) -> None:
    with open_database(file, reopens=True) as database:
        enqueue(database)
        file.unlink()
        with pytest.raises(DatabaseError, match="was deleted"):
            enqueue(database)
        file.touch()
        assert (enqueue(database).id, len(database.queue.jobs())) == (1, 1)


def test_what_is_written_while_the_file_is_replaced_is_not_said_to_be_kept(
    file: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = JobRows.insert

    def meanwhile(*arguments: object, **named: object) -> int | None:
        copy = file.with_name("copy")
        shutil.copy(file, copy)
        copy.replace(file)
        return real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(JobRows, "insert", meanwhile)
    with pytest.raises(DatabaseError, match="was replaced"):
        enqueue(database)
