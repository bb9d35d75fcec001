"""Plans over HTTP: listed, drawn, set against measurements, and compared."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from autotuner.database import Database, open_database
from autotuner.database.values import ListedConfiguration
from autotuner.ir.models import load_model
from autotuner.plan.configuration import Configuration
from autotuner.plan.report.candidates import OperatorCandidates
from autotuner.plan.report.differences import ConfigurationDifferences
from autotuner.plan.report.picture import PlanPicture
from autotuner.server.http import create_app
from autotuner.server.http.answers import Answers
from autotuner.server.http.plans import MeasuredSpaces, MeasuredSteps
from autotuner.server.wire.responses import ListedConfigurationView
from autotuner.tuner import build_configuration
from tests.made_up import HERE, feed_forward, made_up_configuration, small_model, space_of, times


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service that knows a model of seven operators with all its measurements, and two answers for it.

    The second answer takes the slowest kernel for the first product.
    """
    folder = tmp_path_factory.mktemp("plans")
    model = load_model(str(feed_forward(folder))).instantiate("small")
    space = space_of(model)
    known = times(space.calls)
    one = build_configuration(model, space, known, HERE, {"calls": len(space.calls)})
    product = {choice.call.key for choice in space.choices if "product1" in choice.cover.operators}
    slower = {key: replace(found, median_us=1000.0 + int(key[:4], 16)) for key, found in known.items()}
    other = build_configuration(
        model, space, {key: slower[key] if key in product else known[key] for key in known}, HERE, {"calls": 1}
    )
    with open_database(folder / "plans.sqlite") as database:
        database.remember(HERE)
        database.store(HERE.key, [(space.calls[key], found) for key, found in known.items()])
        database.set_fact(HERE.key, "ceiling_us bytes 1000000", 100.0)
        database.set_fact(HERE.key, "ceiling_us float32 2000000", 4.0)
        for found in (one, other):
            save(database, found)
        with TestClient(create_app(database), "http://localhost") as client:
            yield client


def save(database: Database, found: Configuration) -> None:
    model = found.model
    database.configurations.save(
        request_key="r", environment_key=HERE.key, family_key=model.family, dtype=model.dtype, extents=model.extents,
        complete=True, document=found.to_json(), total_us=found.certificate.predicted_us,
    )  # fmt: skip


def test_configurations_are_listed_the_newest_first_page_after_page(asking: TestClient) -> None:
    first = asking.get("/v1/configurations?limit=1").json()
    assert [each["id"] for each in first["items"]] == [2]
    assert first["items"][0]["model"] == "feed-forward:small"
    second = asking.get(f"/v1/configurations?limit=1&before={first['next']}").json()
    assert ([each["id"] for each in second["items"]], second["next"]) == ([1], None)


@pytest.mark.parametrize(
    "search, found", [("feed", 2), ("FEED made", 2), ("float32 small", 2), ("bert", 0), ("100%", 0), ("_", 0)]
)
def test_a_search_is_for_every_word_in_model_dtype_and_device(asking: TestClient, search: str, found: int) -> None:
    assert len(asking.get("/v1/configurations", params={"search": search}).json()["items"]) == found


def test_a_list_over_http_has_the_fields_of_one_from_the_database() -> None:
    assert [*ListedConfigurationView.model_fields] == [field.name for field in fields(ListedConfiguration)]


def test_a_plan_is_drawn_with_each_operator_once_and_its_memory_at_each_step(asking: TestClient) -> None:
    answer = asking.get("/v1/configurations/1/plan")
    plan = TypeAdapter(PlanPicture).validate_python(answer.json())
    members = [member.name for step in plan.steps for member in step.members if not member.again]
    assert len(members) == len(set(members))
    assert {"product1", "grad_weight1", "y"} <= set(members)
    assert [moment.step for moment in plan.memory if moment.step] == [step.number for step in plan.steps]
    assert sum(step.share for step in plan.steps) == pytest.approx(1)
    assert plan.tokens is None  # its axes are a row, a hidden and a feature
    assert plan.ceilings.gb_per_s == pytest.approx(10)
    assert plan.ceilings.tflop_per_s == {"float32": pytest.approx(0.5)}
    again = asking.get("/v1/configurations/1/plan", headers={"If-None-Match": answer.headers["ETag"]})
    assert again.status_code == 304


