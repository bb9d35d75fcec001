"""Siblings stacked into one: products of one input with parameters of one shape, e.g. query, key and value.

The parameters may be cast: then it is their casts that are stacked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotuner.checkpoint import checkpoint
from autotuner.ir.graph import Graph, Operator
from autotuner.kernels.patterns import Siblings
from autotuner.space.fusion.cover import Reach, boundary, only_consumer


@dataclass(frozen=True)
class StackGroup:
    """Sibling contractions of one input with parameters of one shape, e.g. query, key and value."""

    operators: tuple[Operator, ...]


def stack_groups(graph: Graph) -> tuple[StackGroup, ...]:
    """Return siblings that can be stacked: a run of them, and neighbours in pairs in a run of three."""
    runs: dict[tuple[str, str, tuple[int, ...]], list[Operator]] = {}
    for operator in graph.operators:
        if operator.kind == "contraction" and operator.phase == "forward":
            weight = operator.inputs[1]
            if graph.is_weight(weight):
                run = runs.setdefault((operator.inputs[0], operator.spec, graph.shape(weight)), [])
                if all(weight != other.inputs[1] for other in run):  # one that is read twice cannot lie behind itself
                    run.append(operator)
    groups: list[StackGroup] = []
    for run in runs.values():
        if len(run) > 1:
            groups.append(StackGroup(tuple(run)))
        if len(run) == 3:
            groups += [StackGroup(pair) for pair in pairwise(run)]
    return tuple(groups)


def stack_families(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return tensors that are slices of one stack when they are stacked: products, biased products, their gradients,
    weights and weight gradients, casts of these, biases and bias gradients; once per group of siblings."""
    families: list[tuple[str, ...]] = []
    for group in stack_groups(graph):
        products = tuple(operator.outputs[0] for operator in group.operators)
        weights = tuple(operator.inputs[1] for operator in group.operators)
        families += [products, weights]
        biases = _biases(graph, group)
        if biases:
            families += [tuple(o.outputs[0] for o in biases), tuple(o.inputs[1] for o in biases)]
        for kind, parameters in (("contraction", weights), ("bias_grad", tuple(o.inputs[1] for o in biases))):
            _, casts = _casts_of_gradients(graph, kind, parameters)
            if casts:
                families.append(tuple(o.outputs[0] for o in casts))
        for family in list(families):
            gradients = tuple(f"grad_{name}" for name in family)
            if all(name in graph.tensors for name in gradients) and gradients not in families:
                families.append(gradients)
    return tuple(dict.fromkeys(families))


def _biases(graph: Graph, group: StackGroup) -> tuple[Operator, ...]:
    followers = [only_consumer(graph, operator.outputs[0]) for operator in group.operators]
    biases = tuple(o for o in followers if o and o.kind == "bias")
    return biases if len(biases) == len(group.operators) else ()


def _casts_of_gradients(
    graph: Graph, kind: str, parameters: Sequence[str]
) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Return what makes gradients of these, all of one kind, and the casts that alone read them; or nothing."""
    gradients = [f"grad_{name}" for name in parameters if f"grad_{name}" in graph.producers]
    makers = tuple(graph.producers[name] for name in gradients)
    followers = [only_consumer(graph, name) for name in gradients]
    casts = tuple(o for o in followers if o and o.kind == "cast")
    whole = len(casts) == len(parameters) and all(maker.kind == kind for maker in makers)
    return (makers, casts) if whole else ((), ())


def stacks(graph: Graph, group: StackGroup, reach: Reach) -> Iterator[tuple[Siblings, tuple[Operator, ...]]]:
    """Yield the operators that a stack of siblings makes one of, and their pattern."""
    product = Siblings(("contraction",))
    yield product, group.operators
    biases = _biases(graph, group)
    if biases:
        yield Siblings(("contraction", "bias")), (*group.operators, *biases)
        yield Siblings(("bias",)), biases
    weights = [operator.inputs[1] for operator in group.operators]
    found: list[tuple[Operator, ...]] = []
    for names, kind in (
        ([f"grad_{weight}" for weight in weights], "contraction"),
        ([f"grad_{bias.inputs[1]}" for bias in biases], "bias_grad"),
    ):
        makers = tuple(graph.producers[name] for name in names if name in graph.producers)
        # One that is read twice has a sum for its gradient.
        if makers and len(makers) == len(weights) and all(maker.kind == kind for maker in makers):
            yield Siblings((kind,)), makers
            found.append(makers)
    if len(found) > 1:
        yield Siblings(("contraction", "bias_grad")), found[0] + found[1]
    for kind, parameters in (("contraction", weights), ("bias_grad", [bias.inputs[1] for bias in biases])):
        makers, casts = _casts_of_gradients(graph, kind, parameters)
        if casts:
            yield Siblings((kind, "cast")), makers + casts
    into_input = [next((o for o in graph.consumers[w] if o.phase == "backward" and o.kind == "contraction"), None)
                  for w in weights]  # fmt: skip
    if all(into_input):
        summed = _with_sums(graph, [o for o in into_input if o], reach)
        if summed:
            yield product, summed


def _with_sums(graph: Graph, products: list[Operator], reach: Reach) -> tuple[Operator, ...] | None:
    """Add the sums that make one tensor of several products, with at most one addend from outside."""
    members = list(products)
    outside: set[str] = set()
    changed = True
    while changed:
        checkpoint()
        changed = False
        made = {tensor for operator in members for tensor in operator.outputs}
        for add in graph.operators:
            if add.kind != "add" or add in members or not made & set(add.inputs):
                continue
            others = outside | (set(add.inputs) - made)
            if len(others) <= 1 and reach.convex([*members, add]):
                members.append(add)
                outside = others
                changed = True
                break
    members[len(products) :] = sorted(members[len(products) :], key=lambda operator: reach.index[operator.name])
    _, left = boundary(graph, members)
    return tuple(members) if len(left) == 1 else None
