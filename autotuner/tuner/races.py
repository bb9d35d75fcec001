"""Races: which calls of a space compete, and in which order they are timed."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Set

from autotuner.ir.records import Call
from autotuner.solve.baselines import is_declared
from autotuner.space import Space


class Competitors:
    """Calls of a space that compute the same thing."""

    def __init__(self, space: Space) -> None:
        self._computed: dict[Hashable, set[str]] = defaultdict(set)
        """The keys of calls, by what they compute."""
        self._groups: dict[str, set[Hashable]] = defaultdict(set)
        """The operators that each call computes, by its key: the same call may stand for several operators."""
        for computation, call in computations(space):
            self._computed[computation].add(call.key)
            self._groups[call.key].add(computation)

    def of(self, call: Call) -> set[str]:
        """Return the keys of the calls that compute the same thing as a call, its own among them."""
        return {key for group in self._groups[call.key] for key in self._computed[group]}


def openers(space: Space, keys: set[str], working: Set[str] | None = None) -> Iterator[list[Call]]:
    """Yield one call for each operator alone, in declared layouts: together they are a first plan.

    Args:
        keys: of the calls that may be measured.
        working: of those that are measured and work, where they make a plan already: then operators between products,
            of which none is alone among them, need no opener.
    """
    alone = [
        choice for choice in space.choices if len(choice.cover.operators) == 1 and is_declared(space.graph, choice)
    ]
    opened: set[tuple[str, ...]] = set()
    if working is not None:
        opened = {choice.cover.operators for choice in alone if choice.call.subgraph.kinds != ("contraction",)}
        opened -= {choice.cover.operators for choice in alone if choice.call.key in working}
    yielded: set[str] = set()
    for choice in alone:
        operators = choice.cover.operators
        if operators not in opened:
            opened.add(operators)
            if choice.call.key in keys - yielded:
                yielded.add(choice.call.key)
                yield [choice.call]


def races(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield calls that compute the same thing, declared layouts first, so that the incumbent is good early."""
    found: dict[Hashable, dict[str, Call]] = defaultdict(dict)
    for computation, call in computations(space):
        if call.key in keys:
            found[computation].setdefault(call.key, call)
    seen: set[str] = set()
    for race in found.values():
        fresh = [call for key, call in race.items() if key not in seen]
        seen |= race.keys()
        if fresh:
            yield fresh


def computations(space: Space) -> Iterator[tuple[Hashable, Call]]:
    """Yield what competes: each call with what it computes, as often as it may stand for something else."""
    for choice in space.choices:
        yield (choice.call.subgraph.kinds, choice.cover.operators), choice.call
    for conversion in space.conversions:
        yield ("conversion", space.graph.shape(conversion.tensor)), conversion.call
