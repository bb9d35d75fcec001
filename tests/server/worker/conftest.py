"""A small model, a database, and a replay of made-up times in the place of the device."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotuner.database import Database, open_database
from autotuner.ir.models import Model
from autotuner.ir.records import Measurement
from autotuner.server.worker import attending, loop
from tests.made_up import HERE, small_model, space_of, times
from tests.server.worker.device import Device


@pytest.fixture
def small(tmp_path: Path) -> Model:
    return small_model(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with open_database(path) as opened:
        yield opened


@pytest.fixture
def measured(small: Model, monkeypatch: pytest.MonkeyPatch) -> dict[str, Measurement]:
    """What the device will answer; a test may change it before a job runs."""
    known = times(space_of(small).calls)
    for module in (attending, loop):
        monkeypatch.setattr(module, "Measurer", lambda **_: Device(HERE, known))
    monkeypatch.setattr(loop, "LOOK_S", 0.01)
    return known
