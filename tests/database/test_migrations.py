import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint, Engine, UniqueConstraint, inspect, text

from autotuner.database import open_database, upgraded
from autotuner.database.engine import make_engine, read_url
from autotuner.database.migrations import HEAD, SCRIPTS, VERSION_TABLE
from autotuner.database.tables import Tables
from autotuner.errors import DatabaseError


def make_version(url: str, revision: str) -> Engine:
    """Make the tables of a migration, as that version of the product did, and return an engine."""
    engine = make_engine(read_url(url))
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return engine


@pytest.mark.parametrize("how", ["anew", "by all migrations"])
def test_the_tables_are_those_that_the_models_describe(url: str, how: str) -> None:
    if how == "by all migrations":
        make_version(url, "head").dispose()
    open_database(url).close()
    engine = make_engine(read_url(url))
    with engine.connect() as connection:
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all() == [HEAD]
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "target_metadata": Tables.metadata}
        )
        assert compare_metadata(context, Tables.metadata) == []
        made = inspect(connection)
        for name, table in Tables.metadata.tables.items():
            for kind, found in (
                (CheckConstraint, made.get_check_constraints(name)),
                (UniqueConstraint, made.get_unique_constraints(name)),
            ):
                assert {c["name"] for c in found} == {c.name for c in table.constraints if isinstance(c, kind)}
    engine.dispose()


def test_the_head_that_opening_looks_for_is_the_newest_migration() -> None:
    assert ScriptDirectory(str(SCRIPTS)).get_current_head() == HEAD


def test_migrations_can_be_taken_back(url: str) -> None:
    open_database(url).close()
    engine = make_engine(read_url(url))
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        assert inspect(connection).get_table_names() == [VERSION_TABLE]
    engine.dispose()
    with open_database(url) as database:
        assert database.environments() == []


def test_jobs_of_leases_are_kept_and_those_that_ran_go_to_the_next_worker(url: str) -> None:
    engine = make_version(url, "0003")
    job = (
        "INSERT INTO job (model, request, device_type, attended, state, cancelling, worker, lease_until, attempts, "
        "progress, revision, counts, created_at, message) VALUES ('m:p', '{\"gap\": 0.{attempts}}', 'cpu', {attended}, "
        "'{state}', false, {worker}, {until}, {attempts}, '{\"done\": 3}', 4, '{}', '2026-01-01 00:00:00', '')"
    )
    until, owner = "'2026-01-01 00:01:00'", "'host/abc:12:34'"
    with engine.begin() as connection:
        for state, attended, worker, attempts in (
            ("queued", "false", "NULL", 0), ("running", "false", owner, 2), ("running", "true", owner, 1),
            ("finished", "false", owner, 1),
        ):  # fmt: skip
            values = {"state": state, "attended": attended, "worker": worker, "until": until, "attempts": str(attempts)}
            statement = job
            for name, value in values.items():
                statement = statement.replace(f"{{{name}}}", value)
            connection.exec_driver_sql(statement.replace("%", "%%"))
        connection.execute(
            text(
                "INSERT INTO worker (name, device_type, device_name, started_at, seen_at) VALUES "
                f"('host/abc:12:34', 'cpu', 'Xeon', {until}, {until})"
            )
        )
    engine.dispose()
    if url.startswith("postgresql"):
        with pytest.raises(DatabaseError, match=r"at migration '0003', and this version works with .* back it up, end"):
            open_database(url)
    assert upgraded(url) == ("0003", HEAD)
    assert upgraded(url) == (HEAD, HEAD)
    with open_database(url) as database, database.locks.hold("me"):
        queue = database.queue
        assert queue.workers() == []
        assert [(job.id, job.state, job.attempt, job.priority) for job in queue.jobs()] == [
            (4, "finished", 1, 0), (3, "running", 1, 0), (2, "running", 2, 0), (1, "queued", 0, 0),
        ]  # fmt: skip
        assert (queue.job(2).request, queue.job(2).progress, queue.job(2).revision) == ({"gap": 0.2}, {"done": 3}, 4)
        taken = queue.claim("me", [("cpu", "Xeon")], limit=9)
        if url.startswith("sqlite"):  # a server's locks must be seen free for a while
            assert [(job.id, job.attempt) for job in taken] == [(1, 1), (2, 3)]
            assert queue.job(3).state == "interrupted"
        assert queue.enqueue(model="m", request={}, device_type="cpu").id == 5


def test_a_database_of_a_newer_migration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "timings.sqlite"
    open_database(file).close()
    connection = sqlite3.connect(file)
    connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(DatabaseError) as caught:
        open_database(file)
    assert str(caught.value) == (
        f"database {file} is at migration '9999', and this version knows none after '{HEAD}': it was written by a "
        "newer autotuner; update this one, or give another database"
    )


def test_a_database_of_another_application_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "places.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE bookmark (url TEXT)")
    connection.close()
    with pytest.raises(DatabaseError) as caught:
        open_database(file)
    assert str(caught.value) == (
        f"database {file} holds tables that are not autotuner's (bookmark): give a new database, or one that autotuner "
        "made"
    )
    connection = sqlite3.connect(file)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmark",)]
    connection.close()


def test_a_migration_that_fails_leaves_the_tables_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "timings.sqlite"
    upgrade = command.upgrade

    def fail_at_the_end(config: Config, revision: str) -> None:
        upgrade(config, revision)
        raise KeyboardInterrupt

    make_version(f"sqlite:///{file}", "0001").dispose()
    connection = sqlite3.connect(file)
    before = connection.execute("SELECT sql FROM sqlite_master").fetchall()
    monkeypatch.setattr(command, "upgrade", fail_at_the_end)
    with pytest.raises(KeyboardInterrupt):
        open_database(file)
    assert connection.execute("SELECT sql FROM sqlite_master").fetchall() == before
    connection.close()
    monkeypatch.undo()
    open_database(file).close()
