"""One small cluster of made-up GPUs: actors that die, and a tuning by a runner, with the answer of one device."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from autotuner.errors import InputError
from autotuner.fleet.cluster import FleetDevices, connected, imported
from autotuner.fleet.fleet_measurer import FleetMeasurer
from autotuner.fleet.ray_pool import RayPool
from autotuner.fleet.roster import Roster
from autotuner.fleet.spec import MeasurerSpec
from autotuner.tuner.runner import races
from scripts.bench.supervised import titled
from scripts.recorded import TINY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]

ROOT = Path(__file__).parents[2]
SPEC = MeasurerSpec("scripts.replaying:replaying", {"seconds": 0.004, "recording": "tiny"})


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with connected(gpus=2):
        yield


@pytest.mark.usefixtures("cluster")
def test_actors_that_are_killed_cost_no_result_and_their_gpus_come_back() -> None:
    space, known = TINY.space(), TINY.measurements
    asked = list(races(space, set(space.calls)))
    joined: list[str] = []
    with FleetMeasurer(
        RayPool(SPEC), Roster(), gpus=2, log=lambda event, **facts: joined.append(f"{event} {facts['gpu']}")
    ) as measurer:
        assert (measurer.devices, measurer.environment.device_name) == (2, TINY.environment.device_name)
        found = {}
        for number, (call, measured) in enumerate(measurer.measure(asked)):
            found[call.key] = measured
            if number in (50, 150):
                os.kill(titled("ray::GpuActor")[0], signal.SIGKILL)
        assert found == {call.key: known[call.key] for race in asked for call in race}
        assert sum(event.startswith("gpu_lost") for event in joined) == 2
        assert sum(event.startswith("gpu_joined") for event in joined) >= 3
        assert measurer.noise_floor() == 0.0
    assert FleetDevices(SPEC).gpus == 2


@pytest.mark.usefixtures("cluster")
def test_a_deadly_call_is_crashed() -> None:
    space = TINY.space()
    (race,) = [race for race in races(space, set(space.calls)) if 10 <= len(race) <= 16][:1]
    deadly = replace(SPEC, arguments={**SPEC.arguments, "deadly": [race[3].key]})
    with FleetMeasurer(RayPool(deadly), Roster(), gpus=2) as measurer:
        found = {call.key: measured.status for call, measured in measurer.measure([race])}
    assert len(found) == len(race)
    assert [key for key, status in found.items() if status == "crashed"] == [race[3].key]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'autotuner\[fleet\]'"):
        imported()
