"""What a SQLite file holds, read without the project's own code, often and at little cost."""

import sqlite3
from pathlib import Path
from typing import Any


def call_keys(database: Path) -> list[str]:
    """Return the keys of all calls that were measured; none before there are tables."""
    return [key for (key,) in _rows(database, "SELECT call_key FROM measurement")]


def job_states(database: Path) -> dict[int, str]:
    """Return the states of jobs by their numbers."""
    return dict(_rows(database, "SELECT id, state FROM job"))


def _rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    if not database.exists():
        return []
    connection = sqlite3.connect(f"file:{database}?mode=rw", uri=True, timeout=60.0)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        return []
    finally:
        connection.close()
