"""Equal computations under different names: which tensor of one graph is which of another."""

from collections.abc import Iterator, Mapping

from autotuner.ir.graph import Graph, Operator, nameless

COMMUTATIVE = frozenset({"add"})
"""Kinds whose two operands may change places."""


def same_tensors(one: Graph, other: Graph) -> Mapping[str, str] | None:
    """Return for each tensor of a graph the one that it is in another, None where they compute different things.

    Tensors that are the same have the same extents, in the order in which their axes are declared, and the same type,
    and need a gradient or not. Outputs are the same by their place; names, and the order of operators, say nothing.
    """
    if len(one.operators) != len(other.operators) or len(one.outputs) != len(other.outputs):
        return None
    found = _Matching(one, other).all_of(zip(one.outputs, other.outputs, strict=True), {})
    whole = [each for each, graph in ((found, one), (found and {o: t for t, o in found.items()}, other))
             if each is not None and _used(graph) <= each.keys()]  # fmt: skip
    return found if len(whole) == 2 else None


def _used(graph: Graph) -> set[str]:
    return {tensor for operator in graph.operators for tensor, _ in operator.operands}


class _Matching:
    """A search from outputs to inputs. It tries both orders where an operator has no order, and goes back."""

    def __init__(self, one: Graph, other: Graph) -> None:
        self._one, self._other = one, other

    def all_of(self, pairs: Iterator[tuple[str, str]], known: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return what is known with these pairs, and all that they are made from; None where they differ."""
        pair = next(pairs, None)
        if pair is None:
            return known
        rest = list(pairs)
        for found in self._ways(*pair, known):
            whole = self.all_of(iter(rest), found)
            if whole is not None:
                return whole
        return None

    def _ways(self, tensor: str, wanted: str, known: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Yield what is known where a tensor is another graph's, in each way in which it can be."""
        if tensor in known or wanted in known.values():
            if known.get(tensor) == wanted:
                yield known
            return
        makes, made = self._one.producers.get(tensor), self._other.producers.get(wanted)
        if not self._alike(tensor, wanted) or (makes is None) != (made is None):
            return
        if makes is None or made is None:
            yield {**known, tensor: wanted}
            return
        if nameless(makes, (), ()) != nameless(made, (), ()) or len(makes.outputs) != len(made.outputs):
            return
        both = {**known, **dict(zip(makes.outputs, made.outputs, strict=True))}
        if both[tensor] != wanted or not all(map(self._alike, makes.outputs, made.outputs)):
            return
        for operands in _orders(makes):
            found = self.all_of(zip(operands, made.inputs, strict=True), both)
            if found is not None:
                yield found

    def _alike(self, tensor: str, wanted: str) -> bool:
        one, other = (
            (graph.tensors[name].dtype, graph.tensors[name].role, graph.tensors[name].constant, graph.shape(name))
            for graph, name in ((self._one, tensor), (self._other, wanted))
        )
        return one == other


def _orders(operator: Operator) -> Iterator[tuple[str, ...]]:
    yield operator.inputs
    if operator.kind in COMMUTATIVE and len(set(operator.input_axes)) == 1:
        yield operator.inputs[::-1]
