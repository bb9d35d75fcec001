"""Numbers as people write them, in options and in files."""

from pathlib import Path

import pytest

from autotuner.errors import ModelError, SpaceError
from autotuner.ir.models import load_model, named_model, read_value
from autotuner.ir.records import Scalar
from autotuner.space import load_space

HUGE = "9" * 400


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-12", 1e-12), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5", 0.5), ("1.", 1.0), ("+1", 1.0), ("7", 7),
        ("true", True), ("False", False), ("relu", "relu"), ('"relu"', "relu"), ('"1e-12"', "1e-12"), ("[1", "[1"),
        ("[1]", "[1]"), ("null", "null"), ("inf", "inf"), ("1e400000", float("inf")), ("[" * 100_000, "[" * 100_000),
    ],
    ids=lambda value: str(value)[:8],
)  # fmt: skip
def test_a_text_stands_for_a_number_wherever_it_is_written_as_one(text: str, value: Scalar) -> None:
    found = read_value(text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["1e-12", "1E-12", "1.e-12", "0.1e-11", "0.000_1e-8"])
def test_a_model_file_has_numbers_with_an_exponent(tmp_path: Path, text: str) -> None:
    (tmp_path / "small.yaml").write_text(f"""
version: 1
name: small
axes: {{a: rows}}
options: {{epsilon: {{default: {text}, range: [0, 1e-3]}}}}
inputs: {{x: {{axes: a}}}}
operators: [{{name: y, kind: relu, spec: "a->a", inputs: [x], outputs: [y]}}]
outputs: [y]
""")
    option = load_model(str(tmp_path / "small.yaml")).definition.options["epsilon"]
    assert (option.default, option.range) == (1e-12, [0.0, 1e-3])


def test_a_search_space_has_numbers_with_an_exponent(tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text(
        "{version: 1, device_type: cpu, kernels: {torch_relu: {params: {share: [1e-3, 2e3]}}}, conversions: []}"
    )
    assert load_space(tmp_path / "cpu.yaml").kernels["torch_relu"].params == {"share": [1e-3, 2e3]}


@pytest.mark.parametrize("value", [int(HUGE), float("inf"), float("nan"), -1, True], ids=lambda value: str(value)[:4])
def test_a_number_that_no_range_has_is_refused(value: Scalar) -> None:
    with pytest.raises(ModelError, match="it must be a number from 0 to below 1"):
        named_model("bert-encoder:tiny", options={"epsilon": value})


@pytest.mark.slow
@pytest.mark.parametrize("content", [bytes(range(256)), b"9" * 5000, b"[" * 50_000, b"2020-13-45"],
                         ids=["binary", "huge", "deep", "no date"])  # fmt: skip
def test_a_file_of_something_else_is_refused_where_a_model_or_a_space_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(ModelError, match=r"odd\.yaml"):
        load_model(str(tmp_path / "odd.yaml"))
    with pytest.raises(SpaceError, match=r"odd\.yaml"):
        load_space(tmp_path / "odd.yaml")
