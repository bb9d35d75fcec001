"""Backward kernels that repeat cheap forward operators: inside, so as to read less, and as further results.

What forward made need not be held where a kernel of backward, which reads what it is made from anyway, makes it again:
for itself, or for products that read it.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from autotuner.ir.cost import tensor_bytes
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.kinds import KINDS, draws
from autotuner.space.fusion.cover import Boundary, Reach, boundary

BYTES_MIN = 1 << 20
"""Of a tensor that is worth making again."""
STEPS = 3
"""Operators between what is read and what is made of it, at most."""


class Variant(NamedTuple):
    """A set with operators that it repeats: these, what the whole reads and leaves, and which of that forward made."""

    repeated: tuple[Operator, ...]
    boundary: Boundary
    remade: tuple[str, ...]


def read_only_to_repeat(graph: Graph, operators: Sequence[Operator], kinds: Collection[str]) -> frozenset[str]:
    """Return what forward operators need not leave: backward alone reads it, and can make it of what it reads anyway.

    Args:
        operators: a set that one kernel computes.
        kinds: of operators that kernels of backward repeat.
    """
    names = {operator.name for operator in operators}

    def is_read_in_backward(tensor: str) -> bool:
        return any(reader.phase == "backward" for reader in graph.consumers[tensor])

    found = set[str]()
    for maker in operators:
        readers = [reader for tensor in maker.outputs for reader in graph.consumers[tensor] if reader.name not in names]
        if (
            _is_repeated(maker, kinds)
            and readers
            and not set(maker.outputs) & set(graph.outputs)
            and tensor_bytes(graph, maker.outputs[0]) >= BYTES_MIN
            and all(reader.phase == "backward" and reader.kind in kinds for reader in readers)
            and all(is_read_in_backward(tensor) and tensor not in found for tensor in maker.inputs)
        ):
            found.update(maker.outputs)
    return frozenset(found)


def _is_repeated(maker: Operator, kinds: Collection[str]) -> bool:
    """Tell whether a kernel of backward can repeat a forward operator."""
    return (
        maker.phase == "forward"
        and maker.kind in kinds
        and not draws(maker.kind)
        and KINDS[maker.kind].keeps_axes
        and "program" not in maker.kind
    )


class Repeats:
    """Forward operators that the kernel of a set of backward operators can repeat.

    Args:
        operators: the set, in graph order.
        kinds: of operators that its kernel computes.
    """

    def __init__(self, graph: Graph, reach: Reach, operators: Sequence[Operator], kinds: Collection[str]) -> None:
        self._graph, self._reach, self._operators = graph, reach, operators
        self._kinds = kinds
        read, self._left = boundary(graph, operators)
        self._read = dict.fromkeys(read)
        self._repeated: dict[str, Operator] = {}

    def variants(self) -> Iterator[Variant]:
        """Yield the set with what it repeats inside, and with what it makes again for products as well."""
        if not any(self._is_large(tensor) and self._maker(tensor) for tensor in self._graph.tensors):
            return
        self._repeat_inside()
        if self._repeated:
            yield self._told(())
        made = tuple(self._made_again())
        if made:
            yield self._told(made)

    def _repeat_inside(self) -> None:
        """Read what a tensor is made from instead of the tensor, where that is read anyway or has fewer bytes."""
        changed = True
        while changed:
            changed = False
            for tensor in [name for name in self._read if self._is_large(name)]:
                maker = self._maker(tensor)
                if maker is None:
                    continue
                left = self._read.keys() - set(maker.outputs)
                if all(self._is_there(name, left) or self._is_smaller(name, tensor) for name in maker.inputs):
                    self._repeated[maker.name] = maker
                    self._read = {name: None for name in self._read if name in left} | dict.fromkeys(maker.inputs)
                    changed = True
                    break

    def _made_again(self) -> Iterator[str]:
        """Yield tensors that products read in backward, behind this set, and that can be made of what is read here.

        Other readers can repeat themselves what they read.
        """
        own = {operator.name for operator in self._operators}
        members = self._reach.bits(self._operators)
        widest = max(self._graph.elements(name) for name in (*self._read, *self._left))
        inside = {tensor for maker in self._repeated.values() for tensor in maker.outputs}
        for name in self._graph.tensors:
            readers = [o for o in self._graph.consumers[name] if o.phase == "backward" and o.name not in own]
            if (
                any(KINDS[o.kind].operator_class == "contraction" for o in readers)
                and name not in self._read
                and self._is_large(name)
                and self._graph.elements(name) == widest
                and not any(self._reach.after[self._reach.index[o.name]] & members for o in readers)
            ):
                found = self._ways(name, STEPS, inside)
                read = {each for maker in found.values() for each in maker.inputs} & self._read.keys()
                if any(self._is_large(each) and not self._is_smaller(each, name) for each in read):
                    self._repeated |= found
                    inside |= {tensor for maker in found.values() for tensor in maker.outputs}
                    yield name

    def _ways(self, tensor: str, steps: int, inside: Collection[str]) -> dict[str, Operator]:
        """Return the operators that make a tensor of what is read here; none where they would read more."""
        if tensor in inside:
            return {(made := self._graph.producers[tensor]).name: made}
        maker = self._maker(tensor)
        if maker is None or steps == 0:
            return {}
        found = {maker.name: maker}
        for name in maker.inputs:
            if not self._is_there(name, self._read):
                ahead = self._ways(name, steps - 1, inside)
                if not ahead:
                    return {}
                found |= ahead
        return found

    def _maker(self, tensor: str) -> Operator | None:
        """Return the forward operator that makes a tensor, if a kernel can repeat it."""
        maker = self._graph.producers.get(tensor)
        return maker if maker is not None and _is_repeated(maker, self._kinds) else None

    def _is_there(self, tensor: str, read: Collection[str]) -> bool:
        return tensor in read or self._graph.tensors[tensor].role in ("parameter", "input")

    def _is_smaller(self, tensor: str, made: str) -> bool:
        return tensor_bytes(self._graph, tensor) < tensor_bytes(self._graph, made)

    def _is_large(self, tensor: str) -> bool:
        return tensor_bytes(self._graph, tensor) >= BYTES_MIN

    def _told(self, remade: tuple[str, ...]) -> Variant:
        order = self._reach.index
        repeated = tuple(sorted(self._repeated.values(), key=lambda operator: order[operator.name]))
        read, _ = boundary(self._graph, (*repeated, *self._operators))
        return Variant(repeated, (read, (*self._left, *remade)), remade)
