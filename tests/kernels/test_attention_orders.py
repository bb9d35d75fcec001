"""Attention of models that declare heads before rows, rows before the batch, or each operand in an order of its own."""

import pytest

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.records import Call, Candidate
from autotuner.kernels import KERNELS
from autotuner.kernels.heads import head_operands
from autotuner.kernels.rules.attention import attention_layouts
from autotuner.space.fusion import covers
from tests.kernels.calls import faults
from tests.space.test_fusion import attention

ORDERS = {
    "heads before rows": ("bnqp", "bnkp", "bnqk", "bnkv", "bnqv"),
    "rows before the batch": ("qbnp", "kbnp", "bnqk", "kbnv", "qbnv"),
    "each its own": ("bqnp", "bnkp", "bnqk", "kbnv", "bnqv"),
    "heads that share a key": ("bnrqp", "bnkp", "bnrqk", "bknv", "qbnrv"),
    "one key for all heads to share": ("bqrp", "bkp", "brqk", "kbv", "brqv"),
}
"""Axes of query, key, scores, value and output."""
CPU = ("torch_flash_attention", "cpp_attention")


def ordered(order: tuple[str, str, str, str, str], dtype: str = "float32") -> Graph:
    return training_graph(attention(*order, k=7, p=8, v=8, dtype=dtype))


def calls(graph: Graph, name: str) -> list[Call]:
    """Return the calls of a kernel, in all of its layouts, as far as its rule admits them."""
    named = {operator.name: operator for operator in graph.operators}
    kernel = KERNELS[name]
    found = []
    for cover in covers(graph, (name, kernel.partner), 8):
        if name not in cover.kernels:
            continue
        members = [named[member] for member in cover.recomputed + cover.operators]
        subgraph = graph.subgraph(members, cover.inputs, cover.outputs)
        candidates = (Candidate(name, row) for row in dict.fromkeys(kernel.layouts(subgraph)))
        found += [Call(subgraph, each) for each in candidates if kernel.refuses(subgraph, each) is None]
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CPU)
def test_every_order_equals_the_reference(order: str, name: str) -> None:
    graph = ordered(ORDERS[order])
    for kernel in (name, f"{name}_grad"):
        found = calls(graph, kernel)
        assert len(found) >= 2
        assert faults(found) == {}


@pytest.mark.parametrize("order", ORDERS)
def test_operands_may_lie_as_declared_with_rows_first_and_with_heads_first(order: str) -> None:
    graph = ordered(ORDERS[order], "bfloat16")
    (call, *_) = calls(graph, "cudnn_attention")
    operands = head_operands(call.subgraph)
    rows = list(attention_layouts(call.subgraph))
    assert len(rows) == len(set(rows))
    for place, number in enumerate(call.subgraph.inputs[:3]):
        of, axes = operands[number], call.subgraph.tensors[number].axes
        orders = {"".join(axes[of.declared.index(letter)] for letter in each)
                  for each in (of.declared, of.rows_first, of.heads_first)}  # fmt: skip
        assert {row[place] for row in rows} == orders


@pytest.mark.parametrize("name", ["cuda_flash_attention", "cuda_efficient_attention"])
def test_backward_of_torch_copies_what_has_its_rows_not_first(name: str) -> None:
    backward = f"{name}_grad"
    assert calls(ordered(("bqnp", "bknp", "bnqk", "bknv", "bqnv"), "bfloat16"), backward)
    assert not calls(ordered(("bqnp", "bknp", "bnqk", "bknv", "bnqv"), "bfloat16"), backward)
