"""Attention as one kernel: its forward, and its backward with the forward operators that it repeats."""

from collections.abc import Iterator, Sequence

from autotuner.ir.graph import Graph, Operator
from autotuner.ir.kinds import SOFTMAXES
from autotuner.kernels.heads import HeadAxes, head_axes
from autotuner.kernels.patterns import Attention, AttentionGrad
from autotuner.kernels.rules.attention import ADDED
from autotuner.space.fusion.cover import Boundary


def attention_forward(graph: Graph, pattern: Attention) -> Iterator[tuple[tuple[Operator, ...], Boundary]]:
    """Yield scores, scale, a mask and dropout if the pattern has them, softmax and context; weights stay inside.

    Heads may share a key and its value, not one of both alone. Keys that a batch shares are left to kernels of the
    single operators. A mask or a bias that is added to the scores is behind these, and sinks are the last input. A mask
    of dropped weights is among the outputs, for backward.
    """
    kinds = pattern.kinds
    for softmax in graph.operators:
        if softmax.kind not in SOFTMAXES or softmax.kind not in kinds or len(softmax.outputs) != 2:
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
            added = (t for o in chain if o.kind in ADDED for t in o.inputs[1:])
            inputs = (*chain[0].inputs, context.inputs[1], *added, *softmax.inputs[1:])
            saved = any(o.phase == "backward" for o in graph.consumers[weights])
            masks = ahead[0].outputs if ahead else ()
            yield tuple(chain), (inputs, (context.outputs[0], log_sum_exp, *masks) if saved else context.outputs)


def _dropping(graph: Graph, weights: str) -> tuple[Operator, ...]:
    """Return what draws the mask of dropped weights, and what drops them; nothing where they are read otherwise."""
    forward = [o for o in graph.consumers[weights] if o.phase == "forward"]
    if len(forward) != 1 or forward[0].kind != "dropout":
        return ()
    return graph.producers[forward[0].inputs[1]], forward[0]


def _axes_of(chain: Sequence[Operator]) -> tuple[HeadAxes, HeadAxes] | None:
    """Return the axes of both products; None where one does not run over batch and heads, or keys and values have
    other heads."""
    (query, key), (scores,) = chain[0].input_axes, chain[0].output_axes
    (weights, value), (out,) = chain[-1].input_axes, chain[-1].output_axes
    first, second = head_axes(query, key, scores), head_axes(out, value, weights)
    if first is None or second is None:
        return None
    of_keys, of_values = ((len(each.shared), len(each.group)) for each in (first, second))
    return (first, second) if of_keys == of_values else None


def _head_wise(graph: Graph, chain: Sequence[Operator]) -> bool:
    """Tell whether attention runs over batch and heads, along the axis of keys, with values as wide as queries.

    Scores are in the order of the log-sum-exp: batch, heads, rows. Heads that share a key follow each other. Sinks are
    one for each head.
    """
    axes = _axes_of(chain)
    if axes is None:
        return False
    first, second = axes
    softmax = next(operator for operator in chain if operator.kind in SOFTMAXES)
    whole, *sinks = softmax.input_axes
    begin = len(first.batch)
    (query, _), (out,) = chain[0].input_axes, chain[-1].output_axes
    return (
        whole.index(str(softmax.attribute("axis"))) == len(first.weights) - 1
        and all(own == whole[begin : begin + len(first.heads)] for own in sinks)
        and first.heads in query
        and second.heads in out
        and _extent(graph, chain[0], 0, first.features) == _extent(graph, chain[-1], 1, second.features)
    )


def _extent(graph: Graph, operator: Operator, operand: int, axis: str) -> int:
    return graph.shape(operator.inputs[operand])[operator.input_axes[operand].index(axis)]


