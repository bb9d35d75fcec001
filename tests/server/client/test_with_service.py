"""Client, service and worker together over HTTP on this machine; only the device is replayed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from autotuner.database import Database, open_database
from autotuner.errors import InputError, JobStateError, ModelError, NotFoundError
from autotuner.ir.models import Model
from autotuner.server.client import Client
from autotuner.server.wire.responses import JobView
from autotuner.server.worker import attending, loop, run
from tests.made_up import HERE, LAYER, small_model, space_of, times
from tests.server.client.served import PATIENCE_S, Served
from tests.server.worker.device import Device

pytestmark = pytest.mark.slow


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "service.sqlite") as opened:
        yield opened


@pytest.fixture
def service(database: Database) -> Iterator[Served]:
    served = Served(database)
    yield served
    served.stop()


@pytest.fixture
def client(service: Served) -> Iterator[Client]:
    with Client(service.url, timeout_s=PATIENCE_S) as made:
        yield made


@pytest.fixture
def small(tmp_path: Path) -> Model:
    return small_model(tmp_path)


@pytest.fixture
def reference(small: Model, tmp_path: Path) -> str:
    """The path of the small model's file, with its preset."""
    return f"{tmp_path / 'small.yaml'}:{small.preset}"


@pytest.fixture
def work(small: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[threading.Thread]:
    """A worker that runs what waits, and ends; a test starts it."""
    known = times(space_of(small).calls)
    for module in (attending, loop):
        monkeypatch.setattr(module, "Measurer", lambda **_: Device(HERE, known))
    monkeypatch.setattr(loop, "LOOK_S", 0.01)
    thread = threading.Thread(target=run, args=(tmp_path / "service.sqlite",), kwargs={"once": True})
    yield thread
    if thread.ident is not None:
        thread.join(PATIENCE_S)


@pytest.mark.slow
def test_a_model_file_is_submitted_followed_and_its_configuration_found_as_the_best(
    client: Client, reference: str, small: Model, work: threading.Thread
) -> None:
    job = client.submit(reference, end_to_end=False)
    assert (job.state, job.model, job.extents) == ("queued", "small:wide", {"b": 2, "h": 3, "f": 4})
    told: list[JobView] = []
    for seen in client.events(job.id):
        told.append(seen)
        if len(told) == 1:
            work.start()
    assert (told[0].state, told[-1].state) == ("queued", "finished")
    assert [seen.revision for seen in told] == sorted({seen.revision for seen in told})
    assert client.wait(job.id, PATIENCE_S) == client.job(job.id) == told[-1]

    found = client.configuration(told[-1].configuration_id or 0)
    assert found.model == small
    for asked in (
        client.best(reference),
        client.best({**small.definition}, extents=small.extents),
        client.best(family=job.family, extents=small.extents, dtype="float32"),
    ):
        assert (asked.match, asked.differs) == ("exact", [])
        assert asked.best is not None
        assert asked.best.configuration == found.to_json()
    near = client.best(reference, extents={"b": 5})
    assert (near.match, near.differs) == ("near_shape", ["extents.b"])
    assert client.best(reference, device_name="another").match == "near_device"
    assert client.best(reference, dtype="bfloat16").match == "none"


@pytest.mark.slow
def test_events_and_waiting_outlive_a_service_that_is_started_anew(
    service: Served, client: Client, reference: str, work: threading.Thread
) -> None:
    job = client.submit(reference, end_to_end=False)
    waited: list[JobView] = []
    waiting = threading.Thread(target=lambda: waited.append(client.wait(job.id)))
    told = []
    for seen in client.events(job.id):
        told.append(seen)
        if len(told) == 1:
            waiting.start()
            service.stop()
            service.start()
            work.start()
    waiting.join(PATIENCE_S)
    assert [seen.state for seen in told][:: len(told) - 1] == ["queued", "finished"]
    assert [found.state for found in waited] == ["finished"]


@pytest.mark.slow
def test_what_is_known_is_listed(client: Client, reference: str, small: Model, work: threading.Thread) -> None:
    client.submit(reference, end_to_end=False)
    assert (client.health().queued, client.health().workers) == (1, 0)
    work.start()
    work.join(PATIENCE_S)
    calls = space_of(small).calls
    measured = list(client.measurements())
    assert {found.call_key for found in measured} <= set(calls)
    assert [found.id for found in client.measurements(limit=3)] == [found.id for found in measured[:3]]
    kernel = measured[0].kernel
    some = [found for found in measured if found.kernel == kernel]
    assert [found.id for found in client.measurements(kernel=kernel)] == [found.id for found in some]
    statistics = client.statistics(kernel=kernel, status="ok")
    assert statistics.statuses["ok"] == len(some)
    assert statistics.least_us == min(found.median_us or 0 for found in some)
    devices = {device.name: device for device in client.devices()}
    assert devices[HERE.device_name].environments[0].key == HERE.key
    assert "bert-encoder" in {model.name for model in client.models()}


def test_jobs_are_listed_page_after_page_and_cancelled(client: Client, reference: str) -> None:
    client.page_max = 2
    ids = [client.submit(reference).id for _ in range(5)]
    assert [job.id for job in client.jobs()] == ids[::-1]
    assert [job.id for job in client.jobs(limit=3)] == ids[:1:-1]
    assert client.cancel(ids[0]).state == client.cancel(ids[0]).state == "cancelled"
    assert [job.id for job in client.jobs(state="cancelled")] == ids[:1]
    assert [seen.state for seen in client.events(ids[0])] == ["cancelled"]


@pytest.mark.slow
def test_what_the_service_refuses_is_an_error_of_the_tree(
    client: Client, reference: str, work: threading.Thread
) -> None:
    job = client.submit(reference, end_to_end=False)
    work.start()
    work.join(PATIENCE_S)
    with pytest.raises(JobStateError, match=f"job {job.id} is finished already"):
        client.cancel(job.id)
    with pytest.raises(NotFoundError, match="no job 99: GET /v1/jobs lists those that there are"):
        client.job(99)
    with pytest.raises(NotFoundError, match="no job 99"):
        list(client.events(99))
    with pytest.raises(NotFoundError, match="no configuration 99"):
        client.configuration(99)
    with pytest.raises(NotFoundError, match=r"no model 'gpt'; known: .*bert-encoder"):
        client.submit("gpt:tiny")
    with pytest.raises(ModelError, match="no axis 'z'"):
        client.submit("bert-encoder:tiny", extents={"z": 1})
    with pytest.raises(ModelError, match="'swish'; it must be one of"):
        client.best("bert-encoder:tiny", options={"activation": "swish"})
    with pytest.raises(InputError, match="operators"):
        client.submit({"name": "empty"})
    with pytest.raises(JobStateError, match=r"job \d+ is queued after 0.01 s"):
        client.wait(client.submit(yaml.safe_load(LAYER), preset="wide").id, timeout_s=0.01)
