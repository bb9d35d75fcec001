"""Every cover of a graph, by the patterns that kernels declare."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from autotuner.checkpoint import checkpoint
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.kinds import SOFTMAXES, kind_of
from autotuner.kernels import KERNELS
from autotuner.kernels.patterns import (
    Attention,
    AttentionGrad,
    Connected,
    Draws,
    Operators,
    Pair,
    ParameterCasts,
    Pattern,
)
from autotuner.space.fusion.attention import attention_forward, attention_grad
from autotuner.space.fusion.connected import connected_sets
from autotuner.space.fusion.cover import Boundary, Cover, Reach, boundary, only_consumer
from autotuner.space.fusion.repeats import Repeats, read_only_to_repeat
from autotuner.space.fusion.stacks import stack_groups, stacks


@dataclass(frozen=True)
class Occurrence:
    """Operators of a graph that a pattern describes, their boundary, forward ones that a kernel repeats, and what it
    leaves of these."""

    pattern: Pattern
    operators: tuple[Operator, ...]
    boundary: Boundary
    recomputed: tuple[Operator, ...] = ()
    remade: tuple[str, ...] = ()


def covers(
    graph: Graph, kernels: Collection[str], max_operators: int = 8, *, repeats: bool = True
) -> tuple[Cover, ...]:
    """Return every cover of the graph that one of the named kernels may run.

    Args:
        graph: a forward or training graph.
        kernels: names of registered kernels, as a search space lists them.
        max_operators: the largest connected set given to a compiler.
        repeats: whether connected sets of backward may repeat operators of forward.
    """
    reach = Reach(graph)
    wanted: dict[Pattern, list[str]] = {}
    for kernel in KERNELS:
        if kernel.name in kernels and (not kernel.partner or kernel.partner in kernels):
            for pattern in kernel.patterns:
                wanted.setdefault(pattern, []).append(kernel.name)
    found: dict[Cover, list[str]] = {}
    for one in occurrences(graph, reach, tuple(wanted), max_operators, repeats=repeats):
        checkpoint()
        if reach.convex(one.operators):
            names, again = (tuple(o.name for o in side) for side in (one.operators, one.recomputed))
            cover = Cover(names, *one.boundary, kernels=(), recomputed=again, remade=one.remade)
            found.setdefault(cover, []).extend(wanted[one.pattern])
    return tuple(replace(cover, kernels=tuple(dict.fromkeys(names))) for cover, names in found.items())


def occurrences(
    graph: Graph, reach: Reach, patterns: Sequence[Pattern], max_operators: int, *, repeats: bool = True
) -> Iterator[Occurrence]:
    """Yield where patterns occur in a graph, in the order that decides between plans of equal cost."""

    def plain(pattern: Pattern, found: Iterator[tuple[Operator, ...]]) -> Iterator[Occurrence]:
        return (Occurrence(pattern, operators, boundary(graph, operators)) for operators in found)

    for pattern in patterns:
        if isinstance(pattern, Operators):
            yield from plain(pattern, _operators(graph, pattern.kinds))
    for pattern in patterns:
        if isinstance(pattern, Attention):
            yield from (Occurrence(pattern, *found) for found in attention_forward(graph, pattern))
        elif isinstance(pattern, AttentionGrad):
            yield from (Occurrence(pattern, *found) for found in attention_grad(graph, pattern))
    for group in stack_groups(graph):
        for stack, operators in stacks(graph, group, reach):
            if stack in patterns:
                yield Occurrence(stack, operators, boundary(graph, operators))
    for pattern in patterns:
        if isinstance(pattern, Pair):
            yield from plain(pattern, _pairs(graph, pattern))
    for pattern in patterns:
        if isinstance(pattern, Connected):
            yield from _connected(graph, reach, pattern, max_operators, repeats=repeats)
    for pattern in patterns:
        if isinstance(pattern, Draws):
            yield from plain(pattern, _draws(graph, pattern.kinds))
    for pattern in patterns:
        if isinstance(pattern, ParameterCasts):
            yield from plain(pattern, _parameter_casts(graph))


def _connected(
    graph: Graph, reach: Reach, pattern: Connected, max_operators: int, *, repeats: bool
) -> Iterator[Occurrence]:
    """Yield connected sets, and those of backward with the forward operators that they may repeat as well.

    Those of forward come without what backward can repeat, too.
    """
    for operators in connected_sets(graph, reach, pattern, max_operators):
        read, left = boundary(graph, operators)
        yield Occurrence(pattern, operators, (read, left))
        if not repeats:
            continue
        if operators[0].phase == "backward":
            for each in Repeats(graph, reach, operators, pattern.kinds).variants():
                yield Occurrence(pattern, operators, each.boundary, each.repeated, each.remade)
        elif inside := read_only_to_repeat(graph, operators, pattern.kinds):
            yield Occurrence(pattern, operators, (read, tuple(tensor for tensor in left if tensor not in inside)))


def _operators(graph: Graph, kinds: Sequence[str]) -> Iterator[tuple[Operator, ...]]:
    """Yield single operators, chains behind a product, and siblings."""
    for first in graph.operators:
        if first.kind != kinds[0]:
            continue
        if len(kinds) == 1:
            yield (first,)
        elif first.kind == "contraction":
            yield from _behind_product(graph, first, kinds[1:])
        else:
            siblings = (o for t in first.inputs[:2] for o in graph.consumers[t] if o.kind == kinds[1])
            yield from ((first, s) for s in dict.fromkeys(siblings) if s.inputs[:2] == first.inputs[:2])


def _behind_product(graph: Graph, product: Operator, kinds: Sequence[str]) -> Iterator[tuple[Operator, ...]]:
    """Yield a product and the operator that alone reads it; for a third kind, one that reads what this makes.

    Where the gradient of the second reads its operand again, a kernel of both leaves the product, too: others may.
    """
    readers = [o for o in graph.consumers[product.outputs[0]] if o.kind == kinds[0]]
    if readers and kind_of(readers[0]).reads_input_again:
        yield from ((product, o) for o in readers)
        return
    follower = only_consumer(graph, product.outputs[0])
    taking = 2 if follower and kind_of(follower).commutative else 1
    if follower and follower.kind == kinds[0] and product.outputs[0] in follower.inputs[:taking]:
        third = [(o,) for o in graph.consumers[follower.outputs[0]] if o.kind == kinds[-1]] if kinds[1:] else [()]
        yield from ((product, follower, *last) for last in third)


def _pairs(graph: Graph, pattern: Pair) -> Iterator[tuple[Operator, ...]]:
    for first in graph.operators:
        for second in graph.consumers[first.inputs[0]] if first.kind == pattern.kinds[0] else ():
            pair = (first, second)
            if second.kind == pattern.kinds[1] and pattern.fits(graph.subgraph(pair, *boundary(graph, pair))):
                yield pair


def _draws(graph: Graph, kinds: Sequence[str]) -> Iterator[tuple[Operator, ...]]:
    """Yield what draws masks, but those of attention's weights, which kernels of the whole attention draw."""
    found = [o for o in graph.operators if o.kind in kinds and not _drops_weights(graph, o.outputs[0])]
    if len(found) > 1:
        yield tuple(found)


