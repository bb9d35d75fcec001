"""Migrations: bring a database's tables to the ones that this version works with. A new one also moves `HEAD`."""

from pathlib import Path

from sqlalchemy import Column, Connection, Engine, MetaData, PrimaryKeyConstraint, String, Table, inspect, text

from autotuner.database.engine import WRITES, shown, unlimited
from autotuner.database.tables import Tables
from autotuner.errors import DatabaseError

HEAD = "0006"
"""The newest migration. Stated here so that opening a database that is up to date does not import Alembic (0.2 s)."""

VERSION_TABLE = "autotuner_migration"
"""Not Alembic's usual name: on PostgreSQL another application may share the database."""

VERSION = Table(
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
"""As Alembic makes it."""

SCRIPTS = Path(__file__).parent
_LOCK = 0x6175746F
"""PostgreSQL's lock for migrations of this product; on SQLite `BEGIN IMMEDIATE` is the lock."""


def migrate(engine: Engine, *, upgrades: bool = True) -> str | None:
    """Make or update the tables, in one transaction; two processes may do it at once.

    Args:
        upgrades: also those of an earlier version, on which processes of that version may work.

    Returns:
        The migration that they were at; None where there were none.

    Raises:
        DatabaseError: the tables are another application's, of an earlier version and not to be updated, or of a
            migration that this version does not know.
    """
    with engine.connect() as connection:
        found = version(connection)
        if found == HEAD:
            return found
    try:
        with engine.connect().execution_options(**WRITES) as connection, connection.begin():
            if connection.dialect.name == "postgresql":
                unlimited(connection.connection.driver_connection)
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            found = version(connection)
            if found is None:
                _make(connection)
            elif found != HEAD:
                _check(connection, found, upgrades=upgrades)
                upgrade(connection)
            return found
    finally:
        engine.dispose()  # of a connection without limits


def version(connection: Connection) -> str | None:
    """Return the migration that the tables of a database are at, None where there are none."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()


def _make(connection: Connection) -> None:
    """Make the tables as the newest migration leaves them."""
    tables = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    foreign = tables & set(Tables.metadata.tables) if connection.dialect.name == "postgresql" else tables
    if foreign:
        raise DatabaseError(
            f"{shown(connection.engine.url)} holds tables that are not autotuner's "
            f"({', '.join(sorted(foreign)[:5])}): give a new database, or one that autotuner made"
        )
    Tables.metadata.create_all(connection)
    VERSION.create(connection, checkfirst=True)
    connection.execute(VERSION.insert(), {"version_num": HEAD})


def _check(connection: Connection, found: str, *, upgrades: bool) -> None:
    from alembic.script import ScriptDirectory

    where = shown(connection.engine.url)
    known = {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}
    if found not in known:
        raise DatabaseError(
            f"{where} is at migration {found!r}, and this version knows none after {HEAD!r}: it was written by a "
            "newer autotuner; update this one, or give another database"
        )
    if not upgrades:
        raise DatabaseError(
            f"{where} is at migration {found!r}, and this version works with {HEAD!r}: back it up, end every service "
            "and worker of the earlier version, then run `autotuner db upgrade`"
        )


def upgrade(connection: Connection) -> None:
    """Run the migrations that are missing, on a connection within a transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
