"""Which calls of a space are measured against each other, and which come first."""

from collections import defaultdict
from collections.abc import Iterator

from autotuner.ir.records import Call
from autotuner.solve.default import is_declared
from autotuner.space import Space


def openers(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield one call for each operator alone, in declared layouts: with them there is a plan, soon after the start."""
    opened: set[tuple[str, ...]] = set()
    yielded: set[str] = set()
    for choice in space.choices:
        operators = choice.cover.operators
        if len(operators) == 1 and operators not in opened and is_declared(space.graph, choice):
            opened.add(operators)
            if choice.call.key in keys - yielded:
                yielded.add(choice.call.key)
                yield [choice.call]


def races(space: Space, keys: set[str]) -> Iterator[list[Call]]:
    """Yield calls that compute the same thing, declared layouts first, so that the incumbent is good early."""
    found: dict[object, dict[str, Call]] = defaultdict(dict)
    for choice in space.choices:
        if choice.call.key in keys:
            kinds = (choice.call.subgraph.kinds, choice.cover.operators)
            found[kinds].setdefault(choice.call.key, choice.call)
    for conversion in space.conversions:
        if conversion.call.key in keys:
            found["conversion", space.graph.shape(conversion.tensor)].setdefault(conversion.call.key, conversion.call)
    seen: set[str] = set()
    for race in found.values():
        fresh = [call for key, call in race.items() if key not in seen]
        seen |= race.keys()
        if fresh:
            yield fresh
