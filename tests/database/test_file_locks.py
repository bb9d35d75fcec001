"""Locks beside an SQLite file: the file that holds them is deleted, cannot be written, or has no such locks."""

import os
import time
from pathlib import Path

import pytest

from autotuner.database import file_locks, locks, open_database
from autotuner.errors import DatabaseError

WAIT_S = 60.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "timings.sqlite"
    open_database(path).close()
    return path


def test_a_lock_whose_file_was_deleted_with_the_database_is_taken_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOOK_S", 0.02)
    with open_database(file, reopens=True) as database, database.locks.hold("n") as held:
        for path in file.parent.glob(f"{file.name}*"):
            path.unlink()
        with open_database(file) as anew:
            until = time.monotonic() + WAIT_S
            while not anew.locks.is_held("n"):
                assert time.monotonic() < until
                time.sleep(0.01)
        assert held.losses == 1


def test_a_database_has_one_lock_under_all_its_names(file: Path) -> None:
    link = file.with_name("link.sqlite")
    link.symlink_to(file)
    with open_database(file) as database, open_database(link) as linked, database.locks.hold("n"):
        assert linked.locks.is_held("n")


def test_who_may_write_the_database_may_lock_it(file: Path) -> None:
    file.chmod(0o664)
    with open_database(file) as database, database.locks.hold("n"):
        assert Path(f"{file}-locks").stat().st_mode & 0o777 == 0o664
        assert Path(f"{file}-locks").stat().st_size == 0


def test_a_folder_that_cannot_be_written_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    with open_database(file) as database:
        assert not database.locks.is_held("n")
        with pytest.raises(DatabaseError) as caught, database.locks.hold("n"):
            pass
    assert str(caught.value) == (
        f"{file}-locks, in which those who run jobs are known, cannot be written (Permission denied): let this user "
        f"write it and {file.parent}"
    )


def test_a_system_without_such_locks_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "HAS_LOCKS", False)
    with open_database(file) as database:
        assert not database.locks.is_held("n")
        with pytest.raises(DatabaseError, match=r"need locks of Linux \(F_OFD_SETLK\), which this system has not: use"):
            database.locks.hold("n").__enter__()


def test_a_file_system_without_such_locks_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> bytes:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(file_locks, "fcntl", refused)
    with (
        open_database(file) as database,
        pytest.raises(
            DatabaseError, match=r"has no locks of open files \(Operation not supported\): keep the database"
        ),
        database.locks.hold("n"),
    ):
        pass
