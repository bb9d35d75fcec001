"""Connected sets of operators, which a compiler makes one kernel of."""

from collections.abc import Iterator, Sequence

from autotuner.checkpoint import checkpoint
from autotuner.ir.graph import Graph, Operator
from autotuner.kernels.patterns import Connected
from autotuner.space.fusion.cover import Reach


def connected_sets(
    graph: Graph, reach: Reach, pattern: Connected, max_operators: int
) -> Iterator[tuple[Operator, ...]]:
    """Yield the largest connected convex sets of one phase, then what is left of them without some kinds, and without
    the sums that kernels of products can make."""
    seen: set[frozenset[str]] = set()
    inside = [o for o in graph.operators if o.kind in pattern.kinds]
    free = [[o for o in inside if o.kind not in without] for without in pattern.without]
    for choice in (*free, [o for o in inside if not _is_made_by_a_product(graph, o)]):
        for operators in _grow(graph, reach, max_operators, choice):
            names = frozenset(operator.name for operator in operators)
            if names not in seen and (len(operators) > 1 or operators[0].kind in pattern.alone):
                seen.add(names)
                yield operators
    for operator in graph.operators:
        if operator.kind in pattern.alone and frozenset([operator.name]) not in seen:
            yield (operator,)


def _is_made_by_a_product(graph: Graph, operator: Operator) -> bool:
    """Say whether an operator adds a product that nobody else reads."""
    makers = (graph.producers.get(tensor) for tensor in operator.inputs)
    return operator.kind == "add" and any(
        maker is not None and maker.kind == "contraction" and len(graph.consumers[maker.outputs[0]]) == 1
        and maker.outputs[0] not in graph.outputs
        for maker in makers
    )  # fmt: skip


def _grow(graph: Graph, reach: Reach, max_operators: int, free: Sequence[Operator]) -> Iterator[tuple[Operator, ...]]:
    """Yield disjoint sets of operators that are free, grown in graph order along tensors that one member makes or
    several read."""
    taken: set[str] = set()
    for seed in free:
        if seed.name in taken:
            continue
        members = [seed]
        taken.add(seed.name)
        changed = True
        while changed and len(members) < max_operators:
            checkpoint()
            changed = False
            touched = {t for o in members for t in o.outputs} | {
                t for o in members for t in o.inputs if graph.tensors[t].role == "gradient"
            }
            for operator in free:
                if operator.name in taken or operator.phase != seed.phase or not touched & set(operator.inputs):
                    continue
                if reach.convex([*members, operator]):
                    members.append(operator)
                    taken.add(operator.name)
                    changed = True
                    break
        yield tuple(sorted(members, key=lambda operator: reach.index[operator.name]))
