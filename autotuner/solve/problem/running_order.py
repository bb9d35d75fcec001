"""Order of a plan's kernels as far as every choice agrees on it."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from autotuner.checkpoint import checkpoint
from autotuner.solve.problem.offered import Offered

Names = frozenset[str]


class RunningOrder:
    """Operators that run before others of their phase whatever is chosen, by what each choice reads.

    Example: where each choice of `y` reads `product`, or computes that itself, "product" is in `before["y"]`.
    """

    def __init__(self, offered: Offered) -> None:
        self._offered, self._graph = offered, offered.graph
        self.number = {operator.name: number for number, operator in enumerate(self._graph.operators)}
        self.late = frozenset(operator.name for operator in self._graph.operators if operator.phase == "backward")
        self._again: dict[str, Names] = {}

    @cached_property
    def before(self) -> dict[str, Names]:
        """By operator: those that run before it, itself, and those that run in the same kernel if not before."""
        before: dict[str, Names] = {name: frozenset((name,)) for name in self.number}
        is_new = True
        while is_new:
            checkpoint()
            is_new = False
            for name, ways in self._ways.items():
                found = frozenset.intersection(*(own.union(*(before[source] for source in read)) for own, read in ways))
                is_new |= not found <= before[name]
                before[name] |= found
        return before

    @cached_property
    def _ways(self) -> dict[str, Sequence[tuple[Names, Names]]]:
        """By operator, of each cover: its operators, and those of the phase whose results it reads."""
        makers = {tensor: operator.name for tensor, operator in self._graph.producers.items()}
        return {
            name: [
                (
                    frozenset(cover.operators),
                    frozenset(
                        makers[tensor]
                        for tensor in cover.inputs
                        if tensor in makers and (makers[tensor] in self.late) == (name in self.late)
                    ),
                )
                for cover in dict.fromkeys(choice.cover for _, choice in stated)
            ]
            for name, stated in self._offered.by_operator.items()
        }

    @cached_property
    def strictly_before(self) -> dict[str, Names]:
        """The same without itself and those that may run in the same kernel."""
        return {
            name: before - frozenset().union(*(own for own, _ in self._ways[name]))
            for name, before in self.before.items()
        }

    @cached_property
    def after(self) -> dict[str, Names]:
        """By operator: those that run after it, or in the same kernel, and itself."""
        return {name: frozenset(other for other in self.number if name in self.before[other]) for name in self.number}

    @cached_property
    def strictly_after(self) -> dict[str, Names]:
        return {
            name: frozenset(other for other in self.number if name in self.strictly_before[other])
            for name in self.number
        }

    def is_made_late(self, tensor: str) -> bool:
        """Tell whether a tensor comes to be in backward: made there, or handed in before."""
        producer = self._graph.producers.get(tensor)
        return tensor in self._graph.given_gradients if producer is None else producer.name in self.late

    def readers(self, tensor: str, is_late: bool) -> Sequence[str]:
        """Return the operators of a phase that may read a tensor, in graph order."""
        return self._readers.get((tensor, is_late), ())

    @cached_property
    def _readers(self) -> dict[tuple[str, bool], Sequence[str]]:
        found: dict[tuple[str, bool], dict[str, None]] = defaultdict(dict)
        for name, stated in self._offered.by_operator.items():
            own = self._offered.operators[name].inputs
            for _, choice in stated:
                for tensor in choice.cover.inputs:
                    if tensor in own or choice.cover.operators[0] == name:
                        found[tensor, name in self.late][name] = None
        return {key: tuple(names) for key, names in found.items()}

    def late_readers(self, tensor: str) -> Sequence[str]:
        """Return the operators of backward before which a tensor of forward is read, by itself or by a repetition."""
        found = set(self.readers(tensor, True))
        for name in self._offered.repeated:
            if tensor in self._offered.operators[name].inputs:
                found.update(self.readers_again(name))
        return sorted(found, key=self.number.__getitem__)

    def readers_again(self, operator: str) -> Names:
        """Return the operators of backward before which an operator of forward may be repeated."""
        if operator not in self._again:
            outputs = self._offered.operators[operator].outputs
            self._again[operator] = frozenset(reader for tensor in outputs for reader in self.late_readers(tensor))
        return self._again[operator]
