"""What is known, over HTTP: measurements, devices, models, health, and where people land."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from autotuner.database import Database, FleetGpu
from tests.server.http.filled import ELSEWHERE, HERE, WORKER, call


@pytest.mark.usefixtures("filled")
def test_measurements_come_in_pages_in_the_order_of_their_ids(asked: TestClient) -> None:
    first = asked.get("/v1/measurements", params={"limit": 2}).json()
    second = asked.get("/v1/measurements", params={"limit": 2, "after": first["next"]}).json()
    assert [[found["id"] for found in page["items"]] for page in (first, second)] == [[1, 2], [3]]
    assert (second["next"], second["statistics"]) == (None, None)


@pytest.mark.usefixtures("filled")
def test_measurements_are_filtered_by_each_of_their_facts(asked: TestClient) -> None:
    gelu = call("gelu_erf")
    wanted = {
        "signature": gelu.subgraph.signature,
        "kernel": "torch_gelu_erf",
        "kinds": "gelu_erf",
    }
    for name, value in wanted.items():
        items = asked.get("/v1/measurements", params={name: value}).json()["items"]
        assert [found["call_key"] for found in items] == [gelu.key]
    assert asked.get("/v1/measurements", params={"kinds": "bias+gelu_erf"}).json()["items"][0]["median_us"] == 2.0
    refused = asked.get("/v1/measurements", params={"status": "refused"}).json()["items"]
    assert [found["message"] for found in refused] == ["the row is too long"]
    for name, value, number in [
        ("environment_key", HERE.key, 3), ("environment_key", ELSEWHERE.key, 0), ("device_type", "cpu", 3),
        ("device_type", "cuda", 0),
    ]:  # fmt: skip
        assert len(asked.get("/v1/measurements", params={name: value}).json()["items"]) == number


@pytest.mark.usefixtures("filled")
def test_statistics_are_of_all_that_the_filters_admit(asked: TestClient) -> None:
    found = asked.get("/v1/measurements", params={"limit": 1, "statistics": "true"}).json()["statistics"]
    assert (found["statuses"]["ok"], found["statuses"]["refused"]) == (2, 1)
    assert (found["least_us"], found["mean_us"], found["greatest_us"]) == (2.0, 3.0, 4.0)


def test_a_gpu_that_takes_no_part_is_listed_with_the_reason(asked: TestClient, database: Database) -> None:
    reason = "3 actors failed within 300 s, the last: CUDA error: an illegal memory access was encountered"
    out = FleetGpu("9f3a/1", "cuda", "NVIDIA H200", False, reason, host="gpu-7", uuid="GPU-8f2c", canary_us=212.5)
    with database.locks.hold("fleet head:6379"):
        database.gpus.report("fleet head:6379", [replace(out, slot="9f3a/0", used=True, reason=""), out])
        (device,) = [device for device in asked.get("/v1/devices").json() if device["type"] == "cuda"]
        assert (device["name"], device["workers"], device["environments"]) == ("NVIDIA H200", [], [])
        assert [(gpu["slot"], gpu["used"], gpu["reason"]) for gpu in device["gpus"]] == [
            ("9f3a/0", True, ""), ("9f3a/1", False, reason),
        ]  # fmt: skip
        assert [device["gpus"][1][name] for name in ("host", "uuid", "canary_us")] == ["gpu-7", "GPU-8f2c", 212.5]
        page = asked.get("/metrics").text
        for state in ("used", "left_out"):
            assert f'autotuner_gpus{{device_type="cuda",state="{state}"}} 1.0' in page
    assert not any(device["gpus"] for device in asked.get("/v1/devices").json())


@pytest.mark.usefixtures("filled")
def test_devices_have_their_workers_and_what_was_measured_on_them(asked: TestClient) -> None:
    epyc, xeon = asked.get("/v1/devices").json()
    assert (epyc["name"], epyc["workers"], xeon["name"]) == ("EPYC", [], "Xeon")
    assert [worker["name"] for worker in xeon["workers"]] == [WORKER]
    assert xeon["environments"][0]["measurements"]["ok"] == 2
    assert xeon["environments"][0]["policy"] == {"cache": "warm"}


def test_models_have_axes_presets_and_options(asked: TestClient) -> None:
    found = {model["name"]: model for model in asked.get("/v1/models").json()}
    assert found["bert-encoder"]["presets"]["tiny"]["l"] == 64
    assert found["bert-encoder"]["axes"]["b"] == "batch"
    assert found["bert-encoder"]["options"]["activation"]["choices"] == ["gelu_erf", "gelu_tanh", "relu"]


@pytest.mark.usefixtures("filled")
def test_health_counts_jobs_and_workers(asked: TestClient) -> None:
    found = asked.get("/v1/healthz").json()
    assert (found["status"], found["queued"], found["running"], found["workers"]) == ("ok", 1, 1, 1)
    assert asked.get("/healthz").json() == found


def test_a_database_that_cannot_be_read_is_not_the_clients_fault_nor_its_business(
    asked: TestClient, database: Database, tmp_path: Path
) -> None:
    database.close()
    file = tmp_path / "service.sqlite"
    file.write_bytes(b"no database" * 1000)
    for path in ("/healthz", "/v1/jobs", "/v1/configurations/best?model=bert-encoder:tiny"):
        response = asked.get(path)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
        assert str(file) not in response.text


@pytest.mark.slow
def test_the_service_loads_no_torch() -> None:
    script = "import sys, autotuner.server.http; print(sorted({'torch', 'triton', 'cupy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
