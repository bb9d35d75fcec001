"""Flash attention on the CPU, forward and backward, through torch's own operator.

It offers no out-variants; copying what it made into the given outputs is part of its time.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call, Subgraph
from autotuner.kernels.geometry import band_of, operand_letters
from autotuner.kernels.heads import HeadOperand, head_operands, score_axes
from autotuner.kernels.rules.attention import Added, added_mask, mask_beside_bias

aten = torch.ops.aten


def heads_first(tensor: Tensor, operand: HeadOperand) -> Tensor:
    """View an operand as batch, heads, rows and features; of heads that share a key, each is one of its own."""
    turned = tensor.permute([operand.declared.index(letter) for letter in operand.heads_first])
    if turned.dim() == len("bhrf"):
        return turned
    batches = len(operand.batch)
    return turned.view(prod(turned.shape[:batches]), prod(turned.shape[batches:-2]), *turned.shape[-2:])


def by_heads(subgraph: Subgraph, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """View operands of attention, forward or backward, as (batch, heads, rows, features).

    Args:
        numbers: of the operands in the subgraph.
    """
    known = head_operands(subgraph)
    return [heads_first(tensor, known[number]) for number, tensor in zip(numbers, tensors, strict=True)]


def backward_operands(subgraph: Subgraph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradient, query, key, value and output as (batch, heads, rows, features)."""
    return by_heads(subgraph, subgraph.inputs[:5], inputs[:5])


def backward_outputs(subgraph: Subgraph, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return where gradients of query, key and value go, as (batch, heads, rows, features)."""
    return by_heads(subgraph, subgraph.outputs[:3], outputs[:3])


def factor(subgraph: Subgraph) -> float:
    """Return what scores are multiplied with; 1 where they are not."""
    return next((float(dict(node.attributes)["factor"]) for node in subgraph.nodes if node.kind == "scale"), 1.0)


def causal(subgraph: Subgraph) -> bool:
    """Tell whether keys behind a query are hidden from it."""
    return "causal_mask" in subgraph.kinds


def band(subgraph: Subgraph) -> tuple[int, int] | None:
    """Return how many keys before its own, and behind it, a query sees at most; None where it has no window."""
    return next(filter(None, map(band_of, subgraph.nodes)), None)


def forward_operands(subgraph: Subgraph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return query, key and value as (batch, heads, rows, features)."""
    by_number = dict(zip(subgraph.inputs, inputs, strict=True))
    numbers = (*subgraph.nodes[0].inputs, subgraph.nodes[-1].inputs[1])
    return by_heads(subgraph, numbers, [by_number[number] for number in numbers])


def forward_output(subgraph: Subgraph, output: Tensor) -> Tensor:
    """View attention's output as (batch, heads, rows, features)."""
    (found,) = by_heads(subgraph, subgraph.nodes[-1].outputs, [output])
    return found


def added(subgraph: Subgraph, inputs: Sequence[Tensor], query: Tensor, key: Tensor) -> Tensor | None:
    """Return what is added to the scores, or None: (batch, heads, rows, columns), stride 0 where it has no axis.

    Of a batch of two axes, it may have the entries along the second only.

    Args:
        inputs: of attention, forward or backward.
        query: (batch, heads, rows, features).
        key: (batch, heads of keys, columns, features).
    """
    return _added(subgraph, added_mask(subgraph), inputs, query, key)


def masked(subgraph: Subgraph, inputs: Sequence[Tensor], query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask that is added beside a bias, as `added` returns the bias, or None."""
    return _added(subgraph, mask_beside_bias(subgraph), inputs, query, key)


def _added(subgraph: Subgraph, which: Added, inputs: Sequence[Tensor], query: Tensor, key: Tensor) -> Tensor | None:
    number, places = which
    if number is None:
        return None
    return _along_scores(subgraph, inputs[subgraph.inputs.index(number)], places, query, key)


def sinks(subgraph: Subgraph, inputs: Sequence[Tensor]) -> Tensor | None:
    """Return the sink of each head, (heads), or None."""
    node = next((node for node in subgraph.nodes if node.kind == "sink_softmax"), None)
    return None if node is None else inputs[subgraph.inputs.index(node.inputs[1])].view(-1)


def sink_gradient(subgraph: Subgraph, outputs: Sequence[Tensor]) -> Tensor | None:
    """Return where the gradient of the sinks goes, (heads), or None."""
    node = next((node for node in subgraph.nodes if node.kind == "sink_grad"), None)
    return None if node is None else outputs[subgraph.outputs.index(node.outputs[0])].view(-1)


def bias_gradient(subgraph: Subgraph, outputs: Sequence[Tensor], query: Tensor, key: Tensor) -> Tensor | None:
    """Return where the gradient of a bias of the scores goes, as `added` returns the bias, or None."""
    node = next((node for node in subgraph.nodes if node.kind == "bias_grad"), None)
    if node is None:
        return None
    whole, own = operand_letters(node)
    places = (own.find(letter) for letter in whole)
    made = outputs[subgraph.outputs.index(node.outputs[0])]
    return _along_scores(subgraph, made, [None if p < 0 else p for p in places], query, key)


def _along_scores(
    subgraph: Subgraph, tensor: Tensor, places: Sequence[int | None], query: Tensor, key: Tensor
) -> Tensor:
    """View a tensor along scores, with stride 0 where it has no axis."""
    places = places[len(score_axes(subgraph).batch) - 1 :]  # along the first of two axes of a batch it does not differ
    turned = tensor.permute([place for place in places if place is not None])
    spread = turned[tuple(None if place is None else slice(None) for place in places)]
    batch, heads, rows, _ = query.shape
    batch = batch if places[0] is None else len(spread)
    shared = (heads,) if len(places) == len(query.shape) else (key.shape[1], heads // key.shape[1])
    return spread.expand(batch, *shared, rows, key.shape[2]).view(batch, heads, rows, key.shape[2])


def forward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """softmax(factor * query key^T) value, causal or not, and the log-sum-exp that backward needs."""
    subgraph = call.subgraph
    query, key, value = forward_operands(subgraph, inputs)
    into = forward_output(subgraph, outputs[0])
    scale, is_causal = factor(subgraph), causal(subgraph)

    def run() -> None:
        out, log_sum_exp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=is_causal, scale=scale
        )
        into.copy_(out)
        if len(outputs) > 1:
            outputs[1].view(log_sum_exp.shape).copy_(log_sum_exp)

    return run


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Gradients of query, key and value from forward's output and log-sum-exp; weights are recomputed inside."""
    grad, query, key, value, out, log_sum_exp = _read_by_backward(call.subgraph, inputs)
    scale, is_causal = factor(call.subgraph), causal(call.subgraph)
    into = backward_outputs(call.subgraph, outputs)

    def run() -> None:
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, log_sum_exp, 0.0, is_causal, scale=scale
        )
        for target, gradient in zip(into, made, strict=True):
            target.copy_(gradient)

    return run


def _read_by_backward(subgraph: Subgraph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradient, query, key, value, output (as batch, heads, rows, features) and log-sum-exp."""
    first = backward_operands(subgraph, inputs)
    return [*first, inputs[5].view(first[0].shape[:3])]


def fill_in_statistics(subgraph: Subgraph, inputs: Sequence[Tensor]) -> None:
    """Make output and log-sum-exp those of the given query, key and value."""
    _, query, key, value, out, log_sum_exp = _read_by_backward(subgraph, inputs)
    made, statistics = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal(subgraph), scale=factor(subgraph)
    )
    out.copy_(made)
    log_sum_exp.copy_(statistics)
