"""Attention as one kernel: its forward, and its backward with the forward operators that it repeats."""

from collections.abc import Iterator, Sequence

from autotuner.ir.graph import Graph, Operator
from autotuner.kernels.patterns import Attention, AttentionGrad
from autotuner.space.fusion.cover import Boundary, only_consumer

HEAD_WISE_AXES = 4
"""Of query, key, value, scores and output: batch, heads, rows, and features or columns."""


def attention_forward(graph: Graph, pattern: Attention) -> Iterator[tuple[tuple[Operator, ...], Boundary]]:
    """Yield scores, scale, a mask and dropout if the pattern has them, softmax and context; weights stay inside.

    Heads that share a key, or keys that a batch shares, are left to kernels of the single operators. An added mask is
    the last input. A mask of dropped weights is among the outputs, for backward.
    """
    kinds = pattern.kinds
    for softmax in graph.operators:
        if softmax.kind != "softmax" or len(softmax.outputs) != 2:
            continue
        weights, log_sum_exp = softmax.outputs
        ahead = _dropping(graph, weights) if "dropout" in kinds else ()
        read = ahead[-1].outputs[0] if ahead else weights
        context = next((o for o in graph.consumers[read] if o.phase == "forward" and o.inputs[0] == read), None)
        if context is None:
            continue
        chain = [softmax, *ahead, context]
        while len(chain) < len(kinds) and chain[0].inputs and chain[0].inputs[0] in graph.producers:
            chain.insert(0, graph.producers[chain[0].inputs[0]])
        if tuple(o.kind for o in chain) == kinds and _head_wise(graph, chain) and _causal_of_queries(chain):
            added = (t for o in chain if o.kind == "mask" for t in o.inputs[1:])
            inputs = (*chain[0].inputs, context.inputs[1], *added)
            saved = any(o.phase == "backward" for o in graph.consumers[weights])
            masks = ahead[0].outputs if ahead else ()
            yield tuple(chain), (inputs, (context.outputs[0], log_sum_exp, *masks) if saved else context.outputs)


def _dropping(graph: Graph, weights: str) -> tuple[Operator, ...]:
    """Return what draws the mask of dropped weights, and what drops them; nothing where they are read otherwise."""
    forward = [o for o in graph.consumers[weights] if o.phase == "forward"]
    if len(forward) != 1 or forward[0].kind != "dropout":
        return ()
    return graph.producers[forward[0].inputs[1]], forward[0]


def _head_wise(graph: Graph, chain: Sequence[Operator]) -> bool:
    """Tell whether attention runs over batch and heads, along one axis of keys, with values as wide as queries."""
    softmax = next(operator for operator in chain if operator.kind == "softmax")
    first, last = chain[0], chain[-1]
    (query, key), (scores,) = first.input_axes, first.output_axes
    (weights, value), (out,) = last.input_axes, last.output_axes
    if {len(axes) for axes in (query, key, scores, weights, value, out)} != {HEAD_WISE_AXES}:
        return False
    batch, second = (
        [axis for axis in axes if axis in two and axis in three]
        for axes, two, three in ((query, key, scores), (weights, value, out))
    )
    rows, columns = _only(scores, key), _only(scores, query)
    weight_rows, weight_columns = _only(weights, value), _only(weights, out)
    if len(batch) != 2 or len(second) != 2 or not (rows and columns and weight_rows and weight_columns):
        return False
    places = [scores.index(axis) for axis in (*batch, rows, columns)]
    return (
        [weights.index(axis) for axis in (*second, weight_rows, weight_columns)] == places
        and softmax.input_axes[0].index(str(softmax.attribute("axis"))) == places[3]
        and places[:3] == sorted(places[:3])  # as the log-sum-exp lies: batch, heads, rows
        and _extent(graph, first, 0, _only(query, scores)) == _extent(graph, last, 1, _only(value, weights))
    )


def _only(axes: str, other: str) -> str:
    """Return the axis that is not among others, or "" where it is not exactly one."""
    found = [axis for axis in axes if axis not in other]
    return found[0] if len(found) == 1 else ""


