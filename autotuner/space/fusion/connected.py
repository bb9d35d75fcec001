"""Connected sets of operators, which a compiler makes one kernel of."""

from collections.abc import Iterator, Set

from autotuner.checkpoint import checkpoint
from autotuner.ir.graph import Graph, Operator
from autotuner.kernels.patterns import Connected
from autotuner.space.fusion.cover import Reach


def connected_sets(
    graph: Graph, reach: Reach, pattern: Connected, max_operators: int
) -> Iterator[tuple[Operator, ...]]:
    """Yield the largest connected convex sets of one phase, then what is left of them without some kinds."""
    seen: set[frozenset[str]] = set()
    for without in pattern.without:
        for operators in _grow(graph, reach, max_operators, pattern.kinds - without):
            names = frozenset(operator.name for operator in operators)
            if names not in seen and (len(operators) > 1 or operators[0].kind in pattern.alone):
                seen.add(names)
                yield operators
    for operator in graph.operators:
        if operator.kind in pattern.alone and frozenset([operator.name]) not in seen:
            yield (operator,)


def _grow(graph: Graph, reach: Reach, max_operators: int, kinds: Set[str]) -> Iterator[tuple[Operator, ...]]:
    """Yield disjoint sets, grown in graph order along tensors that one member makes or several read."""
    free = [operator for operator in graph.operators if operator.kind in kinds]
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
