"""A cover: operators that one kernel computes, and what it reads and leaves."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from autotuner.checkpoint import checkpoint
from autotuner.ir.graph import Graph, Operator

Boundary = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Cover:
    """Operators computed by one kernel, in an order in which they can run (siblings in the order of their stack), the
    boundary tensors, and the kernels that may do it.

    `recomputed` names forward operators that the kernel repeats rather than read what they made. `remade` are results
    of these that it leaves for others in backward: the last outputs.
    """

    operators: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kernels: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    remade: tuple[str, ...] = ()


class Reach:
    """Dependencies between operators, as bit sets over graph order."""

    def __init__(self, graph: Graph) -> None:
        self.index = {operator.name: i for i, operator in enumerate(graph.operators)}
        self.after = [0] * len(graph.operators)
        for i in range(len(graph.operators) - 1, -1, -1):
            for tensor in graph.operators[i].outputs:
                for consumer in graph.consumers[tensor]:
                    j = self.index[consumer.name]
                    self.after[i] |= self.after[j] | 1 << j
        self.before = [0] * len(graph.operators)
        for i, later in enumerate(self.after):
            checkpoint()
            for j in range(i + 1, len(self.after)):
                if later >> j & 1:
                    self.before[j] |= 1 << i

    def bits(self, operators: Iterable[Operator]) -> int:
        return sum(1 << self.index[operator.name] for operator in operators)

    def convex(self, operators: Collection[Operator]) -> bool:
        """Tell whether no path leaves the set and comes back."""
        members = self.bits(operators)
        below = above = 0
        for operator in operators:
            below |= self.after[self.index[operator.name]]
            above |= self.before[self.index[operator.name]]
        return not below & above & ~members

    def cyclic(self, one: Collection[Operator], other: Collection[Operator]) -> bool:
        """Tell whether two disjoint covers depend on each other."""
        first, second = self.bits(one), self.bits(other)
        after_first = after_second = 0
        for operator in one:
            after_first |= self.after[self.index[operator.name]]
        for operator in other:
            after_second |= self.after[self.index[operator.name]]
        return bool(after_first & second and after_second & first)


def boundary(graph: Graph, operators: Collection[Operator]) -> Boundary:
    """Return what some operators read from outside and what they leave for others; optional tensors stay absent."""
    names = {operator.name for operator in operators}
    made = [tensor for operator in operators for tensor in operator.outputs]
    read = dict.fromkeys(t for o in operators for t in o.inputs if t not in made and not graph.tensors[t].optional)
    left = [
        t for t in made
        if not graph.tensors[t].optional
        and (t in graph.outputs or not graph.consumers[t] or any(c.name not in names for c in graph.consumers[t]))
    ]  # fmt: skip
    return tuple(read), tuple(left)


def only_consumer(graph: Graph, tensor: str) -> Operator | None:
    """Return the operator that alone reads a tensor, which is no output of the graph; or None."""
    consumers = graph.consumers[tensor]
    return consumers[0] if len(consumers) == 1 and tensor not in graph.outputs else None
