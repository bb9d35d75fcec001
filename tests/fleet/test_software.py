"""Hosts with other sources of this package take no part: they would measure something else under the same key."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import FleetGpu
from autotuner.errors import MeasureError
from autotuner.fleet.fleet_measurer import FleetMeasurer
from autotuner.fleet.roster import Gpu, Roster, gpu_from_json, gpu_to_json
from autotuner.fleet.software import ROOT, own_software
from autotuner.fleet.spec import MeasurerSpec
from tests.fleet.calls import H100, H200, Clock, PlannedPool, calls, gpu

OPEN = """
import json, sys
from autotuner.fleet.actor import BenchActor
actor = BenchActor("other/0")
print(json.dumps([json.loads(actor.open(sys.argv[1]))["gpu"], json.loads(actor.look(sys.argv[1]))]))
actor.close()
"""


def opened_by(package: Path) -> tuple[Gpu, str]:
    """Return the GPU of an actor on a host that has a copy of this package, and the software that it tells."""
    paths = os.pathsep.join([str(package.parent), str(ROOT.parent)])
    spec = MeasurerSpec("scripts.replaying:replaying", {"seconds": 0.0}).to_text()
    ran = subprocess.run(
        [sys.executable, "-c", OPEN, spec], env={**os.environ, "PYTHONPATH": paths}, cwd=package.parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found, looked = json.loads(ran.stdout)
    return gpu_from_json(found), looked["software"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", ["kernels/cupy/softmax.cuh", "kernels/cpp/vectors.h", "measure/timer.py", "ir/cost.py"]
)
def test_an_actor_with_other_sources_is_left_out_and_one_with_the_same_is_not(tmp_path: Path, changed: str) -> None:
    package = tmp_path / "autotuner"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__"))
    same, told = opened_by(package)
    assert same.software == told == own_software()
    source = next((package / changed).parent.glob("*.cuh")) if changed.endswith(".cuh") else package / changed
    source.write_text(source.read_text() + "\n")
    other, _ = opened_by(package)
    roster = Roster()
    for each in (other, replace(same, slot="same/0")):
        roster.join(each)
    assert [each.slot for each in roster.usable(0.0)] == ["same/0"]
    assert roster.why_not("other/0", 0.0) == (
        f"another autotuner: its version and sources are {other.software}, and those of the tuning are "
        f"{own_software()}; install the same on all hosts"
    )
    assert other.software.startswith(version("autotuner"))


def test_the_first_gpu_to_join_makes_no_class_where_its_software_is_another() -> None:
    roster = Roster()
    roster.join(replace(gpu(0, H100), software="0.1.0 (000000000000)"))
    assert roster.is_hopeless(0.0)
    roster.join(gpu(1, H200))
    assert [each.slot for each in roster.usable(0.0)] == ["one/1"]
    assert roster.environment == H200
    (left_out, _) = roster.shown(0.0)
    assert (left_out.used, left_out.device_name) == (False, "NVIDIA H100")
    assert left_out.reason.startswith("another autotuner: its version and sources are 0.1.0 (000000000000), and")


def test_an_actor_of_a_version_that_tells_nothing_is_left_out() -> None:
    value = gpu_to_json(gpu(0))
    del value["software"]
    roster = Roster()
    roster.join(gpu_from_json({**value, "something": "later"}))
    assert "its version and sources are of before this was told" in roster.why_not("one/0", 0.0)


def test_nothing_is_sent_to_other_software_and_it_is_said_in_log_report_and_error() -> None:
    clock = Clock()
    log: list[tuple[str, dict[str, Any]]] = []
    reports: list[Sequence[FleetGpu]] = []
    other = replace(gpu(1), software="0.1.0 (000000000000)")
    pool = PlannedPool([gpu(0), other], clock)
    measurer = FleetMeasurer(
        pool,
        Roster(),
        gpus=2,
        clock=clock,
        log=lambda event, **facts: log.append((event, facts)),
        report=reports.append,
    )
    assert len(list(measurer.measure([calls(60)]))) == 60
    assert {slot for slot, *_ in pool.sent} == {"one/0"}
    said = {facts["gpu"]: facts["left_out"] for event, facts in log if event == "gpu_joined"}
    assert said["one/0"] == ""
    assert said["one/1"].startswith("another autotuner")
    assert [(row.slot, row.used, row.reason) for row in reports[-1]][1] == ("one/1", False, said["one/1"])
    with pytest.raises(MeasureError, match="no GPU of the fleet can measure: one one/1: another autotuner: "):
        FleetMeasurer(PlannedPool([other], clock), Roster(), clock=clock)
