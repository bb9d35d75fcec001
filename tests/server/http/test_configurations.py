"""Configurations over HTTP: the best for what somebody wants to run, and what a client need not be sent twice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from autotuner.database import Database, open_database
from autotuner.ir.models import named_model
from autotuner.ir.records import Doubt, Scalar
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import OperatorExplanation, TensorExplanation, explain_operator, explain_tensor
from autotuner.server.http import create_app
from autotuner.server.wire.responses import BestView, ConfigurationView
from tests.plan.explained import explained_configuration
from tests.server.http.filled import HERE, TINY, answer, fill

OTHER = named_model("bert-encoder:tiny", extents={"l": 48})
BEST = "/v1/configurations/best"
WIDE = [f"{axis}={extent}" for axis, extent in TINY.extents.items()]


def test_a_configuration_is_sent_as_it_was_stored(
    asked: TestClient, filled: Database, configuration: Configuration
) -> None:
    view = ConfigurationView.model_validate_json(asked.get("/v1/configurations/1").text)
    assert view.configuration == configuration.to_json()
    assert filled.configurations.get(1).text in asked.get("/v1/configurations/1").text
    assert (view.id, view.predicted_us, view.device_name, view.complete) == (1, 12.5, "Xeon", True)


def test_the_best_for_a_model_is_the_same_as_for_its_family(asked: TestClient, filled: Database) -> None:
    named = BestView.model_validate_json(asked.get(BEST, params={"model": "bert-encoder:tiny"}).text)
    family = {"family": TINY.family, "dtype": "float32", "extent": WIDE}
    assert named == BestView.model_validate_json(asked.get(BEST, params=family).text)
    assert (named.match, named.differs, named.message) == ("exact", [], "tuned for exactly this")
    assert named.best is not None
    assert json.loads(filled.configurations.get(1).text) == named.best.configuration


def test_one_that_was_measured_in_a_bad_moment_is_doubtful_and_says_why(
    asked: TestClient, filled: Database, configuration: Configuration
) -> None:
    doubtful = replace(configuration, doubts=(Doubt("contended", "7 of 9 times were taken in a bad moment."),))
    number = answer(filled, doubtful, model=OTHER, complete=False)
    found = asked.get(BEST, params={"model": "bert-encoder:tiny", "extent": "l=48"}).json()
    assert (found["match"], found["differs"]) == ("doubtful", [])
    assert "7 of 9 times were taken in a bad moment." in found["message"]
    assert found["best"]["doubts"] == ["7 of 9 times were taken in a bad moment."]
    view = ConfigurationView.model_validate_json(asked.get(f"/v1/configurations/{number}").text)
    assert (view.doubts, view.complete) == (["7 of 9 times were taken in a bad moment."], False)
    assert ConfigurationView.model_validate_json(asked.get("/v1/configurations/1").text).doubts == []


@pytest.mark.usefixtures("filled")
def test_one_from_another_device_is_near_and_says_so(asked: TestClient) -> None:
    found = asked.get(BEST, params={"model": "bert-encoder:tiny", "device_name": "EPYC"}).json()
    assert (found["match"], found["differs"], found["best"]["device_name"]) == ("near_device", ["device_name"], "Xeon")
    assert "tuned on Xeon (cpu), not on EPYC" in found["message"]


@pytest.mark.usefixtures("filled")
def test_one_for_other_extents_is_near_and_says_so(asked: TestClient) -> None:
    found = asked.get(BEST, params={"model": "bert-encoder:tiny", "extent": ["l=32", "b=2"]}).json()
    assert (found["match"], found["differs"]) == ("near_shape", ["extents.b", "extents.l"])
    assert "tuned for b=4 l=64" in found["message"]
    assert "does not run with these" in found["message"]


@pytest.mark.usefixtures("filled")
def test_where_nothing_is_known_the_message_says_what_is(asked: TestClient) -> None:
    found = asked.get(BEST, params={"model": "bert-encoder:tiny", "dtype": "float64"}).json()
    assert (found["match"], found["best"]) == ("none", None)
    assert "known: cpu float32 b=4 l=64" in found["message"]
    other = asked.get(BEST, params={"model": "bert-encoder:tiny", "option": "activation=relu"}).json()
    assert (other["match"], "nothing is known of this model with these options" in other["message"]) == ("none", True)


@pytest.mark.parametrize(
    "text, name, value",
    [
        ("attention_dropout=0.5", "attention_dropout", 0.5),
        ("attention_dropout=5e-1", "attention_dropout", 0.5),
        ("activation=relu", "activation", "relu"),
        ('activation="relu"', "activation", "relu"),
        ("attention_mask=true", "attention_mask", True),
    ],
)
def test_options_are_written_as_in_the_command_line_or_as_json(
    asked: TestClient, filled: Database, configuration: Configuration, text: str, name: str, value: Scalar
) -> None:
    answer(filled, configuration, model=named_model("bert-encoder:tiny", options={name: value}))
    assert asked.get(BEST, params={"model": "bert-encoder:tiny", "option": text}).json()["match"] == "exact"


@pytest.mark.parametrize(
    "query, status, words",
    [
        ("", 409, "give `model`, or `family`"),
        (f"model=bert-encoder:tiny&family={TINY.family}", 409, "one of the two"),
        (f"family={TINY.family}", 409, "with `family` give `dtype`"),
        ("model=bert-encoder", 409, "axis without extent"),
        ("model=bert-encoder:tiny&extent=l=1&extent=l=2", 409, "extent 'l' is given twice"),
        ("model=bert-encoder:tiny&extent=l=9999999999", 409, "give at most 2147483647"),
        ("model=bert-encoder:tiny&extent=64", 422, "extent.0"),
        ("model=bert-encoder:tiny&option=activation", 422, "option.0"),
        ("model=bert-encoder:tiny&option=activation=tanh", 409, "must be one of"),
        ("model=nobody", 404, "no model 'nobody'; known: bert-encoder"),
        ("model=../x.yaml", 404, "no model '../x.yaml'"),
        ("model=bert-encoder:none", 404, "no preset 'none'"),
        ("family=abc", 422, "family"),
        ("model=bert-encoder:tiny&dtype=int8", 422, "dtype"),
        ("model=bert-encoder:tiny&preset=tiny", 422, "no parameter 'preset': valid are model, family, extent"),
    ],
)
def test_a_question_that_contradicts_the_model_or_itself_is_refused(
    asked: TestClient, query: str, status: int, words: str
) -> None:
    response = asked.get(f"{BEST}?{query}")
    assert response.status_code == status
    assert words in response.json()["detail"]


def test_an_answer_is_not_sent_again_until_there_is_another(
    asked: TestClient, filled: Database, configuration: Configuration
) -> None:
    params = {"model": "bert-encoder:tiny"}
    first = asked.get(BEST, params=params)
    tag = first.headers["ETag"]
    again = asked.get(BEST, params=params, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    number = answer(filled, configuration)
    newer = asked.get(BEST, params=params, headers={"If-None-Match": tag})
    assert (newer.status_code, newer.json()["best"]["id"]) == (200, number)
    answer(filled, configuration, complete=False)
    assert asked.get(BEST, params=params).json()["best"]["id"] == number


def test_that_nothing_is_known_is_not_remembered_once_something_is(
    asked: TestClient, database: Database, configuration: Configuration
) -> None:
    params = {"model": "bert-encoder:tiny"}
    assert asked.get(BEST, params=params).json()["match"] == "none"
    database.remember(HERE)
    answer(database, configuration, complete=False)
    found = asked.get(BEST, params=params).json()
    assert (found["match"], found["best"]["complete"]) == ("exact", False)
    assert "not all that could matter was measured" in found["message"]


@pytest.mark.usefixtures("filled")
def test_a_configuration_may_be_kept_for_ever(asked: TestClient) -> None:
    first = asked.get("/v1/configurations/1")
    assert "immutable" in first.headers["Cache-Control"]
    assert asked.get("/v1/configurations/1", headers={"If-None-Match": first.headers["ETag"]}).status_code == 304
    assert asked.get("/v1/configurations/1", headers={"If-None-Match": "*"}).status_code == 304
    assert asked.get("/v1/configurations/2").status_code == 404


# Why it is as it is


@pytest.fixture
def explained(filled: Database, configuration: Configuration) -> tuple[str, Configuration]:
    """Return the path of a configuration whose alternatives are known, and the configuration."""
    found = explained_configuration(configuration.model)
    return f"/v1/configurations/{answer(filled, found)}", found


def test_an_operator_is_explained_as_the_command_line_explains_it(
    asked: TestClient, explained: tuple[str, Configuration]
) -> None:
    path, found = explained
    sent = asked.get(f"{path}/operators/product")
    assert TypeAdapter(OperatorExplanation).validate_json(sent.text) == explain_operator(found, "product")
    assert sent.json()["alternative"]["words"].startswith("with product as fb in place of bf: +3.1 us in all")


def test_a_tensor_is_explained_as_the_command_line_explains_it(
    asked: TestClient, explained: tuple[str, Configuration]
) -> None:
    path, found = explained
    sent = asked.get(f"{path}/tensors/grad_biased")
    assert TypeAdapter(TensorExplanation).validate_json(sent.text) == explain_tensor(found, "grad_biased")
    assert sent.json()["conversions"][0]["predicted_us"] == 2.0


@pytest.mark.parametrize(
    "rest, status, words",
    [
        ("operators/prodct", 404, "no operator 'prodct' in small:wide: near are product"),
        ("operators/weight", 404, "a tensor has this name"),
        ("tensors/grad_weights", 404, "no tensor 'grad_weights' in small:wide: near are grad_weight"),
        ("operators/two words", 422, "path name"),
        ("operators/product?step=1", 422, "no parameter 'step'"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_near_ones(
    asked: TestClient, explained: tuple[str, Configuration], rest: str, status: int, words: str
) -> None:
    path, _ = explained
    response = asked.get(f"{path}/{rest}")
    assert response.status_code == status
    assert words in response.json()["detail"]


@pytest.mark.usefixtures("filled")
def test_a_configuration_that_is_not_there_explains_nothing(asked: TestClient) -> None:
    response = asked.get("/v1/configurations/99/operators/product")
    assert response.status_code == 404
    assert "no configuration 99" in response.json()["detail"]


def test_a_configuration_of_another_version_cannot_be_explained(
    asked: TestClient, filled: Database, configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Configuration, "to_json", lambda _: {"schema": 1})
    number = answer(filled, configuration)
    response = asked.get(f"/v1/configurations/{number}/operators/product")
    assert response.status_code == 409
    assert f"configuration {number}: its schema version is 1" in response.json()["detail"]


def test_an_explanation_is_not_sent_again(asked: TestClient, explained: tuple[str, Configuration]) -> None:
    path, _ = explained
    for rest in ("operators/product", "tensors/product"):
        first = asked.get(f"{path}/{rest}")
        assert first.headers["Cache-Control"] == "no-cache"
        again = asked.get(f"{path}/{rest}", headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_only_the_last_configurations_that_were_asked_for_are_kept(
    filled: Database, configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotuner.server.http.answers.KEPT_CONFIGURATIONS", 1)
    asked = TestClient(create_app(filled), "http://localhost")
    other = answer(filled, explained_configuration(configuration.model))
    for number, predicted_us in ((1, configuration.steps[0].predicted_us), (other, 10.0), (1, None), (other, 10.0)):
        found = asked.get(f"/v1/configurations/{number}/operators/product").json()
        assert predicted_us in (None, found["predicted_us"])


def test_after_the_database_file_was_replaced_nothing_of_the_old_one_is_answered(
    tmp_path: Path, configuration: Configuration
) -> None:
    """Also where the new file has as many configurations, with the same ids."""
    file, other = tmp_path / "served.sqlite", tmp_path / "other.sqlite"
    later = explained_configuration(configuration.model)
    for path, kept in ((file, configuration), (other, later)):
        with open_database(path) as opened:
            fill(opened, kept)
    with open_database(file, reopens=True) as served:
        asked = TestClient(create_app(served), "http://localhost")
        told = [asked.get(BEST, params={"model": "bert-encoder:tiny"}).json()["best"]["configuration"]]
        explained = [asked.get("/v1/configurations/1/operators/product").json()]
        for suffix in ("-wal", "-shm"):
            Path(f"{file}{suffix}").unlink(missing_ok=True)
        other.replace(file)
        told.append(asked.get(BEST, params={"model": "bert-encoder:tiny"}).json()["best"]["configuration"])
        explained.append(asked.get("/v1/configurations/1/operators/product").json())
    assert told == [json.loads(json.dumps(each.to_json())) for each in (configuration, later)]
    assert explained[1]["predicted_us"] == 10.0 != explained[0]["predicted_us"]
