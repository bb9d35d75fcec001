"""A fresh database for each test: a file, and a PostgreSQL schema as well where AUTOTUNER_TEST_POSTGRES is a URL."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, make_url, text

from autotuner.database import Database, open_database
from autotuner.ir.records import Call, Candidate, Environment, Node, Subgraph, TensorType

POSTGRES = os.environ.get("AUTOTUNER_TEST_POSTGRES")
HOLDING = Path(__file__).with_name("holding.py")
ENVIRONMENT = Environment("cpu", "Xeon", (("torch", "2.13"), ("cores", 2), ("bf16", True)), (("cache", "warm"),))


@pytest.fixture(params=["sqlite", "postgresql"] if POSTGRES else ["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/timings.sqlite"
        return
    assert POSTGRES is not None
    schema = f"test_{uuid4().hex}"
    engine = create_engine(POSTGRES)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    schema_url = make_url(POSTGRES).update_query_dict({"options": f"-csearch_path={schema}"})
    yield schema_url.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


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


@pytest.fixture
def start_holding(url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `holding.py` on the test's database; what still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HOLDING), url, *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
