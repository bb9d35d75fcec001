"""Grouped products and choices: kernels verify in every type, near ties among it, and gradients are those of a loop."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from autotuner.errors import GraphError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.program import Program, parse_program
from autotuner.ir.records import Call, Candidate
from autotuner.kernels.torch.grouped import grouped_product
from autotuner.kernels.torch.programs import check_calls, function_of
from autotuner.measure.operands import Values
from tests.kernels.test_program_kernels import calls_of, faults
from tests.programs import graph_of, written

ROWS, WIDE, NARROW, GROUPS = 10, 6, 5, 4
EXTENTS = {"s": ROWS, "h": WIDE, "f": NARROW, "e": GROUPS, "t": 40, "k": 2}
ENDS = [("_to_copy.default", ["%2"], {"dtype": "dtype:int64"}), ("clamp.default", ["%3", 0, GROUPS - 1]),
        ("_to_copy.default", ["%4"], {"dtype": "dtype:float32"}), ("histc.default", ["%5", GROUPS, 0, GROUPS - 1]),
        ("cumsum.default", ["%6", 0], {"dtype": "dtype:int32"})]  # fmt: skip
GROUPED = [*ENDS, ("permute.default", ["%1", [0, 2, 1]]), ("_grouped_mm.default", ["%0", "%8", "%7"])]


OF_INTEGERS = [*ENDS[:2], ("_to_copy.default", ["%4"], {"dtype": "dtype:int32"}), *ENDS[3:]]
"""Ends of groups as models count them on a CUDA device."""


def grouped(dtype: str) -> Graph:
    """Return a graph of a grouped product whose groups follow from a choice for each row."""
    inputs = [[dtype, [ROWS, WIDE], True], [dtype, [GROUPS, NARROW, WIDE], True], ["float32", [ROWS], False]]
    return graph_of("program", "sh,efh,s->sf", written(GROUPED, inputs, [dtype, [ROWS, NARROW]]), EXTENTS)


def chosen(dtype: str) -> str:
    calls = [("topk.default", ["%0", 2]), ("getitem", ["%1", 1]),
             ("_to_copy.default", ["%2"], {"dtype": "dtype:float32"})]  # fmt: skip
    return written(calls, [[dtype, [40, GROUPS], False]], ["float32", [40, 2]])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_product_and_its_gradients_are_those_of_a_loop(transposed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64)
    w = torch.randn(4, 3, 5, dtype=torch.float64)
    w = w.transpose(1, 2) if transposed else w.transpose(1, 2).contiguous()
    of_row, ends = torch.tensor([0, 0, 2, 2, 2, 3, 3]), torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    weights = torch.randn(7, 3, dtype=torch.float64)

    def loop(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([row @ w[group] for row, group in zip(x, of_row, strict=True)])

    made, pulled, *_ = torch.func.vjp(lambda x, w: grouped_product(x, w, ends), x, w)
    wanted, wanted_pulled, *_ = torch.func.vjp(loop, x, w)
    torch.testing.assert_close(made, wanted)
    for one, other in zip(pulled(weights), wanted_pulled(weights), strict=True):
        torch.testing.assert_close(one, other)


def test_groups_are_counted_from_integers_too() -> None:
    """ATen counts these on a CUDA device alone; texts are checked, and computed in float64, on a CPU."""

    def text(calls: list[Any]) -> Program:
        inputs = [
            ["float32", [ROWS, WIDE], True],
            ["float32", [GROUPS, NARROW, WIDE], True],
            ["float32", [ROWS], False],
        ]
        return parse_program(written([*calls, *GROUPED[-2:]], inputs, ["float32", [ROWS, NARROW]]))

    check_calls(text(OF_INTEGERS), "program")
    x, w, of_row = (
        torch.randn(ROWS, WIDE),
        torch.randn(GROUPS, NARROW, WIDE),
        torch.tensor([0.0, 0, 0, 1, 1, 3, 3, 3, 3, 3]),
    )
    made = function_of(text(OF_INTEGERS))(x, w, of_row)
    torch.testing.assert_close(made, function_of(text(ENDS))(x, w, of_row), rtol=0, atol=0)
    torch.testing.assert_close(made, torch.stack([w[int(group)] @ row for row, group in zip(x, of_row, strict=True)]))


def test_rows_that_fit_no_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes rows \(S, K\) and matrices \(E, K, N\)"):
        grouped_product(torch.ones(3, 4), torch.ones(2, 5, 6), torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="the ends of the groups are integers, one for each"):
        grouped_product(torch.ones(3, 4), torch.ones(2, 4, 6), torch.tensor([1.0, 3.0]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_program_with_a_grouped_product_verifies_and_so_does_its_gradient(dtype: str) -> None:
    calls = calls_of(grouped(dtype), "torch_program", "torch_program_grad", "inductor")
    kernels = {(*call.subgraph.kinds, call.candidate.kernel) for call in calls}
    assert kernels == {("program", "torch_program"), ("program", "inductor"),
                       ("program_grad", "torch_program_grad"), ("program_grad", "inductor")}  # fmt: skip
    assert faults(calls) == []


def test_a_wrong_group_is_found() -> None:
    """Made-up choices are spread over all groups, so that a check of what reads them says something."""
    graph = training_graph(grouped("bfloat16"))
    for operator in graph.operators:
        subgraph = graph.subgraph([operator], operator.inputs, operator.outputs)
        values = dict(zip(operator.inputs, Values(subgraph).inputs.values(), strict=True))
        groups = values["x2"].long()
        assert set(groups.tolist()) == set(range(GROUPS))
        program = function_of(parse_program(str(operator.attribute("program"))))
        x, w = torch.randn(ROWS, WIDE), torch.randn(GROUPS, NARROW, WIDE)
        made = program(x, w, groups.float())
        assert not torch.allclose(made, program(x, w, (groups + 1).remainder(GROUPS).float()), atol=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_choice_among_ties_verifies(dtype: str) -> None:
    graph = graph_of("choice", "te->tk", chosen(dtype), EXTENTS)
    (operator,) = graph.operators
    (scores,) = Values(graph.subgraph([operator], operator.inputs, operator.outputs)).inputs.values()
    if dtype == "bfloat16":
        scores.copy_(scores.mul(2).round())
        assert (scores.sort(1).values.diff(dim=1) == 0).any()
    (operator,) = graph.operators
    subgraph = graph.subgraph([operator], operator.inputs, operator.outputs)
    assert faults([Call(subgraph, Candidate("torch_choice", tuple(each.axes for each in subgraph.tensors)))]) == []


def test_a_choice_has_no_gradient_and_makes_places() -> None:
    text = json.loads(chosen("float32"))
    check_calls(parse_program(json.dumps(text)), "choice")
    for change, said in (({"inputs": [["float32", [40, GROUPS], True]]}, "a choice has no gradient"),
                         ({"output": ["float64", [40, 2]]}, "as numbers in float32, not in float64")):  # fmt: skip
        with pytest.raises(GraphError, match=said):
            training_graph(graph_of("choice", "te->tk", json.dumps(text | change), EXTENTS))
