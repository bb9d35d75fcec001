"""Configurations over HTTP: the best for what somebody wants to run, and what a client need not be sent twice."""

import json

import pytest
from starlette.testclient import TestClient

from autotuner.configuration import Configuration
from autotuner.database import Database
from autotuner.models import named_model
from autotuner.records import Scalar
from autotuner.wire import BestView, ConfigurationView
from tests.service.filled import HERE, TINY, answer

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
