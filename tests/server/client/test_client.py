"""What a client asks for, and what it makes of the answers."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
import pytest

from autotuner.errors import ConfigurationError, InputError, JobStateError, ModelError, NotFoundError, ServiceError
from autotuner.ir.models import load_model
from autotuner.plan.explanation import explain_operator, explain_tensor
from autotuner.server.client import Client
from autotuner.settings import Limits
from tests.made_up import LAYER, made_up_configuration, small_model
from tests.plan.explained import explained_configuration
from tests.server.client.pretended import MEASUREMENT, Pretended, job, problem

BEST = "GET /v1/configurations/best"


def sent(service: Pretended) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(service.requests[-1].content)
    return body


def asked_for(service: Pretended) -> dict[str, str]:
    return dict(service.requests[-1].url.params)


def view(configuration: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a configuration as the service sends it."""
    return {
        "id": 7, "dtype": "float32", "extents": {"b": 2}, "complete": True, "device_type": "cpu",
        "device_name": "made up", "environment_key": "e", "predicted_us": 10.0, "measured_us": None,
        "created_at": "2026-11-20T10:00:00Z", "configuration": configuration,
    } | changes  # fmt: skip


def answer(match: str = "exact", differs: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"match": match, "differs": list(differs), "message": "", "best": None if match == "none" else view({})}


def test_the_client_is_offered_without_torch() -> None:
    program = "import sys, autotuner; autotuner.Client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Jobs


def test_a_job_of_a_known_model_is_submitted_by_name(service: Pretended, asked: Client) -> None:
    service.on("POST /v1/jobs", httpx2.Response(201, json=job()))
    made = asked.submit(
        "bert-encoder:tiny", extents={"l": 32}, options={"activation": "relu"}, dtype="bfloat16",
        device_name="Xeon", gap=0.1, estimated_gap=0.01, budget_bytes=512, exhaustive=True, max_seconds=60,
        max_measurements=9, again=True, retry=True, end_to_end=False,
    )  # fmt: skip
    assert (made.id, made.state) == (3, "queued")
    assert sent(service) == {
        "model": "bert-encoder", "preset": "tiny", "extents": {"l": 32}, "options": {"activation": "relu"},
        "dtype": "bfloat16", "device": {"type": "cpu", "name": "Xeon"}, "gap": 0.1,
        "estimated_gap": 0.01, "budget_bytes": 512, "exhaustive": True,
        "limits": {"seconds": 60.0, "measurements": 9}, "again": True, "retry": True, "remeasure": False,
        "end_to_end": False, "priority": 0,
    }  # fmt: skip
    asked.submit("bert-encoder:tiny", numerics="8-bit")
    assert sent(service)["numerics"] == "8-bit"


def test_limits_that_are_given_twice_are_refused(asked: Client) -> None:
    with pytest.raises(InputError, match="limits are given twice"):
        asked.submit("bert-encoder:tiny", limits=Limits(measurements=5), max_seconds=60)


def test_a_model_file_is_sent_along(service: Pretended, asked: Client, tmp_path: Path) -> None:
    service.on("POST /v1/jobs", httpx2.Response(201, json=job()))
    path = tmp_path / "small.yaml"
    path.write_text(LAYER)
    asked.submit(f"{path}:wide")
    assert sent(service)["preset"] == "wide"
    assert sent(service)["model"] == load_model(str(path)).definition.model_dump(mode="json", exclude_none=True)
    asked.submit(path, preset="wide")
    assert sent(service)["preset"] == "wide"
    asked.submit({"name": "mine"}, extents={"b": 2})
    assert (sent(service)["model"], sent(service)["preset"]) == ({"name": "mine"}, None)


