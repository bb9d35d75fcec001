"""Upserting: an insert that gives way to a row that is there, in the words of either dialect."""

from sqlalchemy import ColumnElement, Connection
from sqlalchemy.dialects import postgresql, sqlite

from autotuner.database.tables import Tables


def dialect_insert(connection: Connection, table: type[Tables]) -> postgresql.Insert | sqlite.Insert:
    """Return an insert that has `on_conflict_do_nothing` and `on_conflict_do_update`."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def upsert(
    connection: Connection, table: type[Tables], unique: tuple[str, ...], *, where: ColumnElement[bool] | None = None
) -> postgresql.Insert | sqlite.Insert:
    """Return an insert that overwrites the row with the same unique columns, if `where` holds for that row."""
    statement = dialect_insert(connection, table)
    given = {column.name: column for column in statement.excluded if column.name not in (*unique, "id")}
    return statement.on_conflict_do_update(index_elements=unique, set_=given, where=where)
