"""Connected sets of element-wise and normalisation operators, which the generic fused kernel is compiled for."""

from collections.abc import Callable, Iterator

from autotuner.checkpoint import checkpoint
from autotuner.ir.graph import Graph, Operator
from autotuner.kernels.rules.fused import FUSIBLE
from autotuner.space.fusion.cover import Reach

INDUCTOR_ALONE = ("layer_norm", "layer_norm_grad_input", "layer_norm_grad_parameters")


def connected_sets(graph: Graph, reach: Reach, max_operators: int) -> Iterator[tuple[Operator, ...]]:
    """Yield the sets that the generic fused kernel is tried on, few enough to compile them all.

    Each is a largest connected convex set of element-wise and normalisation operators of one phase; and what is left
    of it without the bias behind a product (which the product's own kernel can add) and without the gradients of
    parameters (whose sums run along another axis).
    """
    seen: set[frozenset[str]] = set()
    drops: tuple[Callable[[Operator], bool], ...] = (
        lambda _: False,
        lambda o: o.kind == "bias",
        lambda o: o.kind in ("bias_grad", "layer_norm_grad_parameters"),
    )
    for drop in drops:
        for operators in _grow(graph, reach, max_operators, drop):
            names = frozenset(operator.name for operator in operators)
            if names not in seen and (len(operators) > 1 or operators[0].kind in INDUCTOR_ALONE):
                seen.add(names)
                yield operators
    for operator in graph.operators:
        if operator.kind in INDUCTOR_ALONE and frozenset([operator.name]) not in seen:
            yield (operator,)


def _grow(
    graph: Graph, reach: Reach, max_operators: int, drop: Callable[[Operator], bool]
) -> Iterator[tuple[Operator, ...]]:
    """Yield disjoint sets, grown in graph order along tensors that one member makes or several read."""
    free = [operator for operator in graph.operators if operator.kind in FUSIBLE and not drop(operator)]
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
