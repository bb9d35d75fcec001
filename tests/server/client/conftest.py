"""A service that a test writes: answers by method and path, without a network and without waiting."""

import pytest

from autotuner.server import client
from tests.server.client.pretended import Pretended


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """A service that has no answers yet; pauses are counted, not made."""
    made = Pretended()
    monkeypatch.setattr("autotuner.server.client.transport.sleep", made.pauses.append)
    monkeypatch.setattr("autotuner.server.client.client.sleep", made.pauses.append)
    return made


@pytest.fixture
def asked(service: Pretended) -> client.Client:
    """A client of that service."""
    return client.Client("http://service", transport=service.transport)
