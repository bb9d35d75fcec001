"""The default of every operator: a kernel of its own, with every tensor as declared."""

from collections.abc import Mapping

from autotuner.ir.graph import Graph
from autotuner.space import Choice, Space


def default_us(space: Space, costs_us: Mapping[str, float]) -> float | None:
    """Return the least cost with every operator alone and every tensor as declared, or None where that is not known."""
    alone = alone_as_declared_us(space, costs_us)
    names = [operator.name for operator in space.graph.operators]
    return sum(alone[name] for name in names) if alone.keys() >= set(names) else None


def alone_as_declared_us(space: Space, costs_us: Mapping[str, float]) -> dict[str, float]:
    """Return the least cost of each operator alone with its tensors as declared; those without a time are left out."""
    found: dict[str, float] = {}
    for choice in space.choices:
        cost = costs_us.get(choice.call.key)
        if cost is not None and len(choice.cover.operators) == 1 and is_declared(space.graph, choice):
            (name,) = choice.cover.operators
            found[name] = min(cost, found.get(name, cost))
    return found


def is_declared(graph: Graph, choice: Choice) -> bool:
    """Say whether every tensor of a choice lies as the graph declares it."""
    return all(text.split(":")[0] == graph.tensors[name].axes for name, text in choice.by_tensor.items())