def test_steps_are_set_against_what_was_measured(asking: TestClient) -> None:
    found = TypeAdapter(MeasuredSteps).validate_python(asking.get("/v1/configurations/1/steps").json())
    assert all(row.best is not None and row.best.us <= row.chosen_us for row in found.steps)
    assert found.counts["unknown"] == 0
    plan = asking.get("/v1/configurations/1/plan").json()
    assert found.declared_us is not None
    assert found.declared_us >= sum(step["predicted_us"] for step in plan["steps"]) - 1e-6


def test_candidates_of_an_operator_have_their_price_in_the_whole(asking: TestClient) -> None:
    answer = asking.get("/v1/configurations/1/operators/product1/candidates")
    found = TypeAdapter(OperatorCandidates).validate_python(answer.json())
    assert found.note == ""
    chosen = [each for group in found.groups for each in group.candidates if each.chosen]
    assert [(each.us, each.extra_us, each.is_exact) for each in chosen] == [(found.chosen_us, 0.0, True)]
    assert found.groups[0].chosen
    prices = [each.extra_us for group in found.groups for each in group.candidates]
    assert all(price is None or price >= 0 for price in prices)
    assert sum(price is not None and price > 0 for price in prices) > 3
    for group in found.groups:
        assert [each.us for each in group.candidates] == sorted(each.us for each in group.candidates)


def test_an_unknown_operator_is_not_found_with_near_names(asking: TestClient) -> None:
    answer = asking.get("/v1/configurations/1/operators/product/candidates")
    assert answer.status_code == 404
    assert "product1" in answer.json()["detail"]


def test_two_configurations_are_compared_by_the_parts_that_both_compute(asking: TestClient) -> None:
    answer = asking.get("/v1/configurations/1/compare/2")
    found = TypeAdapter(ConfigurationDifferences).validate_python(answer.json())
    assert found.comparable
    assert sum(part.worth_us for part in found.parts) == pytest.approx(found.other_us - found.one_us)
    names = [name for part in found.parts for name in part.operators]
    assert len(names) == len(set(names))
    assert "product1" in found.parts[0].operators
    assert [abs(part.worth_us) for part in found.parts] == sorted(
        (abs(part.worth_us) for part in found.parts), reverse=True
    )
    same = asking.get("/v1/configurations/1/compare/1").json()
    assert all(part["words"] == [] and part["worth_us"] == 0 for part in same["parts"])


@pytest.mark.parametrize("path", ["plan", "steps", "operators/y/candidates", "compare/1"])
def test_a_configuration_that_is_not_there_is_not_found(asking: TestClient, path: str) -> None:
    assert asking.get(f"/v1/configurations/99/{path}").status_code == 404


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_plan_is_set_against_what_its_vendors_devices_can_run(
    database: Database, tmp_path: Path, vendor: str
) -> None:
    facts = {} if vendor == "nvidia" else {"vendor": vendor}
    environment = {"device_type": "cuda", "device_name": "made up", "facts": facts, "policy": {}}
    database.remember(HERE)
    save(database, replace(made_up_configuration(small_model(tmp_path)), environment=environment))
    found = MeasuredSpaces(database, Answers(database)).of(1, solved=False)
    kernels = {choice.candidate.kernel for choice in found.space.choices}
    assert any(name.startswith("cublaslt_") for name in kernels) == (vendor == "nvidia")
    assert "cublas_matmul" in kernels


def test_the_trace_of_a_job_is_what_its_worker_noted(database: Database, asked: TestClient) -> None:
    points = [
        {"at": "2026-01-01T00:00:00Z", "measured": 1, "reused": 0, "failed": 0, "best_us": None, "bound_us": None},
        {"at": "2026-01-01T00:00:01Z", "measured": 2, "reused": 0, "failed": 0, "best_us": 2.0, "bound_us": 1.0},
    ]
    job = database.queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", runner="me")
    with database.locks.hold("me"):
        database.queue.report(job.id, 1, progress={"stage": "measure", "trace": points})
        assert json.loads(asked.get(f"/v1/jobs/{job.id}/trace").text)["points"] == points
