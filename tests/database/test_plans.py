"""How SQLite looks for rows: what is asked for often never reads a whole table."""

import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event

from autotuner.database import Database, Filter, open_database
from autotuner.ir.records import Environment

Statement = tuple[str, tuple[object, ...]]
EXTENTS = {"b": 8, "l": 128}
QUESTIONS: dict[str, Callable[[Database, str], object]] = {
    "find": lambda database, key: database.find(key, ["c" * 64]),
    "measurements of an environment": lambda database, key: database.measurements(Filter(key), limit=9, after=9),
    "failures": lambda database, key: database.measurements(Filter(key, status="error"), limit=9, after=9),
    "measurements of a signature": lambda database, _: database.measurements(Filter(signature="s" * 64), limit=9),
    "statistics of an environment": lambda database, key: database.statistics(Filter(key)),
    "answer": lambda database, key: database.configurations.find("r" * 64, key),
    "configuration": lambda database, _: database.configurations.get(1),
    "best": lambda database, _: database.configurations.best(
        family_key="f" * 64, dtype="float32", extents=EXTENTS, device_type="cpu", device_name="Xeon"
    ),
    "near": lambda database, _: database.configurations.best(
        family_key="f" * 64, dtype="float32", extents={"b": 8, "l": 100}, device_type="cpu", device_name="Xeon"
    ),
    "known": lambda database, _: database.configurations.known("f" * 64),
    "claim a job": lambda database, _: database.queue.claim("gone", [("cpu", "Xeon")]),
    "cancel": lambda database, _: database.queue.cancel(1),
    "jobs in a state": lambda database, _: database.queue.jobs(state="queued", limit=9, before=99),
    "waiting": lambda database, _: database.queue.waiting(),
}


@pytest.fixture
def file(tmp_path: Path, environment: Environment) -> Path:
    file = tmp_path / "timings.sqlite"
    with open_database(file) as database:
        database.remember(environment)
        database.queue.enqueue(model="m", request={}, device_type="cpu")
        database.configurations.save(
            request_key="r" * 64, environment_key=environment.key, family_key="f" * 64, dtype="float32",
            extents=EXTENTS, complete=True, document={}, total_us=1.0,
        )  # fmt: skip
    return file


@pytest.fixture
def seen() -> Iterator[list[Statement]]:
    """What is sent to the database from now on."""
    found: list[Statement] = []

    def listen(
        _connection: Connection, _cursor: object, text: str, values: tuple[object, ...], _context: object, _many: bool
    ) -> None:
        found.append((text, values))

    event.listen(Engine, "before_cursor_execute", listen)
    yield found
    event.remove(Engine, "before_cursor_execute", listen)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_frequent_question_reads_no_table_from_end_to_end(
    file: Path, environment: Environment, seen: list[Statement], question: str
) -> None:
    with open_database(file) as database:
        seen.clear()
        QUESTIONS[question](database, environment.key)
    asked = [(text, values) for text, values in seen if re.match("SELECT|UPDATE|DELETE", text)]
    assert asked
    connection = sqlite3.connect(file)
    steps = [row[3] for text, values in asked for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", values)]
    connection.close()
    assert any("SEARCH" in step for step in steps)
    whole = [
        step for step in steps if re.match(r"SCAN (TABLE )?(measurement|environment|configuration|job|claim)\b", step)
    ]
    assert whole == []
