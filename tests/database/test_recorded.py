"""Measurements that come with the package: of one device each, and of kernels as they are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import autotuner.kernels.rules  # noqa: F401  # registers every kernel
from autotuner.database import Database, Filter, open_database
from autotuner.database.recorded import ENDING, recordings, unpacked
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import named_model
from autotuner.kernels import KERNELS
from autotuner.space import build_space, space_file
from autotuner.tuner.twins import known_twins


@pytest.fixture(params=recordings(), ids=lambda path: path.name)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Database]]:
    with unpacked(request.param) as file, open_database(file, make=False) as database:
        yield request.param, database


@pytest.mark.slow
def test_a_recording_is_of_one_device_and_of_kernels_as_they_are(opened: tuple[Path, Database]) -> None:
    path, database = opened
    (environment,) = database.environments()
    assert path.name == environment.device_name.lower().replace(" ", "-") + ENDING
    found = database.measurements(Filter(environment.key), limit=100_000)
    assert len(found) > 5000
    assert {each.measurement.status for each in found} == {"ok"}
    stale = {c.kernel for c in (each.call.candidate for each in found) if KERNELS[c.kernel].version != c.version}
    assert not stale, f"leave out what they were timed for: scripts/record_measurements {path} --output {path}"
    assert not database.configurations.listed(limit=1)


@pytest.mark.slow
def test_with_another_driver_each_search_of_a_known_layer_begins_with_what_is_recorded(
    opened: tuple[Path, Database],
) -> None:
    _, database = opened
    (environment,) = database.environments()
    other = replace(environment, facts=tuple((dict(environment.facts) | {"driver": "another"}).items()))
    model = named_model("bert-encoder:large", dtype="bfloat16", extents={"b": 12})
    space = build_space(training_graph(model.graph()), space_file(environment.device_type), vendor=environment.vendor)
    twins = known_twins(space, database, other)
    assert sum(bool(twins.starts(cell)) for cell in space.cells) >= len(space.cells) // 2
    assert len(twins.expected_us(space.calls)) > 0.5 * len(space.calls)
    assert not database.find(other.key, list(space.calls))
