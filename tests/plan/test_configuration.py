"""The answer as JSON: what is written is read again, and whatever is not valid is refused with what was wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autotuner.errors import ConfigurationError
from autotuner.plan.configuration import SCHEMA, Configuration, json_schema, load_configuration, save_configuration
from autotuner.plan.parts import Measured, Overlap
from tests.made_up import made_up_configuration, small_model
from tests.plan.explained import explained_configuration, with_again

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Configuration:
    return made_up_configuration(small_model(tmp_path_factory.mktemp("models")))


def test_a_configuration_survives_json(found: Configuration) -> None:
    assert Configuration.from_json(found.to_json()) == found
    timed = found.with_measured(Measured(100.0, 10.0, {"eager": 150.0, "compile": 120.0}, 30))
    again = Configuration.from_json(json.loads(json.dumps(timed.to_json())))
    assert again == timed
    assert again.measured is not None
    assert again.measured.ratios == {"eager": 1.5, "compile": 1.2}


def test_everything_that_explains_a_plan_survives_json(found: Configuration) -> None:
    full = explained_configuration(found.model)
    value = json.loads(json.dumps(full.to_json()))
    assert Configuration.from_json(value) == full
    jsonschema.validate(value, json_schema())
    assert value["overtaking"][0]["predicted_us"] == 8.5
    assert value["fusions"][0]["alone_us"] == 9.5
    assert value["certificate"]["statistics"] == {"largest_rows": 12, "cases": 1}


def test_what_backward_computes_again_is_named_and_survives_json(found: Configuration) -> None:
    repeated = with_again(explained_configuration(found.model))
    assert repeated.recomputed == ("product",)
    again = Configuration.from_json(json.loads(json.dumps(repeated.to_json())))
    assert (again, again.recomputed) == (repeated, ("product",))


def test_a_step_is_predicted_from_its_kernels_and_what_lies_beside_them_at_the_clock_of_load_that_lasts(
    found: Configuration,
) -> None:
    kernels_us = found.certificate.predicted_us
    overlapping = replace(found, overlap=Overlap(((0,),), 3.0, 2.5, 3.5))
    assert overlapping.kernels_us == kernels_us - 3.0
    measured = Measured(1.1 * (kernels_us + 7.0), 6.0, {}, 30, switching_us=4.0, slowdown=1.1)
    assert measured.predicted_over_measured(overlapping.kernels_us) == pytest.approx(0.0, abs=1e-12)
    assert measured.predicted_over_measured(found.kernels_us) == pytest.approx(3.0 / (kernels_us + 7.0))
    assert not overlapping.with_measured(measured).doubts
    (doubt,) = overlapping.with_measured(replace(measured, slowdown=1.3)).doubts
    assert f"predicted to take {1.3 * (kernels_us + 7.0):,.0f} us" in doubt.sentence


def test_an_overlap_survives_json_and_belongs_to_what_runs(found: Configuration) -> None:
    overlapping = replace(found, overlap=Overlap(((0,),), 3.0, 2.5, 3.5))
    value = json.loads(json.dumps(overlapping.to_json()))
    jsonschema.validate(value, json_schema())
    assert Configuration.from_json(value) == overlapping
    assert overlapping.key != found.key
    assert "overlap" not in found.to_json()


@pytest.mark.parametrize("branches", [[[99]], [[0, 0]], [[]], []])
def test_branches_of_steps_that_are_not_there_are_refused(found: Configuration, branches: list[list[int]]) -> None:
    value = found.to_json() | {"overlap": {"branches": branches, "gain_us": 1.0, "low_us": 0.5, "high_us": 1.5}}
    with pytest.raises(ConfigurationError, match="branches"):
        Configuration.from_json(value)


def test_a_configuration_survives_a_file(found: Configuration, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    save_configuration(found, path)
    assert load_configuration(path) == found
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    save_configuration(found, path)
    assert load_configuration(str(path)) == found


def test_what_is_written_is_what_the_schema_says(found: Configuration) -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found.to_json(), schema)
    timed = found.with_measured(Measured(100.0, 10.0, {"eager": 150.0}, 30))
    jsonschema.validate(timed.to_json(), schema)
    assert schema["properties"]["schema"]["const"] == SCHEMA
    assert (
        set(schema["required"])
        == set(schema["properties"]) - {"doubts", "leaner", "numerics", "overlap"}
        == set(found.to_json())
    )


def test_the_key_depends_on_what_runs_and_not_on_dates_and_timings(found: Configuration) -> None:
    later = replace(found, created_at="2030-01-01T00:00:00+00:00", counts={"calls": 1})
    assert later.key == found.key
    slower = replace(found, steps=tuple(replace(step, predicted_us=step.predicted_us + 1) for step in found.steps))
    assert slower.key == found.key
    other = replace(found, steps=(replace(found.steps[0], kernel="torch_copy"), *found.steps[1:]))
    assert other.key != found.key


def test_a_configuration_says_where_it_comes_from(found: Configuration) -> None:
    value = found.to_json()
    assert value["environment"]["device_name"] == "made up"
    assert value["environment_key"] == found.environment_key
    assert value["graph_key"] == found.graph().key
    assert value["versions"].keys() >= {"autotuner"}
    assert value["created_at"].endswith("+00:00")


def drop_steps(value: dict[str, Any]) -> None:
    value["steps"] = [step for step in value["steps"] if "y" not in step["operators"]]


def twice(value: dict[str, Any]) -> None:
    value["steps"].append(next(step for step in value["steps"] if step["operators"]))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda v: v.update(schema=SCHEMA + 1), rf"its schema version is {SCHEMA + 1}; this version reads {SCHEMA}"),
        (lambda v: v.pop("schema"), r"its schema version is None"),
        (lambda v: v.pop("steps"), r"\$: 'steps' is required"),
        (lambda v: v.update(steps=[]), r"\$\.steps: \[\]: Tuple should have at least 1 item"),
        (lambda v: v.update(surprise=1), r"\$\.surprise: 1: no field of this name is known"),
        (
            lambda v: v["steps"][0].update(phase="sideways"),
            r"\$\.steps\[0\]\.phase: 'sideways': Input should be 'forward' or 'b",
        ),
        (lambda v: v["steps"][0].update(predicted_us=-1), r"\$\.steps\[0\]\.predicted_us: -1: Input should be greater"),
        (lambda v: v["steps"][0]["inputs"].append(["x"]), r"\$\.steps\[0\]\.inputs\[\d\]: \['x'\]: there is no item 1"),
        (lambda v: v["certificate"].pop("proven_gap"), r"\$\.certificate: 'proven_gap' is required"),
        (lambda v: v.update(graph_key="0" * 64), r"it was made for graph 000000000000, but its model builds graph"),
        (
            lambda v: v["model"]["extents"].update(b=3),
            r"it was made for graph \w{12}, but its model builds graph \w{12}",
        ),
        (lambda v: v["model"]["extents"].pop("b"), r"axis without extent: b \(batch\)"),
        (lambda v: v["model"]["definition"].pop("operators"), r"saved model: operators: Field required"),
        (
            lambda v: v["steps"][0].update(kernel="warp"),
            r"\$\.steps\[0\]: no kernel 'warp': the file is damaged, or of a",
        ),
        (
            lambda v: v["steps"][0].update(kernel="torch_relu"),
            r"\$\.steps\[0\]: torch_relu does not compute contraction",
        ),
        (lambda v: v["steps"][0].update(kernel="inductor"), r"\$\.steps\[0\]: inductor cannot run: contraction is not"),
        (
            lambda v: v["steps"][0].update(params=[["block"]]),
            r"\$\.steps\[0\]\.params\[0\]: \['block'\]: there is no item 1",
        ),
        (
            lambda v: v["steps"][0].update(params=[["block", {}]]),
            r"\.params\[0\]\[1\]: \{\}: Input should be a valid string or",
        ),
        (lambda v: v["steps"][0].update(inputs=[]), r"\$\.steps\[0\]: \w+ does not compute contraction"),
        (
            lambda v: v["steps"][0]["inputs"][0].__setitem__(0, "z"),
            r"it names operators or tensors that its model does",
        ),
        (lambda v: v["steps"][0]["inputs"][0].__setitem__(1, "b!"), r"\$\.steps\[0\]: 'b!' is no (form|layout)"),
        (lambda v: v["steps"][0]["inputs"][0].__setitem__(1, "b"), r"\$\.steps\[0\]: form a does not fit a tensor"),
        (lambda v: v["steps"][0].update(recomputed=["nothing"]), r"it names operators or tensors that its model does"),
        (lambda v: v["environment"].pop("device_type"), r"\$\.environment: .*: 'device_type' is required"),
        (lambda v: v["bytes_moved"].clear(), r"\$\.bytes_moved: 'unfused' is required"),
        (drop_steps, r"its steps do not compute each operator once; see \[.*'y'\]"),
        (twice, r"its steps do not compute each operator once"),
    ],
)
def test_what_is_damaged_is_refused_with_the_place(
    found: Configuration, tmp_path: Path, change: Change, sentence: str
) -> None:
    value = found.to_json()
    change(value)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigurationError, match=sentence) as raised:
        load_configuration(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["[]", "3", '"text"', "null"])
def test_json_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="its schema version is None"):
        load_configuration(path)


@pytest.mark.parametrize("data", [b"", b"{", b"not json", b"\x80\x04\xff", b"[" * 100_000, b'{"schema": NaN}'],
                         ids=["nothing", "half", "words", "binary", "deep", "NaN"])  # fmt: skip
def test_what_is_no_json_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "garbage.json"
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"garbage\.json: this is no configuration, it is not JSON"):
        load_configuration(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.json: cannot be read \(No such file or directory\)"):
        load_configuration(tmp_path / "none.json")
    with pytest.raises(ConfigurationError, match=r"cannot be read \(Is a directory\)"):
        load_configuration(tmp_path)


def test_a_folder_that_is_not_there_cannot_be_written(found: Configuration, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"found\.json: cannot be written \(No such file or directory\); name"):
        save_configuration(found, tmp_path / "missing" / "found.json")


def test_a_write_that_fails_leaves_what_was_there(found: Configuration, tmp_path: Path) -> None:
    folder = tmp_path / "found.json"
    folder.mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot be written \(Is a directory\)"):
        save_configuration(found, folder)
    assert folder.is_dir()
    assert list(tmp_path.iterdir()) == [folder]
