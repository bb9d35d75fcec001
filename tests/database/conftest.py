"""A fresh database for each test, of each engine: an SQLite file, and a PostgreSQL schema where there is a server.

`AUTOTUNER_TEST_POSTGRES` is the URL of that server, such as `postgresql+psycopg://tuner@127.0.0.1/tests`; without it,
the tests of PostgreSQL are skipped. Another engine joins with an entry in `ENGINES`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, make_url, text

from autotuner.database import Database, open_database
from autotuner.ir.records import Call, Candidate, Environment, Node, Subgraph, TensorType

POSTGRES = os.environ.get("AUTOTUNER_TEST_POSTGRES")
ENVIRONMENT = Environment("cpu", "Xeon", (("torch", "2.13"), ("cores", 2), ("bf16", True)), (("cache", "warm"),))


@contextmanager
def sqlite_file(directory: Path) -> Iterator[str]:
    yield f"sqlite:///{directory}/timings.sqlite"


@contextmanager
def postgresql_schema(_directory: Path) -> Iterator[str]:
    if POSTGRES is None:
        pytest.skip("needs the URL of a PostgreSQL server in AUTOTUNER_TEST_POSTGRES")
    schema = f"test_{uuid4().hex}"
    engine = create_engine(POSTGRES)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    schema_url = make_url(POSTGRES).update_query_dict({"options": f"-csearch_path={schema}"})
    yield schema_url.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


ENGINES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "sqlite": sqlite_file,
    "postgresql": postgresql_schema,
}
"""Each makes an empty database and yields its URL."""


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of one engine."""
    with ENGINES[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def environment() -> Environment:
    return ENVIRONMENT


@pytest.fixture
def database(url: str, environment: Environment) -> Iterator[Database]:
    """A database that knows `environment`."""
    with open_database(url) as opened:
        opened.remember(environment)
        yield opened


@pytest.fixture(scope="session")
def make_call() -> Callable[..., Call]:
    """Calls that differ by their block, and by kernel and kinds where these are given."""

    def make(block: int, kernel: str = "softmax", kinds: tuple[str, ...] = ("softmax",)) -> Call:
        nodes = tuple(Node(kind, "ab->ab", (i,), (i + 1,)) for i, kind in enumerate(kinds))
        tensors = (TensorType((2, 3), "float32"),) * (len(kinds) + 1)
        subgraph = Subgraph(nodes, tensors, (0,), (len(kinds),))
        return Call(subgraph, Candidate(kernel, ("ab", "ba"), (("block", block),)))

    return make
