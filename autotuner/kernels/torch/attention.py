"""Flash attention on the CPU, forward and backward, through torch's own operator.

It offers no out-variants; copying what it made into the given outputs is part of its time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call, Node, Subgraph
from autotuner.kernels.geometry import operand_letters
from autotuner.kernels.rules.attention import added_mask, attention_letters

aten = torch.ops.aten


def turn(letters: str, node: Node, operand: int) -> list[int]:
    """Return the permutation that brings an operand into (batch, heads, rows, features)."""
    own = operand_letters(node)[operand]
    wanted = [letter for letter in letters if letter in own]
    if len(wanted) < len(own):  # keys and values have columns where queries have rows
        wanted = [letter if letter in own else next(x for x in own if x not in letters) for letter in letters]
    return [own.index(letter) for letter in wanted]


def factor(subgraph: Subgraph) -> float:
    """Return what scores are multiplied with."""
    return float(dict(next(node for node in subgraph.nodes if node.kind == "scale").attributes)["factor"])


def causal(subgraph: Subgraph) -> bool:
    """Tell whether keys behind a query are hidden from it."""
    return "causal_mask" in subgraph.kinds


def back(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes one."""
    return [list(order).index(axis) for axis in range(len(order))]


def forward_operands(subgraph: Subgraph, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return query, key and value as (batch, heads, rows, features), and the permutation that brings an output back."""
    by_number = dict(zip(subgraph.inputs, inputs, strict=True))
    scores, context = subgraph.nodes[0], subgraph.nodes[-1]
    letters, second = attention_letters(subgraph), value_letters(context)
    turns = (turn(letters, scores, 0), turn(letters, scores, 1), turn(second, context, 1))
    numbers = (*scores.inputs, context.inputs[1])
    found = [by_number[number].permute(order) for number, order in zip(numbers, turns, strict=True)]
    return found, back(turn(second, context, 2))


def added(subgraph: Subgraph, inputs: Sequence[Tensor], query: Tensor, key: Tensor) -> Tensor | None:
    """Return what is added to the scores, or None: (batch, heads, rows, columns), stride 0 where the mask has no axis.

    Args:
        inputs: of attention, forward or backward.
        query: (batch, heads, rows, features).
        key: (batch, heads, columns, features).
    """
    number, places = added_mask(subgraph)
    if number is None:
        return None
    mask = inputs[subgraph.inputs.index(number)].permute([place for place in places if place is not None])
    spread = mask[tuple(None if place is None else slice(None) for place in places)]
    return spread.expand(*query.shape[:3], key.shape[2])


def forward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """softmax(factor * query key^T) value, causal or not, and the log-sum-exp that backward needs."""
    subgraph = call.subgraph
    (query, key, value), returned = forward_operands(subgraph, inputs)
    scale, is_causal = factor(subgraph), causal(subgraph)

    def run() -> None:
        out, log_sum_exp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=is_causal, scale=scale
        )
        outputs[0].copy_(out.permute(returned))
        if len(outputs) > 1:
            outputs[1].copy_(log_sum_exp)

    return run


def value_letters(context: Node) -> str:
    """Return batch, heads, rows, features in the letters of the second contraction."""
    weights, value, out = operand_letters(context)
    batch = [letter for letter in weights if letter in value and letter in out]
    rows = next(letter for letter in weights if letter not in value)
    features = next(letter for letter in value if letter not in weights)
    return "".join((*batch, rows, features))


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Gradients of query, key and value from forward's output and log-sum-exp; weights are recomputed inside."""
    grad, query, key, value, out, log_sum_exp = _backward_operands(inputs)
    scale, is_causal = factor(call.subgraph), causal(call.subgraph)

    def run() -> None:
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, log_sum_exp, 0.0, is_causal, scale=scale
        )
        for target, gradient in zip(outputs, made, strict=True):
            target.copy_(gradient.permute(0, 2, 1, 3))

    return run


def _backward_operands(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradient, query, key, value, output (as batch, heads, rows, features) and log-sum-exp.

    The boundary's inputs are in that order, and each is declared as batch, rows, heads, features.
    """
    return [*(tensor.permute(0, 2, 1, 3) for tensor in inputs[:5]), inputs[5]]


def fill_in_statistics(subgraph: Subgraph, inputs: Sequence[Tensor]) -> None:
    """Make output and log-sum-exp those of the given query, key and value."""
    _, query, key, value, out, log_sum_exp = _backward_operands(inputs)
    made, statistics = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal(subgraph), scale=factor(subgraph)
    )
    out.copy_(made)
    log_sum_exp.copy_(statistics)
