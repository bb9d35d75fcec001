"""Kernels of operators that carry a program: each verifies, in every order that its rule admits; and tuned models."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from autotuner.ir.autodiff import training_graph
from autotuner.ir.cost import operator_flop
from autotuner.ir.graph import Graph, Operator, Role, Tensor
from autotuner.ir.records import Call, Candidate
from autotuner.kernels import KERNELS
from autotuner.kernels.canonical import canonical
from autotuner.kernels.torch import programmed
from autotuner.measure.operands import Buffers, Values
from autotuner.measure.tolerance import allowed
from autotuner.measure.verification import References, fault
from autotuner.space.fusion import covers
from tests.docs.blocks import ROOT
from tests.programs import expression, graph_of, written

EXTENTS = {"b": 2, "l": 5, "n": 3, "p": 4, "h": 12}
CAP = [("div.Tensor", ["%0", 5.0]), ("tanh.default", ["%1"]), ("mul.Tensor", ["%2", 5.0])]
GATED = [("mul.Tensor", ["%0", 0.5]), ("tanh.default", ["%3"]), ("mul.Tensor", ["%4", "%1"]),
         ("add.Tensor", ["%5", "%2"])]  # fmt: skip
WINDOW = [("roll.default", ["%0", [1], [1]]), ("view.default", ["%2", [2, 5, 3, 4]]),
          ("permute.default", ["%3", [0, 2, 1, 3]]), ("mul.Tensor", ["%4", "%1"])]  # fmt: skip


def calls_of(graph: Graph, *kernels: str) -> list[Call]:
    """Return a call for every row of layouts that the rules of some kernels admit, merged as a space has them."""
    training = training_graph(graph)
    named = {operator.name: operator for operator in training.operators}
    found: dict[Call, None] = {}
    for cover in covers(training, kernels, 8):
        subgraph = training.subgraph([named[name] for name in cover.operators], cover.inputs, cover.outputs)
        for kernel in (KERNELS[name] for name in cover.kernels):
            rows = [Candidate(kernel.name, row) for row in dict.fromkeys(kernel.layouts(subgraph))]
            for row in (row for row in rows if kernel.refuses(subgraph, row) is None):
                found |= {Call(subgraph, row): None, canonical(subgraph, row): None}
    return list(found)


def faults(calls: Sequence[Call]) -> list[str]:
    """Verify calls as a measurer does, and say what is wrong."""
    references, buffers, found = References(), Buffers(), []
    for call in calls:
        kernel, values = KERNELS[call.candidate.kernel], Values(call.subgraph)
        ((inputs, outputs),) = buffers.sets(call, values, 1)
        run = kernel.builder()(call, inputs, outputs)
        reason = fault(call, kernel, run, values, references, inputs, outputs)
        if reason:
            found.append(f"{call.candidate}: {reason}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_an_expression_is_right_in_every_order(dtype: str) -> None:
    text = expression(GATED, dtype, dtype, dtype)
    calls = calls_of(graph_of("pointwise", "bln,n,lb->bln", text, EXTENTS), "torch_pointwise", "torch_pointwise_grad",
                     "torch_pointwise_sum")  # fmt: skip
    kinds = [call.subgraph.kinds[0] for call in calls if len(call.subgraph.tensors[0].extents) == 3]
    assert all(kinds.count(kind) >= 6 for kind in ("pointwise", "pointwise_grad")), kinds  # orders of three axes
    assert kinds.count("pointwise_sum") >= 12
    assert faults(calls) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_is_right_as_it_is_declared(dtype: str) -> None:
    text = written(WINDOW, [[dtype, [2, 5, 12], True], [dtype, [5, 4], True]], [dtype, [2, 3, 5, 4]])
    calls = calls_of(graph_of("program", "blh,lp->bnlp", text, EXTENTS), "torch_program", "torch_program_grad")
    assert {call.subgraph.kinds for call in calls} == {("program",), ("program_grad",)}
    assert faults(calls) == []


def turned() -> Call:
    """Return a call of the kernel that differentiates a program."""
    text = written(WINDOW, [["float32", [2, 5, 12], True], ["float32", [5, 4], True]], ["float32", [2, 3, 5, 4]])
    return calls_of(graph_of("program", "blh,lp->bnlp", text, EXTENTS), "torch_program_grad")[0]


def test_a_gradient_is_traced_within_the_backward_of_a_device_that_has_one_thread_for_it() -> None:
    command = [sys.executable, "-m", "tests.kernels.traced_in_backward"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert "torch.ops.aten.permute.default" in done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_gradient_is_traced_within_a_gpu_s_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    call, kernel, built = turned(), KERNELS["torch_program_grad"], []
    values = Values(call.subgraph, device=torch.device("cuda"))
    ((inputs, outputs),) = Buffers(values.device).sets(call, values, 1)
    monkeypatch.setattr(programmed, "_TRACED", {})
    x = torch.ones(1, device="cuda", requires_grad=True).clone()
    x.register_hook(lambda _: built.append(kernel.builder()(call, inputs, outputs)))  # type: ignore[no-untyped-call]
    torch.autograd.backward(x)
    assert fault(call, kernel, built[0], values, References(), inputs, outputs) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiler_takes_expressions_alone_and_with_their_neighbours(dtype: str) -> None:
    calls = calls_of(chain(dtype), "inductor")
    sets = {"+".join(call.subgraph.kinds) for call in calls}
    assert "scale+pointwise+program+gelu_erf" in sets
    assert {"pointwise", "pointwise_grad", "pointwise_sum", "program", "program_grad"} <= sets
    assert len(sets) <= 14, sets
    assert faults([call for call in calls if declared(call)]) == []


def chain(dtype: str) -> Graph:
    """Return a graph in which an expression and a program stand between other operators."""
    gate = expression(GATED, dtype, dtype, dtype)
    turned = written(WINDOW, [[dtype, [2, 5, 12], True], [dtype, [5, 4], True]], [dtype, [2, 3, 5, 4]])
    axes = {"x": "blh", "s": "h", "t": "lb", "w": "lp", "scaled": "blh", "gated": "blh", "turned": "bnlp", "y": "bnlp"}
    roles: dict[str, Role] = {"x": "input", "s": "parameter", "t": "input", "w": "parameter"}
    tensors = {name: Tensor(name, own, dtype, roles.get(name, "activation")) for name, own in axes.items()}
    return Graph("chain", EXTENTS, tensors, (
        Operator("scaled", "scale", "blh->blh", ("x",), ("scaled",), (("factor", 0.5),)),
        Operator("gated", "pointwise", "blh,h,lb->blh", ("scaled", "s", "t"), ("gated",), (("program", gate),)),
        Operator("turned", "program", "blh,lp->bnlp", ("gated", "w"), ("turned",), (("program", turned),)),
        Operator("y", "gelu_erf", "bnlp->bnlp", ("turned",), ("y",)),
    ), ("y",))  # fmt: skip


def declared(call: Call) -> bool:
    """Tell whether all tensors of a call lie as they are declared."""
    forms = zip(call.subgraph.boundary, call.candidate.forms, strict=True)
    return all(form == call.subgraph.tensors[number].axes for number, form in forms)


def test_made_up_operands_stand_for_what_a_program_reads() -> None:
    """A flag is 0 or 1, what a root or a quotient is taken of is above 0; the rest is normal."""
    calls = [("ne.Scalar", ["%0", 0]), ("_to_copy.default", ["%1"], {"dtype": "dtype:float32"}),
             ("rsqrt.default", ["%5"]), ("div.Tensor", ["%6", "%2"]), ("where.self", ["%4", "%7", "%3"])]  # fmt: skip
    text = expression(calls, *["float32"] * 4, wanted=[1, 2, 3])
    graph = training_graph(graph_of("pointwise", "bl,bl,bl,bl->bl", text, {"b": 30, "l": 20}))
    for operator in graph.operators:
        subgraph = graph.subgraph([operator], operator.inputs, operator.outputs)
        values = dict(zip(operator.inputs, Values(subgraph).inputs.values(), strict=True))
        assert set(values["x0"].flatten().tolist()) == {0.0, 1.0}
        for name in ("x1", "x2"):
            assert name not in values or 0.5 <= float(values[name].min()) <= float(values[name].max()) <= 1.5
        assert all(float(values[name].min()) < 0 for name in ("x3", "grad_y") if name in values)
    assert faults(calls_of(graph_of("pointwise", "bl,bl,bl,bl->bl", text, {"b": 3, "l": 2}), "torch_pointwise")) == []


def test_tolerances_and_flop_grow_with_the_calls() -> None:
    short, long = (expression(calls, "float32") for calls in (CAP[:1], CAP))
    found = []
    for text in (short, long):
        graph = graph_of("pointwise", "bl->bl", text, EXTENTS)
        (operator,) = graph.operators
        subgraph = graph.subgraph([operator], operator.inputs, operator.outputs)
        found.append((operator_flop(graph, operator), allowed(subgraph, "float32")[0]))
    assert [flop for flop, _ in found] == [10, 30]
    assert found[1][1] == 3 * found[0][1]
