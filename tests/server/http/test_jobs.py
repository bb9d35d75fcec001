"""Jobs over HTTP: submitted, listed, shown, cancelled."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from autotuner.database import Database
from autotuner.ir.models import load_model
from autotuner.ir.models.bounds import ELEMENTS_MAX
from autotuner.ir.records import Environment
from autotuner.plan.request import Request
from autotuner.server.http.examples import SMALL_MODEL, SUBMISSIONS
from autotuner.server.http.submissions import OPERATORS_MAX
from tests.server.http.filled import PROGRESS, TINY, enqueue


def test_a_job_that_is_submitted_waits_for_a_worker_and_is_found_where_it_is_said_to_be(
    asked: TestClient, database: Database
) -> None:
    body = {
        "model": "bert-encoder:tiny", "extents": {"l": 32}, "options": {"activation": "relu"}, "dtype": "float64",
        "device": {"type": "cpu", "name": "Xeon"}, "gap": 0.05, "estimated_gap": 0.01, "budget_bytes": 512,
        "exhaustive": True, "limits": {"seconds": 60, "measurements": 9}, "again": True, "retry": True,
        "end_to_end": False, "numerics": "8-bit",
    }  # fmt: skip
    response = asked.post("/v1/jobs", json=body)
    assert (response.status_code, response.headers["Location"]) == (201, "/v1/jobs/1")
    assert response.json() == asked.get("/v1/jobs/1").json()
    assert response.json()["state"] == "queued"
    request = Request.from_json(database.queue.job(1).request)
    options = request.options
    assert (request.model.reference, request.model.extents["l"], request.model.extents["h"]) == (
        TINY.reference,
        32,
        128,
    )
    assert (request.model.options["activation"], request.model.dtype, options.gap) == ("relu", "float64", 0.05)
    assert (options.estimated_gap, options.budget_bytes, options.exhaustive) == (0.01, 512, True)
    assert [response.json()[name] for name in ("estimated_gap", "budget_bytes", "exhaustive")] == [0.01, 512, True]
    assert (request.device_name, options.limits.seconds, options.limits.measurements) == ("Xeon", 60, 9)
    assert (options.again, options.retry, options.end_to_end) == (True, True, False)
    assert (request.numerics, response.json()["numerics"]) == ("8-bit", "8-bit")


SUBMITTED = {"model": "bert-encoder:tiny", "priority": 3}


def test_a_job_with_an_idempotency_key_is_stored_once(asked: TestClient, database: Database) -> None:
    first = asked.post("/v1/jobs", json=SUBMITTED, headers={"Idempotency-Key": '"a-key"'})
    again = asked.post("/v1/jobs", json=SUBMITTED, headers={"Idempotency-Key": "a-key"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    assert again.headers["Location"] == first.headers["Location"] == "/v1/jobs/1"
    assert (first.json()["priority"], first.json()["attempt"]) == (3, 0)
    other = asked.post("/v1/jobs", json={**SUBMITTED, "priority": 4}, headers={"Idempotency-Key": "a-key"})
    assert other.status_code == 409
    assert other.json()["detail"] == (
        "the idempotency key 'a-key' is that of job 1, which differs in priority: give another request another key"
    )
    assert asked.post("/v1/jobs", json=SUBMITTED).json()["id"] == 2
    assert len(database.queue.jobs()) == 2


@pytest.mark.parametrize("key", ["", "two words", "x" * 201, "\xe9"])
def test_what_is_no_idempotency_key_is_refused(asked: TestClient, database: Database, key: str) -> None:
    found = asked.post("/v1/jobs", json=SUBMITTED, headers={b"Idempotency-Key": key.encode("latin-1")})
    assert found.status_code == 422
    assert "header idempotency-key" in found.json()["detail"].lower()
    assert database.queue.jobs() == []


def test_the_content_of_a_model_file_is_the_same_model_as_the_file(asked: TestClient) -> None:
    content = load_model("bert-encoder").definition.model_dump(mode="json", exclude_none=True)
    sent = asked.post("/v1/jobs", json={"model": content, "preset": "tiny"}).json()
    named = asked.post("/v1/jobs", json={"model": "bert-encoder", "preset": "tiny"}).json()
    assert (sent["family"], sent["extents"]) == (TINY.family, dict(TINY.extents))
    assert (sent["family"], sent["extents"], sent["model"]) == (named["family"], named["extents"], named["model"])


@pytest.mark.parametrize("example", SUBMISSIONS.values(), ids=SUBMISSIONS)
def test_every_example_of_a_submission_is_taken(asked: TestClient, example: dict[str, Any]) -> None:
    assert asked.post("/v1/jobs", json=example["value"]).status_code == 201


@pytest.mark.parametrize(
    "change, status, words",
    [
        ({"model": "bert:tiny"}, 404, "no model 'bert'; known: bert-encoder"),
        ({"model": "bert-encoder:huge"}, 404, "no preset 'huge'; known: tiny, base"),
        ({"model": ":tiny"}, 404, "is no model: write"),
        ({"model": "bert-encoder"}, 409, "axis without extent: b (batch)"),
        ({"preset": "base"}, 409, "name one"),
        ({"extents": {"z": 1}}, 409, "no axis 'z'; known: b (batch)"),
        ({"extents": {"l": 0}}, 422, "extents.l"),
        ({"extents": {"l": "64"}}, 422, "extents.l"),
        ({"extents": {"l": 2**31 - 1}}, 409, str(ELEMENTS_MAX)),
        ({"extents": {"l": 2**70}}, 422, "extents.l"),
        ({"options": {"activation": "tanh"}}, 409, "must be one of gelu_erf, gelu_tanh, relu"),
        ({"options": {"epsilon": 10**400}}, 422, "beyond the range of floats"),
        ({"options": {"epsilon": 2**70}}, 409, "must be a number from 0 to below 1"),
        ({"dtype": "int8"}, 422, "dtype"),
        ({"device": {"type": "tpu"}}, 409, "nobody tunes for devices of type 'tpu'; known: cpu"),
        ({"gap": -0.1}, 422, "gap"),
        ({"estimated_gap": -0.1}, 422, "estimated_gap"),
        ({"budget_bytes": 0}, 422, "budget_bytes"),
        ({"numerics": "4-bit"}, 422, "numerics"),
        ({"exhaustive": 1}, 422, "exhaustive"),
        ({"limits": {"seconds": 0}}, 422, "limits.seconds"),
        ({"priority": 101}, 422, "priority"),
        ({"priority": "high"}, 422, "priority"),
        ({"owner": 1}, 422, "owner"),
        ({"model": None}, 422, "model"),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_in_words_that_say_what_would_be_valid(
    asked: TestClient, database: Database, change: dict[str, Any], status: int, words: str
) -> None:
    response = asked.post("/v1/jobs", json={"model": "bert-encoder:tiny"} | change)
    assert (response.status_code, response.headers["Content-Type"]) == (status, "application/problem+json")
    assert words in response.json()["detail"]
    assert response.json()["status"] == status
    assert database.queue.jobs() == []


def test_a_tensor_that_no_known_device_can_hold_is_refused(asked: TestClient, database: Database) -> None:
    def answered(device: dict[str, str], b: int) -> str:
        response = asked.post(
            "/v1/jobs", json={"model": "bert-encoder:tiny", "extents": {"b": b, "l": 1}, "device": device}
        )
        return str(response.json()["detail"]) if response.status_code == 409 else str(response.status_code)

    one = 128 * 4  # bytes of a token
    small, large = {"type": "cuda", "name": "small"}, {"type": "cuda", "name": "large"}
    assert answered(small, 2**35 // one) == "201", "nobody knows its memory"
    for name, size in (("small", 2**33), ("large", 2**34)):
        database.remember(Environment("cuda", name, (("memory_bytes", size),)))
    assert answered(small, 2**33 // one) == answered({"type": "cuda"}, 2**34 // one) == "201"
    words = f"tensor 'x' takes {2**33 + one} bytes, and small has {2**33}: give smaller extents"
    assert answered(small, 2**33 // one + 1) == words
    assert answered(large, 2**33 // one + 1) == "201"
    assert f"a device of type cuda has {2**34}" in answered({"type": "cuda"}, 2**34 // one + 1)


def test_a_tensor_that_no_cpu_of_a_worker_can_hold_is_refused(asked: TestClient, database: Database) -> None:
    one = 128 * 4
    body = {"model": "bert-encoder:tiny", "extents": {"b": 2**37 // one, "l": 1}}
    with database.locks.hold("a worker"):
        database.queue.greet("a worker", "cpu", "Xeon", 23 * 2**30)
        refused = asked.post("/v1/jobs", json=body)
        assert refused.status_code == 409
        assert f"a device of type cpu has {23 * 2**30}" in refused.json()["detail"]
        assert asked.post("/v1/jobs", json={**body, "device": {"type": "cpu", "name": "Xeon"}}).status_code == 409
        assert asked.get("/v1/devices").json()[0]["workers"][0]["memory_bytes"] == 23 * 2**30
    assert database.queue.jobs() == []


@pytest.mark.parametrize(
    "name", ["../secret.yaml", "/etc/passwd", "x.yml", "a/b", "..", "bert_encoder", "bert-encoder/"]
)
def test_a_name_is_never_taken_for_a_path(asked: TestClient, name: str) -> None:
    response = asked.post("/v1/jobs", json={"model": name})
    assert response.status_code == 404
    assert f"no model {name!r}; known: " in response.json()["detail"]


LETTERS = "abcdefghijkl"
TWELVE_AXES = {
    "axes": dict.fromkeys(LETTERS, "an axis"),
    "presets": {"small": dict.fromkeys(LETTERS, 2)},
    "inputs": {"x": {"axes": LETTERS}},
    "parameters": {},
    "operators": [
        {"name": "first", "kind": "relu", "spec": f"{LETTERS}->{LETTERS}", "inputs": ["x"], "outputs": ["z"]},
        {"name": "second", "kind": "relu", "spec": f"{LETTERS}->{LETTERS}", "inputs": ["z"], "outputs": ["y"]},
    ],
}
NO_DERIVATIVE = {"outputs": ["product"]}


@pytest.mark.parametrize(
    "change, status, words",
    [
        ({"operators": []}, 422, "operators"),
        ({"operators": SMALL_MODEL["operators"][:1] * (OPERATORS_MAX + 1)}, 422, "operators"),
        ({"outputs": ["z"]}, 409, "made by no operator"),
        ({"presets": {"small": {"z": 1}}}, 409, "has axis 'z'"),
        ({"axes": {"bb": "x"}}, 422, "axes"),
        ({"unknown": 1}, 422, "unknown"),
        ({"presets": {"small": {"b": 2**30, "h": 2**30, "f": 2}}}, 409, "the model that was sent: tensor 'x' has"),
        (TWELVE_AXES, 409, "the model that was sent: operator 'first': spec 'abcdefghijkl->abcdefghijkl' gives tensor"),
        (NO_DERIVATIVE, 409, "the model that was sent: parameter 'offset' reaches none of the outputs"),
    ],
)
def test_a_model_that_contradicts_itself_or_is_too_large_is_refused(
    asked: TestClient, change: dict[str, Any], status: int, words: str
) -> None:
    response = asked.post("/v1/jobs", json={"model": SMALL_MODEL | change, "preset": "small"})
    assert response.status_code == status
    assert words in response.json()["detail"]


def test_a_spec_that_does_not_fit_its_operator_is_refused_with_its_name(asked: TestClient) -> None:
    operators = [SMALL_MODEL["operators"][0] | {"spec": "bh,fh->bfz"}, *SMALL_MODEL["operators"][1:]]
    response = asked.post("/v1/jobs", json={"model": SMALL_MODEL | {"operators": operators}, "preset": "small"})
    assert response.status_code == 409
    assert "the model that was sent: operator 'product'" in response.json()["detail"]


@pytest.mark.usefixtures("filled")
def test_jobs_come_in_pages_the_newest_first(asked: TestClient) -> None:
    first = asked.get("/v1/jobs", params={"limit": 2}).json()
    second = asked.get("/v1/jobs", params={"limit": 2, "before": first["next"]}).json()
    third = asked.get("/v1/jobs", params={"limit": 2, "before": second["next"]}).json()
    assert [[job["id"] for job in page["items"]] for page in (first, second, third)] == [[5, 4], [3, 2], [1]]
    assert third["next"] is None
    assert [job["id"] for job in asked.get("/v1/jobs", params={"state": "failed"}).json()["items"]] == [2]


def test_a_job_says_how_far_it_is_and_what_came_of_it(asked: TestClient, filled: Database) -> None:
    running, finished = asked.get("/v1/jobs/4").json(), asked.get("/v1/jobs/1").json()
    assert (running["state"], running["progress"]) == ("running", {**PROGRESS, "note": ""})
    assert (finished["state"], finished["configuration_id"], finished["counts"]) == ("finished", 1, {"calls": 3})
    assert finished["family"] == TINY.family
    assert filled.queue.job(4).revision == running["revision"]


def test_a_job_that_waits_is_cancelled_at_once_and_one_that_runs_is_asked_to_end(
    asked: TestClient, filled: Database
) -> None:
    waiting, running = asked.post("/v1/jobs/5/cancel"), asked.post("/v1/jobs/4/cancel")
    assert (waiting.json()["state"], running.json()["state"], running.json()["cancelling"]) == (
        "cancelled", "running", True,
    )  # fmt: skip
    assert asked.post("/v1/jobs/5/cancel").json()["state"] == "cancelled"
    assert asked.post("/v1/jobs/1/cancel").status_code == 409
    assert "is finished already" in asked.post("/v1/jobs/1/cancel").json()["detail"]
    assert filled.queue.job(4).cancelling


@pytest.mark.parametrize("path", ["/v1/jobs/99", "/v1/jobs/99/events"])
def test_a_job_that_is_not_there_is_said_not_to_be_there(asked: TestClient, path: str) -> None:
    response = asked.get(path)
    assert (response.status_code, response.json()["instance"]) == (404, path)
    assert response.json()["detail"] == "no job 99: GET /v1/jobs lists those that there are"
    assert asked.post("/v1/jobs/99/cancel").status_code == 404


def test_a_job_that_was_begun_with_wider_limits_than_the_service_takes_is_shown(
    asked: TestClient, database: Database
) -> None:
    job = enqueue(database)
    request = dict(job.request) | {"limits": {"seconds": 1e12, "measurements": None}, "gap": 1e12}
    database.queue.enqueue(model="m", request=request, device_type="cpu")
    assert asked.get("/v1/jobs/2").json()["limits"]["seconds"] == 1e12
