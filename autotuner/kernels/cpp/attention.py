"""Attention of float32 heads by this package's own kernel, forward and backward; operands stay where they are.

Scores of a few queries are there at a time, with all keys that these see: what a causal mask hides is not computed.
Backward makes the weights again from the log-sum-exp. A thread keeps its memory for that from call to call.
"""

from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call, Subgraph
from autotuner.kernels.cpp.compiled import function
from autotuner.kernels.torch.attention import (
    backward_operands,
    backward_outputs,
    causal,
    factor,
    forward_operands,
    forward_output,
)

Run = Callable[[], Any]


class Heads(Structure):
    """A pointer and strides in elements; features are contiguous."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64))


OPERANDS = ("query", "key", "value", "out", "grad", "grad_query", "grad_key", "grad_value")


class AttentionOperands(Structure):
    """Operands of the kernels, in the order of the source's structure `Attention`."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "shared", "rows", "columns", "features")),
        ("causal", c_int32), ("scale", c_float), *((name, Heads) for name in OPERANDS), ("log_sum_exp", c_void_p),
    )  # fmt: skip


def forward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """softmax(factor * query key^T) value, causal or not, and the log-sum-exp that backward needs."""
    query, key, value = forward_operands(call.subgraph, inputs)
    statistics = outputs[1] if len(outputs) > 1 else None
    heads = {"query": query, "key": key, "value": value, "out": forward_output(call.subgraph, outputs[0])}
    return _built("attention", call.subgraph, heads, statistics)


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradients of query, key and value from forward's output and log-sum-exp; weights are recomputed inside.

    The boundary's inputs are gradient, query, key, value, output and log-sum-exp.
    """
    names = ("grad", "query", "key", "value", "out")
    heads = dict(zip(names, backward_operands(call.subgraph, inputs), strict=True))
    into = backward_outputs(call.subgraph, outputs)
    heads |= {f"grad_{name}": each for name, each in zip(names[1:4], into, strict=True)}
    return _built("attention_grad", call.subgraph, heads, inputs[5])


def _built(name: str, subgraph: Subgraph, heads: dict[str, Tensor], statistics: Tensor | None) -> Run:
    batch, count, rows, features = heads["query"].shape
    _, shared, columns, _ = heads["key"].shape
    operands = (_heads(heads.get(operand)) for operand in OPERANDS)
    structure = AttentionOperands(
        batch, count, count // shared, rows, columns, features, causal(subgraph), factor(subgraph), *operands,
        None if statistics is None else statistics.data_ptr(),
    )  # fmt: skip
    run, pointer, threads = function("attention", name, AttentionOperands), byref(structure), torch.get_num_threads

    def attend(_kept: object = (structure, heads, statistics)) -> None:
        run(pointer, threads())

    return attend


def _heads(tensor: Tensor | None) -> Heads:
    return Heads(None, 0, 0, 0) if tensor is None else Heads(tensor.data_ptr(), *tensor.stride()[:3])
