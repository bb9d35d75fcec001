"""Memory-efficient attention on a CUDA device, forward and backward, through torch's own operators.

They take float32, too, and add a mask to the scores. They offer no out-variants; copying what they made into the given
outputs is part of their time. Where a head has not a multiple of 32 rows, so is padding its log-sum-exp for backward.

The mask of dropped weights is kept as seed and offset of torch's generator, on the device. In a CUDA graph the library
writes and reads both there. Outside of one it has them on the host: there, backward with dropped weights waits for the
device until it has brought them over. Each forward advances the generator by as many numbers as there are weights.

Source:
    torch, aten/src/ATen/native/transformers/cuda/attention.cu (note "Seed and Offset Device"), attention_backward.cu.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call, Subgraph
from autotuner.kernels.rules.attention import dropped_share
from autotuner.kernels.torch.attention import (
    added,
    backward_operands,
    backward_outputs,
    band,
    bias_gradient,
    causal,
    factor,
    forward_operands,
    forward_output,
)
from autotuner.kernels.torch.programmed import outside_of_band

ALIGNED = 16
"""Elements that a row of what is added has, or a multiple."""
Run = Callable[[], Any]
aten = torch.ops.aten

LOG_SUM_EXP_ROWS = 32
"""The library makes and reads a multiple of so many of each head; weights of further rows are exp(-inf)."""


def forward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """softmax(factor * query key^T + mask), dropped or not, times value; the log-sum-exp, and the state of the mask."""
    subgraph = call.subgraph
    query, key, value = forward_operands(subgraph, inputs)
    into = forward_output(subgraph, outputs[0])
    addend = _added(subgraph, inputs, query, key)
    dropped, is_causal, scale = dropped_share(subgraph), causal(subgraph), factor(subgraph)
    saves, rows = len(outputs) > 1, query.shape[2]

    def run() -> None:
        out, log_sum_exp, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, addend(), saves, dropped, is_causal, scale=scale
        )
        into.copy_(out)
        if saves:
            outputs[1].copy_(log_sum_exp[..., :rows])
        if len(outputs) > 2:
            _keep(seed, offset, outputs[2])

    return run


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradients of query, key and value, and of a bias; the boundary is that of `attention_flash.backward`, and what
    is added to the scores. The library's gradient of a bias is as large as the scores, and is summed behind it."""
    subgraph = call.subgraph
    grad, query, key, value, out = backward_operands(subgraph, inputs)
    addend = _added(subgraph, inputs, query, key)
    into_bias = bias_gradient(subgraph, outputs, query, key)
    into = backward_outputs(subgraph, outputs)
    dropped, is_causal, scale = dropped_share(subgraph), causal(subgraph), factor(subgraph)
    state = inputs[6] if dropped else torch.zeros(2, dtype=torch.int64)
    missing = -query.shape[2] % LOG_SUM_EXP_ROWS

    def run() -> None:
        padded = torch.nn.functional.pad(inputs[5], (0, missing), value=float("inf")) if missing else inputs[5]
        seed, offset = _readable(state)
        made = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, addend(), out, padded, seed, offset, dropped,
            [True, True, True, into_bias is not None], is_causal, scale=scale,
        )  # fmt: skip
        torch._foreach_copy_(into, list(made[:3]))
        if into_bias is not None:
            _sum_into(made[3], into_bias)

    return run


def _added(subgraph: Subgraph, inputs: Sequence[Tensor], query: Tensor, key: Tensor) -> Callable[[], Tensor | None]:
    """Return what makes the sum that is added to the scores: of a mask or a bias, and of what hides all but a window.

    That sum is made anew in each run, in memory of which nothing stays.
    """
    given, window = added(subgraph, inputs, query, key), band(subgraph)
    if window is None:
        return lambda: given
    (rows, columns), heads = (query.shape[2], key.shape[2]), query.shape[:2]
    hiding = outside_of_band(rows, columns, window, query)
    own = hiding[None, None]
    if given is not None:
        own = given[tuple(slice(1 if step == 0 else None) for step in given.stride()[:2])]
    aligned = -(-columns // ALIGNED) * ALIGNED

    def summed() -> Tensor:
        made = query.new_empty(*own.shape[:2], rows, aligned)[..., :columns]
        if given is None:
            made.copy_(own)
        else:
            torch.add(own, hiding, out=made)
        return made.expand(*heads, rows, columns)

    return summed


def _sum_into(gradient: Tensor, into: Tensor) -> None:
    """Write the sum along the axes that a bias does not have, where the view of its gradient has stride 0."""
    summed = [axis for axis, stride in enumerate(into.stride()) if stride == 0]
    first = into[tuple(slice(1) if axis in summed else slice(None) for axis in range(into.dim()))]
    if summed:
        torch.sum(gradient, summed, keepdim=True, out=first)
    else:
        first.copy_(gradient)


def _keep(seed: Tensor, offset: Tensor, state: Tensor) -> None:
    """Write seed and offset into two integers, without waiting for the device."""
    if seed.is_cuda == state.is_cuda:
        torch.stack((seed, offset), out=state)
        return
    for place, number in enumerate((seed, offset)):
        state[place].fill_(int(number))


def _readable(state: Tensor) -> tuple[Tensor, Tensor]:
    """Return seed and offset where the library reads them: on the device if a graph is captured, else on the host."""
    if state.is_cuda and not torch.cuda.is_current_stream_capturing():
        state = state.cpu()
    return state[0], state[1]
