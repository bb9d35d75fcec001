"""One small cluster of made-up GPUs: a job outlives an actor and the runner, with the answer of one quiet device."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import open_database
from autotuner.errors import MissingError
from autotuner.fleet import software
from autotuner.fleet.cluster import FleetDevices, connected
from autotuner.fleet.importing import imported
from autotuner.fleet.node import start_environment
from autotuner.fleet.software import own_software
from autotuner.fleet.spec import MeasurerSpec
from autotuner.fleet.tuning import Fleet, FleetTuning
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import load_model
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.settings import Settings, TuneOptions
from autotuner.space import build_space, space_file
from autotuner.tuner import Replay, tune
from scripts.bench.supervised import Supervised, titled
from tests.made_up import HERE, feed_forward, times, without_compilers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]

WAIT_S = 120.0
ROOT = Path(__file__).parents[2]
SPEC = MeasurerSpec("tests.fleet.made_up_gpu:made_up_gpu", {"seconds": 0.07})


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with connected(gpus=2):
        yield


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Supervised]:
    """A runner of the cluster, on an empty database, which is started anew when it was killed."""
    address = imported().get_runtime_context().gcs_address
    command = [
        sys.executable, "-m", "autotuner.cli", "worker", "--fleet", "--address", address, "--device", "cuda",
        "--space", str(without_compilers(tmp_path)), "--measurer", SPEC.factory, "--measurer-arguments",
        json.dumps(SPEC.arguments),
    ]  # fmt: skip
    environment = {
        **start_environment(os.environ), "AUTOTUNER_DATABASE": f"sqlite:///{tmp_path}/jobs.sqlite",
        "AUTOTUNER_LOG_FORMAT": "json", "AUTOTUNER_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    with Supervised(command, environment, tmp_path / "runner.log", pause_s=0.1) as kept:
        yield kept


@pytest.mark.usefixtures("cluster")
def test_a_job_loses_nothing_when_an_actor_and_the_runner_are_killed(runner: Supervised, tmp_path: Path) -> None:
    model = load_model(str(feed_forward(tmp_path))).instantiate("small")
    file = space_file("cpu", without_compilers(tmp_path))
    known = times(build_space(training_graph(model.graph()), file).calls)
    request = Request(model, "cpu", options=TuneOptions(exhaustive=True, end_to_end=False))
    with open_database(tmp_path / "quiet.sqlite") as quiet:
        expected = tune(request, file, quiet, Replay(HERE, known)).configuration
    with open_database(tmp_path / "jobs.sqlite") as database:
        database.queue.enqueue(
            model=request.model.reference, request=request.to_json(), device_type=request.device_type
        )

        def stored() -> int:
            return sum(database.statistics().statuses.values())

        until(lambda: stored() > 0.1 * len(known))
        os.kill(titled("ray::GpuActor")[0], signal.SIGKILL)
        until(lambda: stored() > 0.4 * len(known))
        runner.kill()
        until(lambda: database.queue.job(1).ended)
        job = database.queue.job(1)
        assert (job.state, job.attempt, runner.starts) == ("finished", 2, 2), job.message
        assert job.configuration_id is not None
        assert job.counts["reused"] > 0.4 * len(known)
        found = database.measurements()
        assert len(found) == len(known)
        assert {each.call.key: each.measurement for each in found} == known
        answer = Configuration.from_json(json.loads(database.configurations.get(job.configuration_id).text))
        assert steps_of(answer) == steps_of(expected)
        until(lambda: [gpu.used for gpu in database.gpus.all()] == [True, True])  # told as a task ends


@pytest.mark.usefixtures("cluster")
def test_hosts_with_other_software_are_no_devices_of_the_cluster_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = own_software()
    monkeypatch.setattr(software, "own_software", lambda: "0.1.0 (000000000000)")
    devices = FleetDevices(SPEC)
    until(lambda: not devices.known() and bool(devices.failing()))
    (row,) = devices.failing()
    assert (row.used, row.device_type) == (False, "cuda")
    assert f"its version and sources are {mine}, and those of the tuning are 0.1.0" in row.reason
    monkeypatch.undo()
    until(lambda: bool(devices.known()))
    assert devices.failing() == []


@pytest.mark.usefixtures("cluster")
def test_two_jobs_at_once_time_what_they_have_in_common_once(tmp_path: Path) -> None:
    model = load_model(str(feed_forward(tmp_path))).instantiate("small")
    file = space_file("cpu", without_compilers(tmp_path))
    request = Request(model, "cpu", options=TuneOptions(exhaustive=True, end_to_end=False))
    start = threading.Barrier(2)
    fleet = Fleet(factory=SPEC.factory, arguments={"seconds": 0.01})

    def run(_number: int) -> Mapping[str, int]:
        with open_database(tmp_path / "jobs.sqlite") as database:
            start.wait(WAIT_S)
            with FleetTuning(fleet, request, Settings()).measuring() as measurer, database.writing_behind():
                return tune(request, file, database, measurer).configuration.counts

    with open_database(tmp_path / "jobs.sqlite") as database:
        with ThreadPoolExecutor(2) as both:
            counts = list(both.map(run, range(2)))
        rows = len(database.measurements())
    assert rows == len(build_space(training_graph(model.graph()), file).calls)
    assert sum(each["measured"] for each in counts) <= 1.02 * rows
    assert all(each["measured"] + each["reused"] == rows for each in counts)


@pytest.mark.usefixtures("cluster")
def test_the_token_of_ones_own_cluster_is_private() -> None:
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def steps_of(answer: Configuration) -> list[dict[str, Any]]:
    """Return the steps of a plan; how many alternatives are found depends on the time that there is for them."""
    steps: list[dict[str, Any]] = answer.to_json()["steps"]
    return [{name: value for name, value in step.items() if name != "alternative"} for step in steps]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match=r"install \"autotuner\[fleet\]\""):
        imported()