@pytest.mark.parametrize(
    "arguments, kind, sentence",
    [
        ({"model": "bert-encoder:"}, ModelError, "is no model: write"),
        ({"model": "none.yaml"}, ModelError, "none.yaml: cannot be read"),
        ({"model": "bert-encoder:tiny", "preset": "base"}, ModelError, "names preset 'tiny', and preset is 'base'"),
        ({"model": "bert-encoder", "extents": {"l": 0}}, InputError, r"extents.l is 0: .* greater than or equal to 1"),
        ({"model": "bert-encoder", "gap": -1}, InputError, "gap is -1: "),
        ({"model": "bert-encoder", "max_seconds": 0}, InputError, r"limits\.seconds is 0: "),
    ],
)
def test_what_no_service_takes_is_refused_before_it_is_sent(
    service: Pretended, asked: Client, arguments: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        asked.submit(**arguments)
    assert service.requests == []


def test_jobs_come_page_after_page_and_no_more_than_asked_for(service: Pretended, asked: Client) -> None:
    def page(request: httpx2.Request) -> httpx2.Response:
        newest = int(request.url.params.get("before", 8)) - 1
        ids = range(newest, max(0, newest - min(3, int(request.url.params["limit"]))), -1)
        items = [job(id=i) for i in ids]
        return httpx2.Response(200, json={"items": items, "next": ids[-1] if ids[-1] > 1 else None})

    service.on("GET /v1/jobs", page)
    assert [found.id for found in asked.jobs(state="queued")] == [7, 6, 5, 4, 3, 2, 1]
    assert [request.url.params.get("before") for request in service.requests] == [None, "5", "2"]
    assert asked_for(service)["state"] == "queued"
    assert [found.id for found in asked.jobs(limit=4)] == [7, 6, 5, 4]
    assert asked_for(service)["limit"] == "1"
    assert list(asked.jobs(limit=0)) == []


def test_waiting_ends_with_the_job_however_it_ends(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/jobs/3", job(), job(state="running"), job(state="failed", message="no plan"))
    assert asked.wait(3).message == "no plan"
    assert service.pauses == [0.2, 0.4]


def test_waiting_bridges_a_service_that_is_started_anew(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/jobs/3", job(), *[httpx2.ConnectError("refused")] * 9, job(state="finished"))
    assert asked.wait(3).state == "finished"


def test_waiting_for_longer_than_asked_for_is_an_error_that_says_how_far_the_job_is(service: Pretended) -> None:
    service.on("GET /v1/jobs/3", job(state="running"))
    with pytest.raises(JobStateError, match=r"^job 3 is running after 5 s: wait longer, or cancel it$"):
        service.client(clock=service.ticking(1.0)).wait(3, timeout_s=5)
    assert sum(service.pauses) <= 5


def test_waiting_for_a_service_that_fails_is_given_up_at_once(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/jobs/3", problem(500, "it broke"))
    with pytest.raises(ServiceError, match="it broke"):
        asked.wait(3)
    assert service.pauses == []


# Configurations


def test_a_configuration_comes_ready_to_run(service: Pretended, asked: Client, tmp_path: Path) -> None:
    found = made_up_configuration(small_model(tmp_path))
    service.on("GET /v1/configurations/7", view(found.to_json()))
    assert asked.configuration(7) == found


def test_a_configuration_of_another_version_is_refused_with_its_origin(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/configurations/7", view({"schema": 99}))
    with pytest.raises(ConfigurationError, match="http://service/v1/configurations/7: its schema version is 99"):
        asked.configuration(7)


def test_the_best_of_neither_or_both_of_model_and_family_is_refused(asked: Client) -> None:
    with pytest.raises(InputError, match="give a model, or the family of a job"):
        asked.best()
    with pytest.raises(InputError, match="give a model, or the family of a job"):
        asked.best("bert-encoder", family="f")


# What is known


def test_measurements_come_page_after_page(service: Pretended, asked: Client) -> None:
    service.on(
        "GET /v1/measurements",
        {"items": [MEASUREMENT, MEASUREMENT | {"id": 5}], "next": 5, "statistics": None},
        {"items": [MEASUREMENT | {"id": 6, "status": "refused", "median_us": None}], "next": None, "statistics": None},
    )
    found = list(asked.measurements(kernel="torch_bias", limit=5))
    assert [(m.id, m.status) for m in found] == [(1, "ok"), (5, "ok"), (6, "refused")]
    assert asked_for(service) == {"kernel": "torch_bias", "after": "5", "limit": "3"}


# Why


def test_an_explanation_is_the_value_that_the_service_made(service: Pretended, asked: Client, tmp_path: Path) -> None:
    found = explained_configuration(small_model(tmp_path))
    operator, tensor = explain_operator(found, "product"), explain_tensor(found, "grad_biased")
    service.on("GET /v1/configurations/7/operators/product", asdict(operator) | {"of a later version": 1})
    service.on("GET /v1/configurations/7/tensors/grad_biased", asdict(tensor))
    assert asked.explain_operator(7, "product") == operator
    assert asked.explain_tensor(7, "grad_biased") == tensor


def test_a_name_with_odd_characters_stays_one_part_of_the_path(service: Pretended, asked: Client) -> None:
    service.on("GET /v1/configurations/7/operators/a/../b?", problem(404, "no operator 'a/../b?'"))
    with pytest.raises(NotFoundError, match="no operator"):
        asked.explain_operator(7, "a/../b?")
    assert service.requests[-1].url.raw_path == b"/v1/configurations/7/operators/a%2F..%2Fb%3F"
