"""A database file that was written at the commit at which these tests began: it is read as ever, and tuned on.

See `tests.frozen.golden` for goldens in general. The file stands for those of earlier versions: where a later version
writes another one, it is added beside it under a name of its own.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from autotuner.database import Database, open_database
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.settings import TuneOptions
from autotuner.tuner import Replay, tune
from tests.frozen.golden import FROZEN, TINY, assert_same, golden, write_golden
from tests.tuner.asking import Asking

PACKED = FROZEN / "database.sqlite.gz"
HOLDS = "database_configuration.json.gz"
REQUEST = Request(TINY.model, options=TuneOptions(exhaustive=True, end_to_end=False))
WORKER = "a worker"
ENVIRONMENT = TINY.environment


def write() -> None:
    """Write the file: the tiny sweep, tuned by replay, a job that ended so, one that failed, and one that waits."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "database.sqlite"
        with open_database(file) as database:
            queue, name = database.queue, ENVIRONMENT.device_name
            asked: dict[str, Any] = {"model": TINY.model.reference, "request": REQUEST.to_json(), "device_type": "cpu"}
            jobs = [queue.enqueue(**asked) for _ in range(3)]
            queue.claim(WORKER, [("cpu", name)])
            found = tune(REQUEST, TINY.file, database, Replay(ENVIRONMENT, TINY.measurements, TINY.ceilings))
            counts = found.configuration.counts
            queue.finish(jobs[0].id, 1, "finished", counts=counts, configuration_id=found.id)
            queue.claim(WORKER, [("cpu", name)])
            queue.finish(jobs[1].id, 1, "failed", message="no plan fits")
            write_golden(HOLDS, found.configuration.to_json())
        PACKED.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """The file, opened."""
    file = tmp_path / "database.sqlite"
    file.write_bytes(gzip.decompress(PACKED.read_bytes()))
    with open_database(file) as opened:
        yield opened


@pytest.mark.slow
def test_it_knows_the_environment_and_every_measurement(database: Database) -> None:
    assert [environment.key for environment in database.environments()] == [ENVIRONMENT.key]
    calls, recorded = TINY.space().calls, TINY.measurements
    assert database.find(ENVIRONMENT.key, tuple(calls)) == {key: recorded[key] for key in calls}
    assert TINY.ceilings.to_facts().items() <= database.facts(ENVIRONMENT.key).items()
    held = {stored.call.key: stored for stored in database.measurements()}
    assert held.keys() == calls.keys()
    assert {key: stored.call for key, stored in held.items()} == calls


def test_it_finds_the_configuration_by_what_somebody_wants_to_run(database: Database) -> None:
    expected = golden(HOLDS)
    model = TINY.model
    match = database.configurations.best(
        family_key=model.family, dtype=model.dtype, extents=model.extents, device_type="cpu", device_name=None
    )
    assert match.status == "exact"
    assert match.stored is not None
    assert match.stored.id == 1
    assert_same(json.loads(match.stored.text), expected)
    assert Configuration.from_json(json.loads(match.stored.text)).to_json() == expected


def test_it_holds_the_jobs_as_they_were(database: Database) -> None:
    waits, failed, finished = database.queue.jobs()
    assert [job.state for job in (waits, failed, finished)] == ["queued", "failed", "finished"]
    assert (failed.message, finished.worker, finished.configuration_id) == ("no plan fits", WORKER, 1)
    assert finished.counts == golden(HOLDS)["counts"]
    assert Request.from_json(finished.request) == REQUEST
    (claimed,) = database.queue.claim("another", [("cpu", ENVIRONMENT.device_name)])
    assert claimed.id == waits.id


@pytest.mark.slow
def test_the_same_request_is_solved_again_once_and_then_answered_from_it(database: Database) -> None:
    """Its key held the dotted paths of implementations when the file was written; since then it does not."""
    silent = Asking({}, ENVIRONMENT, ceilings=TINY.ceilings)
    found, again = (tune(REQUEST, TINY.file, database, silent) for _ in range(2))
    assert silent.asked == silent.confirmed == silent.compiled == []
    assert (found.id, again.id) == (2, 2)
    assert found.configuration.key == Configuration.from_json(golden(HOLDS)).key
    assert found.configuration.counts["measured"] == 0


@pytest.mark.slow
def test_solving_anew_asks_the_measurer_for_nothing_and_gives_the_same_plan(database: Database) -> None:
    silent = Asking({}, ENVIRONMENT, ceilings=TINY.ceilings)
    again = Request(TINY.model, options=TuneOptions(exhaustive=True, again=True, end_to_end=False))
    found = tune(again, TINY.file, database, silent).configuration
    assert silent.asked == silent.confirmed == silent.compiled == []
    expected = Configuration.from_json(golden(HOLDS))
    assert found.key == expected.key
    assert found.certificate.predicted_us == pytest.approx(expected.certificate.predicted_us, rel=1e-9)
