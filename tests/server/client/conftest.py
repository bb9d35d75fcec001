"""A service that a test writes: answers by method and path, without a network and without waiting."""

import pytest

from autotuner.server.client import Client
from tests.server.client.pretended import Pretended


@pytest.fixture
def service() -> Pretended:
    """A service that has no answers yet."""
    return Pretended()


@pytest.fixture
def asked(service: Pretended) -> Client:
    """A client of that service."""
    return service.client()
