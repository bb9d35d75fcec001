"""Equal graphs under different names."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.matching import same_tensors
from autotuner.ir.models import load_model


def graph(**options: str | float) -> Graph:
    return load_model("bert-encoder").instantiate("tiny", options=options).graph()


def renamed(of: Graph, turn: Callable[[Operator], Operator] = lambda operator: operator) -> Graph:
    """Return a graph with other names, and operators of one product each before all others where that can be."""

    def new(name: str) -> str:
        return f"its_{name}"

    tensors = {new(name): replace(tensor, name=new(name)) for name, tensor in of.tensors.items()}
    operators = [
        replace(turn(o), name=new(o.name), inputs=tuple(map(new, turn(o).inputs)), outputs=tuple(map(new, o.outputs)))
        for o in of.operators
    ]
    operators.sort(key=lambda o: (new("x") not in o.inputs, 0) if o.kind == "contraction" else (True, 0))
    return Graph("another", of.extents, tensors, tuple(operators), tuple(map(new, of.outputs)))


def swapped(operator: Operator) -> Operator:
    return replace(operator, inputs=operator.inputs[::-1]) if operator.kind == "add" else operator


@pytest.mark.parametrize("turn", [lambda operator: operator, swapped], ids=["as it is", "sums the other way round"])
def test_names_and_orders_say_nothing(turn: Callable[[Operator], Operator]) -> None:
    one = graph()
    found = same_tensors(renamed(one, turn), one)
    assert found == {f"its_{name}": name for name in one.tensors}


@pytest.mark.parametrize(
    "other",
    [
        graph(activation="relu"),
        graph(epsilon=1e-6),
        graph(attention_dropout=0.2),
        graph(attention_mask=True),
        load_model("bert-encoder").instantiate("tiny", extents={"l": 32}).graph(),
        load_model("bert-encoder").instantiate("tiny", dtype="bfloat16").graph(),
        load_model("gpt-block").instantiate("tiny").graph(),
    ],
    ids=["activation", "epsilon", "dropout", "mask", "extents", "type", "model"],
)
def test_what_computes_something_else_does_not_match(other: Graph) -> None:
    assert same_tensors(graph(), other) is None
    assert same_tensors(other, graph()) is None


def test_an_input_that_needs_a_gradient_is_not_one_that_needs_none() -> None:
    one = graph()
    data = Graph(one.name, one.extents, {**one.tensors, "x": replace(one.tensors["x"], constant=True)}, one.operators,
                 one.outputs)  # fmt: skip
    assert same_tensors(data, data) is not None
    assert same_tensors(one, data) is None
    assert same_tensors(data, one) is None


def sums(last: str) -> Graph:
    """Return a sum of forty terms, each of which is added before or behind those so far, and one behind a function."""
    names = [f"term{number}" for number in range(40)]
    operators = [Operator("sum0", last, "bh->bh", (names[0],), ("sum0",))]
    for number, name in enumerate(names[1:], 1):
        operators.append(Operator(f"sum{number}", "add", "bh,bh->bh", (name, f"sum{number - 1}"), (f"sum{number}",)))
    tensors = {name: Tensor(name, "bh", "float32", "input") for name in names}
    tensors |= {o.name: Tensor(o.name, "bh", "float32", "activation") for o in operators}
    return Graph("sums", {"b": 2, "h": 3}, tensors, tuple(operators), (operators[-1].name,))


def test_a_search_in_vain_does_not_try_all_orders_of_all_sums() -> None:
    assert same_tensors(sums("relu"), renamed(sums("relu"), swapped)) is not None
    assert same_tensors(sums("relu"), sums("gelu_erf")) is None


def test_one_tensor_is_not_two() -> None:
    """A weight that is read twice is not two weights, though each product alone is equal."""
    one = graph()
    tied = [
        replace(o, inputs=(o.inputs[0], "query_weight")) if o.name == "key_projection" else o for o in one.operators
    ]
    tensors = {name: tensor for name, tensor in one.tensors.items() if name != "key_weight"}
    other = Graph("tied", one.extents, tensors, tuple(tied), one.outputs)
    assert same_tensors(one, other) is None
    assert same_tensors(other, one) is None