def _causal_of_queries(chain: Sequence[Operator]) -> bool:
    """Tell whether a causal mask or a window, where attention has one, hides keys, which the softmax runs along."""
    mask = next((operator for operator in chain if operator.kind in ("causal_mask", "window_mask")), None)
    axes = _axes_of(chain)
    if mask is None or axes is None:
        return mask is None
    places = [mask.output_axes[0].index(str(mask.attribute(name))) for name in ("query_axis", "key_axis")]
    return places == [len(axes[0].weights) - 2, len(axes[0].weights) - 1]


def attention_grad(
    graph: Graph, pattern: AttentionGrad
) -> Iterator[tuple[tuple[Operator, ...], Boundary, tuple[Operator, ...]]]:
    """Yield the backward operators of the same attention, and the forward ones that make the weights again.

    The forward output, the log-sum-exp, a mask of dropped weights, what is added to the scores and sinks are read, the
    weights are not. Gradients of a bias and of sinks are the last outputs.
    """
    for chain, (inputs, outputs) in attention_forward(graph, Attention(pattern.forward)):
        query, key, value, *added = inputs
        if len(outputs) == 1 or len({query, key, value}) < 3:
            continue
        *made_again, context = chain
        softmax = next(o for o in chain if o.kind in SOFTMAXES)
        drawing = next((o for o in chain if o.kind == "dropout_mask"), None)
        again = [o for o in made_again if o is not drawing]
        weights, read = softmax.outputs[0], again[-1].outputs[0]
        grad_softmax = next((o for o in graph.consumers[weights] if o.kind == "softmax_grad"), None)
        above = graph.producers.get(grad_softmax.inputs[0]) if grad_softmax else None
        grad_drop = above if drawing and above and drawing.outputs[0] in above.inputs else None
        grad_weights = graph.producers.get(grad_drop.inputs[0]) if grad_drop else above
        grad_value = next((o for o in graph.consumers[read] if o.phase == "backward" and o.kind == "contraction"), None)
        if not (grad_softmax and grad_weights and grad_value) or bool(drawing) != bool(grad_drop):
            continue
        of_scores = graph.consumers[grad_softmax.outputs[0]]
        grad_bias = [o for o in of_scores if o.kind == "bias_grad"] if "bias" in pattern.forward else []
        grad_sinks = [o for o in graph.consumers[weights] if o.kind == "sink_grad"]
        grad_cap = [o for o in of_scores if o.kind == "pointwise_grad"] if "pointwise" in pattern.forward else []
        of_scaled = graph.consumers[grad_cap[0].outputs[0]] if grad_cap else of_scores
        grad_scale = [o for o in of_scaled if o.kind == "scale"] if "scale" in pattern.forward else []
        last = [o for o in (graph.consumers[grad_scale[0].outputs[0]] if grad_scale else of_scaled)
                if o.kind == "contraction"]  # fmt: skip
        into_query = next((o for o in last if key in o.inputs), None)
        into_key = next((o for o in last if query in o.inputs), None)
        if not (into_query and into_key):
            continue
        dropped = (grad_drop,) if grad_drop else ()
        inner = (grad_softmax, *grad_cap, *grad_scale)
        members = (grad_weights, grad_value, *dropped, *inner, into_query, into_key, *grad_bias, *grad_sinks)
        stays = all(_read_by(graph, each.outputs[0], members) for each in inner)
        if stays and sorted(o.kind for o in members) == sorted(pattern.kinds):
            gradient = next(t for t in grad_weights.inputs if t != value)
            made = tuple(o.outputs[0] for o in (into_query, into_key, grad_value, *grad_bias, *grad_sinks))
            read_again = (query, key, value, context.outputs[0], *outputs[1:], *added)
            yield members, ((gradient, *read_again), made), tuple(again)


def _read_by(graph: Graph, tensor: str, members: Sequence[Operator]) -> bool:
    """Tell whether these operators alone read a tensor, which is no output of the graph."""
    names = {operator.name for operator in members}
    return tensor not in graph.outputs and all(o.name in names for o in graph.consumers[tensor])
