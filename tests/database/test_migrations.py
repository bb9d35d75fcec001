import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint, UniqueConstraint, inspect

from autotuner.database import open_database
from autotuner.database.engine import make_engine, read_url
from autotuner.database.migrations import HEAD, SCRIPTS, VERSION_TABLE
from autotuner.database.tables import Tables
from autotuner.errors import DatabaseError


def test_migrations_make_the_tables_that_the_models_describe(url: str) -> None:
    open_database(url).close()
    engine = make_engine(read_url(url))
    with engine.connect() as connection:
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


def test_a_migration_that_fails_leaves_no_table_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "timings.sqlite"
    upgrade = command.upgrade

    def fail_at_the_end(config: Config, revision: str) -> None:
        upgrade(config, revision)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "upgrade", fail_at_the_end)
    with pytest.raises(KeyboardInterrupt):
        open_database(file)
    connection = sqlite3.connect(file)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()
    monkeypatch.undo()
    open_database(file).close()
