"""What is too large to be enumerated or run is refused when a model is read, with what would be possible."""

import json
from copy import deepcopy
from typing import Any

import pytest

from autotuner.errors import ModelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, ModelFile, load_model
from autotuner.ir.models.bounds import AXES_MAX, ELEMENTS_MAX, EXTENT_MAX, OPERATORS_MAX
from autotuner.ir.models.schema import parse_definition


def chain(operators: int, axes: str = "ab", extent: int = 2) -> dict[str, Any]:
    """Return a model file of activations, one behind the other, over a tensor with these axes."""
    return {
        "version": 1,
        "name": "chain",
        "axes": dict.fromkeys(axes, "an axis"),
        "presets": {"small": dict.fromkeys(axes, extent)},
        "inputs": {"t0": {"axes": axes}},
        "operators": [
            {"name": f"o{i}", "kind": "relu", "spec": f"{axes}->{axes}", "inputs": [f"t{i}"], "outputs": [f"t{i + 1}"]}
            for i in range(operators)
        ],
        "outputs": [f"t{operators}"],
    }


def read(content: dict[str, Any]) -> Model:
    return ModelFile("mine.yaml", parse_definition(content, "mine.yaml")).instantiate("small")


def test_a_tensor_has_eight_axes_at_most() -> None:
    assert AXES_MAX == 8
    read(chain(2, "abcdefgh"))
    with pytest.raises(ModelError) as raised:
        read(chain(2, "abcdefghijkl"))
    assert str(raised.value) == (
        "mine.yaml: operator 'o0': spec 'abcdefghijkl->abcdefghijkl' gives tensor 't0' 12 axes; at most 8 are "
        "possible: write those as one that no operator tells apart"
    )


def test_a_model_has_1024_operators_at_most() -> None:
    assert OPERATORS_MAX == 1024
    read(chain(1024))
    with pytest.raises(ModelError, match=r"^mine\.yaml: it has 1,025 operators; at most 1,024 are possible: tune one"):
        read(chain(1025))


@pytest.mark.parametrize("extent", [EXTENT_MAX + 1, 10**400, 10**5000], ids=["33 bits", "huge", "huger"])
def test_an_extent_is_within_32_bits(extent: int) -> None:
    with pytest.raises(ModelError, match=rf"presets: small: a: .*less than or equal to {EXTENT_MAX}"):
        read(chain(1, extent=extent))
    file = load_model("bert-encoder")
    with pytest.raises(
        ModelError, match=f"axis 'p' has extent .*; it must be an integer above 0, and at most {EXTENT_MAX}"
    ):
        file.instantiate("tiny", {"p": extent})


def test_no_tensor_and_no_loop_is_larger_than_a_device_could_bear() -> None:
    with pytest.raises(
        ModelError, match=rf"mine\.yaml: tensor 't0' has 1099549000000 elements; at most {ELEMENTS_MAX}"
    ):
        read(chain(1, "abc") | {"presets": {"small": {"a": 1000, "b": 1000, "c": 1_099_549}}})
    content = chain(1) | {
        "axes": dict.fromkeys("abc", "an axis"),
        "presets": {"small": dict.fromkeys("abc", 2**20 + 1)},
        "parameters": {"w": "cb"},
        "operators": [
            {"name": "o0", "kind": "contraction", "spec": "ab,cb->ac", "inputs": ["t0", "w"], "outputs": ["t1"]}
        ],
    }
    with pytest.raises(ModelError, match="at most"):
        read(content)


def test_operands_of_a_program_have_no_loop_in_common() -> None:
    """A projection of 8 experts, as in Mixtral: all of its axes together have 2**66 places, and nothing visits them."""
    (s, h), (t, u, v) = (2**13, 2**12), (8, 2**13, 2**12)
    program = {
        "calls": [["select.int", ["%1", 0, 3], {}], ["permute.default", ["%2", [1, 0]], {}],
                  ["mm.default", ["%0", "%3"], {}]],
        "inputs": [["float32", [s, h], True], ["float32", [t, u, v], True]],
        "output": ["float32", [s, u]],
        "result": "%4",
        "saved": [0, 1],
    }  # fmt: skip
    content = chain(1) | {
        "axes": dict.fromkeys("shtuvw", "an axis"),
        "presets": {"small": {"s": s, "h": h, "t": t, "u": u, "v": v, "w": u}},
        "inputs": {"t0": {"axes": "sh"}},
        "parameters": {"w0": "tuv"},
        "operators": [
            {"name": "o0", "kind": "program", "spec": "sh,tuv->sw", "inputs": ["t0", "w0"], "outputs": ["t1"],
             "attributes": {"program": json.dumps(program)}}
        ],
    }  # fmt: skip
    (operator,) = read(content).graph().operators
    assert operator.kind == "program"


def test_24_encoder_layers_written_out_are_within_the_bounds() -> None:
    content = load_model("bert-encoder").definition.model_dump(mode="json", exclude_none=True)
    layer = content["operators"]
    content["operators"], shared = [], set(content["parameters"]) | {"attention_mask"}
    before = "x"
    for number in range(24):
        names = {"x": before} | {name: name for name in shared}
        for operator in deepcopy(layer):
            operator["name"] += f"_{number}"
            operator["inputs"] = [names.get(name, f"{name}_{number}") for name in operator["inputs"]]
            operator["outputs"] = [f"{name}_{number}" for name in operator["outputs"]]
            content["operators"].append(operator)
        before = f"y_{number}"
    content["outputs"] = [before]
    model = ModelFile("deep", parse_definition(content, "deep")).instantiate("tiny")
    assert len(model.graph().operators) == 24 * len(load_model("bert-encoder").instantiate("tiny").graph().operators)
    assert len(training_graph(model.graph()).operators) > 24 * 60
