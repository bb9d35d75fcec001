"""Equal computations under different names: which tensor of one graph is which of another."""

from collections.abc import Iterator, Mapping

from autotuner.ir.graph import Graph, Operator, nameless
from autotuner.ir.kinds import kind_of


def same_tensors(one: Graph, other: Graph) -> Mapping[str, str] | None:
    """Return for each tensor of a graph the one that it is in another, None where they compute different things.

    Tensors that are the same have the same extents, in the order in which their axes are declared, and the same type,
    and need a gradient or not. Outputs are the same by their place; names, and the order of operators, say nothing.
    """
    if len(one.operators) != len(other.operators) or len(one.outputs) != len(other.outputs):
        return None
    matching = _Matching(one, other)
    found = matching.all_of(zip(one.outputs, other.outputs, strict=True), {})
    # What no output is made from is not looked at.
    return found if found is not None and len(found) == len(matching.numbers) == len(matching.wanted) else None


def _made_from(graph: Graph) -> dict[str, int]:
    """Return for each tensor of a graph's operators a number for what it is made from, and how; equal for equal ones.

    Without it, a search in vain would try both orders of every sum.
    """
    found: dict[str, int] = {}

    def number(name: str, *made: object) -> int:
        tensor = graph.tensors[name]
        return hash((tensor.dtype, tensor.role, tensor.constant, graph.shape(name), *made))

    for operator in graph.operators:
        read = [found.setdefault(name, number(name)) for name in operator.inputs]
        if _has_no_order(operator):
            read.sort()
        node = nameless(operator, (), ())
        found |= {name: number(name, node, place, *read) for place, name in enumerate(operator.outputs)}
    return found


class _Matching:
    """A search from outputs to inputs. It tries both orders where an operator has no order, and goes back."""

    def __init__(self, one: Graph, other: Graph) -> None:
        self._one, self._other = one, other
        self.numbers, self.wanted = _made_from(one), _made_from(other)

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
        if self.numbers.get(tensor) != self.wanted.get(wanted) or (makes is None) != (made is None):
            return
        if makes is None or made is None:
            yield {**known, tensor: wanted}
            return
        if nameless(makes, (), ()) != nameless(made, (), ()) or len(makes.outputs) != len(made.outputs):
            return
        both = {**known, **dict(zip(makes.outputs, made.outputs, strict=True))}
        for operands in _orders(makes):
            found = self.all_of(zip(operands, made.inputs, strict=True), both)
            if found is not None:
                yield found


def _orders(operator: Operator) -> Iterator[tuple[str, ...]]:
    yield operator.inputs
    if _has_no_order(operator):
        yield operator.inputs[::-1]


def _has_no_order(operator: Operator) -> bool:
    return kind_of(operator).commutative and len(set(operator.input_axes)) == 1
