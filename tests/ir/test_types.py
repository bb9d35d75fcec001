"""Element types in one graph: what follows from what, and what is refused."""

from typing import Any

import pytest

from autotuner.errors import GraphError, ModelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.models import Model, ModelFile
from autotuner.ir.models.schema import parse_definition
from tests.mixed import EXTENTS, definition, mixed, operator


def with_operators(*operators: Any, outputs: tuple[str, ...] = ("y",), **inputs: Any) -> ModelFile:
    given = {
        "version": 1, "name": "small", "axes": {"b": "batch", "h": "hidden"}, "outputs": list(outputs),
        "inputs": {name: {"axes": "bh"} | entry for name, entry in inputs.items()}, "operators": list(operators),
    }  # fmt: skip
    return ModelFile("small", parse_definition(given, "small"))


def test_types_follow_from_inputs_parameters_and_casts() -> None:
    dtypes = {name: tensor.dtype for name, tensor in mixed().graph().tensors.items()}
    low = {"down", "x_low", "up_low", "up_bias_low", "wide", "biased", "active", "narrow", "mask", "dropped"}
    assert {name for name, dtype in dtypes.items() if dtype == "bfloat16"} == low
    assert {dtype for name, dtype in dtypes.items() if name not in low} == {"float32"}


def test_a_gradient_has_the_type_of_what_it_is_the_gradient_of() -> None:
    graph = training_graph(mixed("float16").graph())
    for name, tensor in graph.tensors.items():
        if tensor.role == "gradient" and name.removeprefix("grad_") in graph.tensors:
            assert tensor.dtype == graph.tensors[name.removeprefix("grad_")].dtype, name
    casts = {o.inputs[0]: o.attribute("dtype") for o in graph.operators if o.kind == "cast" and o.phase == "backward"}
    assert casts["grad_up_low"] == casts["grad_x_low"] == "float32"
    assert "float16" in casts.values()


def test_types_are_a_part_of_a_model_and_of_its_family() -> None:
    model = mixed()
    again = Model.from_json(model.to_json())
    assert again.graph().key == model.graph().key
    assert model.family != mixed("float16").family
    assert model.definition["parameters"]["up"] == "fh"  # as ever, where nothing is said


def test_operands_of_two_types_are_refused() -> None:
    changed = definition()
    changed["operators"] = [o for o in changed["operators"] if o["name"] != "high"]
    changed["operators"][-2]["inputs"] = ["dropped", "x"]
    with pytest.raises(ModelError, match="operator 'sum': 'dropped' is bfloat16 and 'x' is float32; a add has"):
        ModelFile("mixed", parse_definition(changed, "mixed")).instantiate(extents=EXTENTS)


def test_a_type_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="operator 'y': a cast to 'int8', which is no dtype; known: float32"):
        with_operators(operator("y", "cast", "bh->bh", "x", dtype="int8"), x={}).instantiate(extents={"b": 2, "h": 3})
    with pytest.raises(ModelError, match="inputs: x: dtype: Input should be 'float32'"):
        with_operators(operator("y", "relu", "bh->bh", "x"), x={"dtype": "float8"})


def test_a_mask_cannot_serve_two_types() -> None:
    file = with_operators(
        operator("mask", "dropout_mask", "->bh", p=0.5),
        operator("y", "dropout", "bh,bh->bh", "x", "mask", p=0.5),
        operator("z", "dropout", "bh,bh->bh", "w", "mask", p=0.5),
        x={}, w={"dtype": "bfloat16"}, outputs=("y", "z"),
    )  # fmt: skip
    with pytest.raises(ModelError, match="operator 'z': 'w' is bfloat16 and 'mask' is float32"):
        file.instantiate(extents={"b": 2, "h": 3})


def test_a_graph_whose_types_contradict_its_operators_has_no_gradients() -> None:
    tensors = {"x": Tensor("x", "ab", "float32", "input"), "y": Tensor("y", "ab", "bfloat16", "activation")}
    graph = Graph("wrong", {"a": 2, "b": 3}, tensors, (Operator("y", "relu", "ab->ab", ("x",), ("y",)),), ("y",))
    with pytest.raises(GraphError, match="operator 'y' makes 'y' in float32, not in bfloat16"):
        training_graph(graph)
