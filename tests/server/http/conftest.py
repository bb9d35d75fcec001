"""A service over a database that knows one device, some measurements, an answer, and a job of every state."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from autotuner.database import Database, open_database
from autotuner.plan.configuration import Configuration
from autotuner.server.http import create_app
from tests.made_up import made_up_configuration, small_model
from tests.server.http.filled import WORKER, fill


@pytest.fixture(scope="session")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Configuration:
    return made_up_configuration(small_model(tmp_path_factory.mktemp("small")))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A database without anything in it."""
    with open_database(tmp_path / "service.sqlite") as opened:
        yield opened


@pytest.fixture
def filled(database: Database, configuration: Configuration) -> Iterator[Database]:
    """The same database, filled, and with a worker that lives."""
    fill(database, configuration)
    with database.locks.hold(WORKER):
        yield database


@pytest.fixture
def asked(database: Database) -> Iterator[TestClient]:
    """Asks the service without a network."""
    app = create_app(database)
    with TestClient(app, "http://localhost", raise_server_exceptions=False, follow_redirects=False) as client:
        yield client
