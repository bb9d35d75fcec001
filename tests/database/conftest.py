"""A fresh database for each test, of each engine: an SQLite file, and a schema of a PostgreSQL server."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from autotuner.database import Database, open_database
from autotuner.ir.records import Call, Candidate, Environment, Node, Subgraph, TensorType
from tests.postgresql import schema

ENVIRONMENT = Environment("cpu", "Xeon", (("torch", "2.13"), ("cores", 2), ("bf16", True)), (("cache", "warm"),))


ENGINES = ("sqlite", "postgresql")


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of one engine."""
    is_file = request.param == "sqlite"
    made = (
        nullcontext(f"sqlite:///{tmp_path}/timings.sqlite")
        if is_file
        else schema(request.getfixturevalue("postgresql"))
    )
    with made as found:
        yield found


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
