"""FlashAttention on a CUDA device, forward and backward, through torch's own operators.

They offer no out-variants; copying what they made into the given outputs is part of their time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.rules.attention import dropped_share
from autotuner.kernels.torch.attention import (
    backward_operands,
    backward_outputs,
    causal,
    factor,
    forward_operands,
    forward_output,
)

Run = Callable[[], Any]
aten = torch.ops.aten


def forward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """softmax(factor * query key^T), dropped or not, times value; the log-sum-exp, and seed and offset of the mask."""
    subgraph = call.subgraph
    query, key, value = forward_operands(subgraph, inputs)
    into = forward_output(subgraph, outputs[0])
    dropped, is_causal, scale = dropped_share(subgraph), causal(subgraph), factor(subgraph)

    def run() -> None:
        out, log_sum_exp, _, _, _, _, state, _, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropped, is_causal, False, scale=scale
        )
        into.copy_(out)
        if len(outputs) > 1:
            outputs[1].view(log_sum_exp.shape).copy_(log_sum_exp)
        if len(outputs) > 2:
            outputs[2].copy_(state.view(torch.int64))

    return run


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradients of query, key and value from forward's output, log-sum-exp and mask; weights are recomputed inside.

    The boundary's inputs are gradient, query, key, value, output, log-sum-exp, and the state of the mask's generator
    where weights are dropped.
    """
    subgraph = call.subgraph
    grad, query, key, value, out = backward_operands(subgraph, inputs)
    into = backward_outputs(subgraph, outputs)
    log_sum_exp = inputs[5].view(query.shape[:3])
    state = inputs[6] if len(inputs) > 6 else torch.zeros(2, dtype=torch.int64, device=grad.device)
    dropped, is_causal, scale = dropped_share(subgraph), causal(subgraph), factor(subgraph)
    rows, columns, unused = query.shape[2], key.shape[2], state[:0]

    def run() -> None:
        made = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, log_sum_exp, None, None, rows, columns, dropped, is_causal,
            state.view(torch.uint64), unused, scale=scale,
        )  # fmt: skip
        torch._foreach_copy_(into, list(made))

    return run