def _parameter_casts(graph: Graph) -> Iterator[tuple[Operator, ...]]:
    """Yield casts of parameters, and those of their gradients, from one type to another: nothing orders them."""
    alike: dict[tuple[str, ...], dict[str, Operator]] = {}
    for operator in graph.operators:
        if operator.kind == "cast":
            (source,), (made,) = operator.inputs, operator.outputs
            of_gradient = operator.phase == "backward" and graph.tensors[made].role == "gradient"
            if graph.tensors[source].role == "parameter" or (of_gradient and _is_of_parameter(graph, made)):
                types = (operator.phase, graph.tensors[source].dtype, graph.tensors[made].dtype)
                alike.setdefault(types, {})[made] = operator
    for casts in alike.values():
        matrices = {made for made, cast in casts.items() if _meets_product(graph, cast)}
        parts = (casts.keys(), matrices, casts.keys() - matrices)
        chosen = dict.fromkeys(tuple(casts[made] for made in casts if made in part) for part in parts)
        yield from (part for part in chosen if len(part) > 1)


def _meets_product(graph: Graph, cast: Operator) -> bool:
    """Tell whether a product reads what a cast makes, or has made what it reads."""
    met = (*graph.consumers[cast.outputs[0]], graph.producers.get(cast.inputs[0]))
    return any(operator is not None and operator.kind == "contraction" for operator in met)


def _is_of_parameter(graph: Graph, gradient: str) -> bool:
    primal = graph.tensors.get(gradient.removeprefix("grad_"))
    return primal is not None and primal.role == "parameter" and not graph.consumers[gradient]


def _drops_weights(graph: Graph, mask: str) -> bool:
    if any(kind_of(o).drops_weights for o in graph.consumers[mask]):
        return True
    read = (graph.producers.get(tensor) for o in graph.consumers[mask] for tensor in o.inputs)
    return any(operator is not None and operator.kind in SOFTMAXES for operator in read)
