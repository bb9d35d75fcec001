import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from autotuner.errors import ModelError
from autotuner.ir.models import files as files_module
from autotuner.ir.models import known_models, load_model, parse_reference, search_spaces_dir

SMALL = """
version: 1
name: small
axes: {a: rows, b: columns}
options:
  p: {default: 0.5, range: [0.0, 1.0]}
  masked: {default: false, choices: [false, true]}
presets:
  two: {a: 2, b: 2}
inputs:
  x: {axes: ab}
  m: {axes: b, when: $masked}
parameters:
  w: ab
operators:
  - {name: s, kind: contraction, spec: "ab,cb->ac", inputs: [x, w], outputs: [s]}
  - {name: r, kind: relu, spec: "ac->ac", inputs: [s], outputs: [r]}
outputs: [r]
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_name_and_a_path_load_the_same_file_and_errors_name_what_was_given() -> None:
    path = search_spaces_dir() / "models" / "bert_encoder.yaml"
    assert known_models()["bert-encoder"] == path
    named, found = load_model("bert-encoder"), load_model(str(path))
    assert named.definition == found.definition
    for file, given in ((named, "model 'bert-encoder'"), (found, str(path))):
        with pytest.raises(ModelError, match=f"^{re.escape(given)}: no preset 'huge'"):
            file.instantiate("huge")
    assert load_model("gpt-block").definition.name == "gpt-block"


def test_search_spaces_are_inside_the_package_where_none_are_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "autotuner" / "search_spaces" / "models"
    inside.mkdir(parents=True)
    monkeypatch.setattr(files_module, "__file__", str(tmp_path / "autotuner" / "ir" / "models" / "files.py"))
    assert search_spaces_dir() == inside.parent
    inside.rmdir()
    with pytest.raises(ModelError, match="install the package again"):
        search_spaces_dir()


def test_references_name_a_model_and_perhaps_a_preset() -> None:
    assert parse_reference("bert-encoder:tiny") == ("bert-encoder", "tiny")
    assert parse_reference("./mine.yaml") == ("./mine.yaml", None)
    for text in ("", ":tiny", "bert-encoder:"):
        with pytest.raises(ModelError, match='write "name", "name:preset"'):
            parse_reference(text)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"no model 'gpt'; known: .*bert-encoder"):
        load_model("gpt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.yaml: cannot be read"):
        load_model(str(tmp_path / "none.yaml"))


def test_an_axis_that_only_a_spec_makes_has_the_extent_that_its_operands_bind(write: Write) -> None:
    graph = load_model(write(SMALL)).instantiate("two", {"b": 5}).graph()
    assert graph.extents == {"a": 2, "b": 5, "c": 2}
    assert graph.shape("r") == (2, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 2", "version: Input should be 1"),
        ("version: 1", "version: 1\nkernels: {}", "kernels: Extra inputs are not permitted"),
        ("kind: relu,", "kind: relu, fast: true,", "operator 'r': fast: Extra inputs are not permitted"),
        ("kind: relu,", "", "operator 'r': kind: Field required"),
        (
            "kind: relu,",
            "kind: scale, attributes: {factor: {cube: b}},",
            "operator 'r': attributes: factor: it must be a",
        ),
        ("version: 1", "version: 1\nversion: 1", "key 'version' occurs twice"),
        ("axes: {a: rows, b: columns}", "axes: [a", "no valid YAML"),
        ("two: {a: 2, b: 2}", "two: {a: 2, z: 2}", "preset 'two' has axis 'z'; the model's are a, b"),
        ("two: {a: 2, b: 2}", "two: {a: 0, b: 2}", "presets: two: a: Input should be greater than or equal to 1"),
        ("w: ab", "w: az", "tensor 'w' has axis 'z'; the model's are a, b"),
        ("w: ab", "w: aa", "tensor 'w' has an axis twice in 'aa'"),
        ("w: ab", "x: ab", "tensor 'x' is an input and a parameter"),
        ("default: 0.5", "default: 1.5", "the default 1.5 is none of its valid values: a number from 0 to below 1"),
        ("default: 0.5, range: [0.0, 1.0]", "default: 0.5", "an option has either choices or a range"),
        ("name: small", "name: small\ndtype: float8", "no dtype 'float8'; known: float32"),
    ],
)
def test_a_file_that_breaks_a_rule_says_where(write: Write, old: str, new: str, message: str) -> None:
    path = write(SMALL.replace(old, new))
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: relu", "kind: swish", "operator 'r': no kind 'swish'; known: contraction"),
        ("kind: relu", "kind: $none", "operator 'r': no option 'none'; known: masked, p"),
        ("inputs: [s]", "inputs: [t]", "operator 'r' reads 't', which is no input, no parameter and"),
        ("outputs: [r]}", "outputs: [w]}", "operator 'r' makes 'w', which exists already"),
        ("ab,cb->ac", "ab,cb->ad", "axis 'c' occurs in one operand only"),
        ("ab,cb->ac", "ab,ca->bc", "spec 'ab,ca->bc' binds 'a' to 2 and, at tensor 'w', to 3"),
        ("ab,cb->ac", "ab,cbd->acd", "gives tensor 'w' the axes 'cbd'; it has 2: 'ab'"),
        ("ab,cb->ac", "ab,cb", "'ab,cb' is no spec"),
        ('"ac->ac"', '"ab->ab"', "operator 'r': axis 'b' of spec 'ab->ab' is 2 in its inputs and 3 elsewhere"),
        ("inputs: [s], outputs", "inputs: [s], when: $p, outputs", "`when` needs an option that is true or false"),
        ("inputs: [x, w]", "inputs: [x, x]", "parameter 'w' is read by no operator"),
        ("outputs: [r]\n", "outputs: [z]\n", "outputs ['z'] are made by no operator"),
        ('kind: relu, spec: "ac->ac", inputs: [s]', 'kind: dropout_mask, spec: "->qc", inputs: [], attributes: {p: $p}',
         "operator 'r': axis 'q' of spec '->qc' has no extent"),
        ("kind: relu,", "kind: scale, attributes: {factor: {inverse_sqrt: z}},", "factor: axis 'z' has no extent"),
        ("kind: relu,", "kind: scale,", "a scale has the attributes ['factor'], not []"),
    ],
)  # fmt: skip
def test_operators_that_do_not_fit_name_file_operator_and_axis(write: Write, old: str, new: str, message: str) -> None:
    text = SMALL.replace(old, new)
    assert text != SMALL
    path = write(text)
    with pytest.raises(ModelError) as caught:
        load_model(path).instantiate(None, {"a": 2, "b": 3})
    assert message in str(caught.value)
    assert str(caught.value).startswith(path)


def test_a_dropout_must_have_the_p_of_its_mask(write: Write) -> None:
    text = SMALL.replace("outputs: [r]\n", "outputs: [d]\n").replace(
        "  - {name: r,",
        '  - {name: k, kind: dropout_mask, spec: "->ac", inputs: [], outputs: [k], attributes: {p: 0.25}}\n'
        '  - {name: d, kind: dropout, spec: "ac,ac->ac", inputs: [s, k], outputs: [d], attributes: {p: $p}}\n'
        "  - {name: r,",
    )
    with pytest.raises(ModelError, match=r"operator 'd': p is 0\.5, that of its mask 'k' 0\.25"):
        load_model(write(text)).instantiate("two")


def test_the_definition_is_json_and_as_good_as_the_file() -> None:
    model = load_model("bert-encoder").instantiate("tiny")
    text = yaml.safe_dump(json.loads(json.dumps(model.to_json()["definition"])))
    assert yaml.safe_load(text) == model.definition
