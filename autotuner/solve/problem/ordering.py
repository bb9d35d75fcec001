"""In which order things run: chosen covers, and the forward chain that the paper's strategy follows."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from autotuner.checkpoint import checkpoint
from autotuner.errors import InfeasibleError
from autotuner.ir.graph import Graph
from autotuner.solve.problem.states import Variable
from autotuner.space import Choice


class CircleError(InfeasibleError):
    """Chosen covers that depend on each other in a circle.

    Args:
        covers: the operators of each.
    """

    def __init__(self, covers: Iterable[tuple[str, ...]]) -> None:
        self.covers = tuple(covers)
        super().__init__(f"these covers depend on each other: {', '.join('+'.join(names) for names in self.covers)}")


def order_steps(
    graph: Graph, chosen: Iterable[Choice], repeated: Mapping[str, Choice] | None = None
) -> tuple[Choice, ...]:
    """Return chosen covers in an order in which they can run, forward ones first.

    Args:
        repeated: what backward runs again by itself, by operator; each right before the first cover that reads it.

    Raises:
        CircleError: covers depend on each other, and it names those; or on what none of them makes.
    """
    place = {operator.name: number for number, operator in enumerate(graph.operators)}
    backward = {operator.name for operator in graph.operators if operator.phase == "backward"}
    left = sorted(chosen, key=lambda choice: place[choice.cover.operators[0]])
    again = _Again(repeated or {})
    missing = set(graph.producers)
    ordered: list[Choice] = []
    while left:
        checkpoint()
        late = {name for choice in left for name in choice.cover.remade}
        ready = next((choice for choice in left if not _lacks(choice, backward, missing, late, again)), None)
        if ready is None:
            raise CircleError(choice.cover.operators for choice in _circle(left, backward, again))
        left.remove(ready)
        ordered.append(ready)
        missing.difference_update(ready.cover.outputs)
    return tuple(ordered)


class _Again:
    """Tensors of forward that operators make which backward runs again by themselves."""

    def __init__(self, repeated: Mapping[str, Choice]) -> None:
        self._read = {name: choice.cover.inputs for choice in repeated.values() for name in choice.cover.outputs}

    def needs(self, names: Iterable[str]) -> set[str]:
        """Return what has to be there for backward to have tensors: themselves, or what they are made of again."""
        found, seen, ahead = set[str](), set[str](), list(names)
        while ahead:
            name = ahead.pop()
            if name in seen:
                continue
            seen.add(name)
            ahead += self._read.get(name, ())
            if name not in self._read:
                found.add(name)
        return found


def _lacks(
    choice: Choice, backward: Collection[str], missing: Collection[str], late: Collection[str], again: _Again
) -> bool:
    """Say whether something that a choice reads is not there yet."""
    if choice.cover.operators[0] not in backward:
        return not set(choice.cover.inputs).isdisjoint(missing)
    needs = again.needs(choice.cover.inputs)
    return not needs.isdisjoint(missing) or not (needs - set(choice.cover.remade)).isdisjoint(late)


def _circle(left: Collection[Choice], backward: Collection[str], again: _Again) -> list[Choice]:
    """Return choices of which each waits for the one before it, the first for the last; or one that waits in vain."""
    makers = {name: choice for choice in left for name in choice.cover.outputs if name not in choice.cover.remade}
    remakers = {name: choice for choice in left for name in choice.cover.remade}
    path = [next(iter(left))]
    while True:
        cover = path[-1].cover
        needs, late = set(cover.inputs), set[str]()
        if cover.operators[0] in backward:
            needs = again.needs(cover.inputs)
            late = needs - set(cover.remade)
        before = next((remakers[name] for name in sorted(late) if name in remakers), None) or next(
            (makers[name] for name in sorted(needs) if name in makers), None
        )
        if before is None:
            return path[-1:]
        if before in path:
            return path[path.index(before) :]
        path.append(before)


def forward_chain(graph: Graph) -> Iterator[str]:
    """Yield the longest forward path, operators and tensors in turn: the layer graph with residual edges cut."""
    longest: dict[str, tuple[int, str | None]] = {}  # steps before an operator, and the tensor that the last one left
    forward = [operator for operator in graph.operators if operator.phase == "forward"]
    for operator in forward:
        best: tuple[int, str | None] = (0, None)
        for tensor in operator.inputs:
            producer = graph.producers.get(tensor)
            if producer is not None and producer.name in longest and longest[producer.name][0] + 1 > best[0]:
                best = (longest[producer.name][0] + 1, tensor)
        longest[operator.name] = best
    if not forward:
        return
    name: str | None = max(longest, key=lambda key: (longest[key][0], key))
    path: list[str] = []
    while name is not None:
        path.append(str(Variable("operator", name)))
        through = longest[name][1]
        if through is None:
            break
        path.append(str(Variable("tensor", through)))
        name = graph.producers[through].name
    yield from reversed(path)