def _extent(graph: Graph, operator: Operator, operand: int, axis: str) -> int:
    return graph.shape(operator.inputs[operand])[operator.input_axes[operand].index(axis)]


def _rows_before_heads(chain: Sequence[Operator]) -> bool:
    """Tell whether query, key, value and output are declared as batch, rows, heads, features, as in backward."""
    (query, key), (scores,) = chain[0].input_axes, chain[0].output_axes
    (weights, value), (out,) = chain[-1].input_axes, chain[-1].output_axes
    batch, heads = (axis for axis in query if axis in key and axis in scores)
    second_batch, second_heads = (axis for axis in weights if axis in value and axis in out)
    return (
        all(axes[0] == batch and axes[2] == heads and axes[3] not in scores for axes in (query, key))
        and all(axes[0] == second_batch and axes[2] == second_heads and axes[3] not in weights for axes in (value, out))
    )  # fmt: skip


def _causal_of_queries(chain: Sequence[Operator]) -> bool:
    """Tell whether a causal mask, where attention has one, hides keys (which the softmax runs along) from queries."""
    softmax = next(operator for operator in chain if operator.kind == "softmax")
    scores, mask = chain[0], chain[list(chain).index(softmax) - 1]
    if mask.kind != "causal_mask":
        return True
    places = [mask.output_axes[0].index(str(mask.attribute(name))) for name in ("query_axis", "key_axis")]
    query, key = (scores.output_axes[0][place] for place in places)
    runs_along = softmax.input_axes[0].index(str(softmax.attribute("axis")))
    return places[1] == runs_along and query not in scores.input_axes[1] and key not in scores.input_axes[0]


def attention_grad(
    graph: Graph, pattern: AttentionGrad
) -> Iterator[tuple[tuple[Operator, ...], Boundary, tuple[Operator, ...]]]:
    """Yield the backward operators of the same attention, and the forward ones that make the weights again.

    The forward output, the log-sum-exp, a mask of dropped weights and an added one are read, the weights are not.
    """
    for chain, (inputs, outputs) in attention_forward(graph, Attention(pattern.forward)):
        if len(outputs) == 1 or not _rows_before_heads(chain):
            continue
        *made_again, context = chain
        query, key, value, *added = inputs
        softmax = next(o for o in chain if o.kind == "softmax")
        drawing = next((o for o in chain if o.kind == "dropout_mask"), None)
        again = [o for o in made_again if o is not drawing]
        weights, read = softmax.outputs[0], again[-1].outputs[0]
        grad_softmax = next((o for o in graph.consumers[weights] if o.kind == "softmax_grad"), None)
        above = graph.producers.get(grad_softmax.inputs[0]) if grad_softmax else None
        grad_drop = above if drawing and above and drawing.outputs[0] in above.inputs else None
        grad_weights = graph.producers.get(grad_drop.inputs[0]) if grad_drop else above
        grad_value = next((o for o in graph.consumers[read] if o.phase == "backward" and o.kind == "contraction"), None)
        grad_scale = only_consumer(graph, grad_softmax.outputs[0]) if grad_softmax else None
        if not (grad_softmax and grad_weights and grad_value and grad_scale) or bool(drawing) != bool(grad_drop):
            continue
        last = [o for o in graph.consumers[grad_scale.outputs[0]] if o.kind == "contraction"]
        into_query = next((o for o in last if key in o.inputs), None)
        into_key = next((o for o in last if query in o.inputs), None)
        if not (into_query and into_key):
            continue
        dropped = (grad_drop,) if grad_drop else ()
        members = (grad_weights, grad_value, *dropped, grad_softmax, grad_scale, into_query, into_key)
        if sorted(o.kind for o in members) == sorted(pattern.kinds):
            gradient = next(t for t in grad_weights.inputs if t != value)
            made = (into_query.outputs[0], into_key.outputs[0], grad_value.outputs[0])
            read_again = (query, key, value, context.outputs[0], *outputs[1:], *added)
            yield members, ((gradient, *read_again), made), tuple(again)
