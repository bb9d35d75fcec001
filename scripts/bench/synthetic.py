"""Made-up problems in the shape of a transformer's training step, for benchmarks and tests; no tuning reads them.

A block of operators is repeated, its backward is derived, and forms, fused covers, conversions and costs are drawn at
random. Variables and states mean what they mean in `autotuner.solve.problem.formulate`. Costs are multiples of
1/64 us, so sums of them are exact, in any order.
"""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from autotuner.errors import ProblemError
from autotuner.solve.problem import Factor, Problem, Row
from scripts.bench.synthetic_graph import ENCODER, Block, Node, TrainingGraph

FIRST_FORM = "f0"
INSIDE = "inside "
CONVERTED = " > "
UNIT_US = 1 / 64

# Ways of an operator alone, as a multiple of the forms of a tensor; a cover has one way per form.
WAYS = 2
# Forms that a tensor can be converted into; into two of them at once where it has at most `PAIRED` forms.
TARGETS = 3
PAIRED = 8


def synthetic_problem(
    operators: int, forms: int, seed: int = 0, block: Block = ENCODER, *, weighed: bool = False
) -> Problem:
    """Return a made-up problem; there is an assignment of it, whatever is drawn.

    Args:
        operators: at most so many, forward and backward: as many steps of the repeated block as give no more.
        forms: of each tensor but statistics and biases, which have one.
        seed: of which combinations of forms exist, and of all costs.
        block: what is repeated.
        weighed: tensors of forward that backward reads hold bytes, some forms fewer than others at more time for
            whoever makes or reads them.

    Raises:
        ProblemError: fewer operators than the first step has, or no form.
    """
    if forms < 1:
        raise ProblemError(f"a tensor has {forms} forms; it must have 1 or more")
    count = bisect_right(range(1, operators + 1), operators, key=lambda n: len(TrainingGraph(block, n).nodes))
    if count == 0:
        least = len(TrainingGraph(block, 1).nodes)
        raise ProblemError(f"{operators} operators; the first step and its backward alone are {least}")
    return _Drawing(TrainingGraph(block, count), forms, seed, weighed=weighed).problem()


@dataclass(frozen=True)
class _Way:
    """A state of the operators that one kernel computes.

    Args:
        members: the operators.
        forms: of each tensor that the kernel reads or makes; those that it keeps inside have none.
        share_us: each member's share of the cost.
    """

    state: str
    members: tuple[str, ...]
    forms: Mapping[str, str]
    share_us: float


class _Drawing:
    """Ways of each operator and conversions of each tensor of a graph, drawn at random.

    Attributes:
        ways: of each operator, alone and in covers.
        tokens: of each cover whose members do not all share tensors inside: one member of each part, and its states.
    """

    def __init__(self, graph: TrainingGraph, count: int, seed: int, *, weighed: bool = False) -> None:
        self.graph = graph
        self.count = count
        self.draw = random.Random(seed)
        # Bytes have a source of their own, so that asking for them leaves all else as it is but for the slower ways.
        self._bytes = random.Random(f"bytes {seed}") if weighed else None
        self._held: dict[tuple[str, str], int] = {}
        self._slower: dict[tuple[str, str], float] = {}
        self.ways: dict[str, list[_Way]] = {}
        self.tokens: list[tuple[str, list[str], set[str]]] = []
        self._fastest_us: dict[str, float] = {}
        self._weigh()
        nodes = {node.name: node for node in graph.nodes}
        for node in graph.nodes:
            self.ways[node.name] = list(self._alone(node))
        for cover in graph.covers:
            self._cover([nodes[name] for name in cover])
        self.tables = dict(self._tensors())

    def _forms(self, tensor: str) -> list[str]:
        return [f"f{i}" for i in range(1 if tensor in self.graph.single else self.count)]

    def _cost_us(self, low: float, high: float) -> float:
        return round(self.draw.uniform(low, high) / UNIT_US) * UNIT_US

    def _weigh(self) -> None:
        """Draw what each form of a saved tensor holds, and what fewer bytes cost, as a share of an operator's time."""
        if self._bytes is None:
            return
        for tensor in sorted(self.graph.saved):
            size = self._bytes.choice((1, 2, 4)) << 20
            for form in self._forms(tensor):
                eighths = 8 if form == FIRST_FORM else self._bytes.choice((8, 8, 4, 2, 1))
                self._held[tensor, form] = size * eighths // 8
                self._slower[tensor, form] = (8 - eighths) / 40

    def _way(self, state: str, members: tuple[str, ...], forms: Mapping[str, str], share_us: float) -> _Way:
        if self._bytes is not None:
            slower = sum(self._slower.get(pair, 0.0) for pair in forms.items())
            share_us = round(share_us * (1 + slower) / UNIT_US) * UNIT_US
        return _Way(state, members, forms, share_us)

    def _combinations(self, tensors: Sequence[str], alike: int, count: int) -> list[tuple[str, ...]]:
        """Return different combinations: `alike` of one form for all, the first among them, and others at random."""
        forms = [self._forms(tensor) for tensor in tensors]
        rows = dict.fromkeys(tuple(each[min(i, len(each) - 1)] for each in forms) for i in range(max(1, alike)))
        for _ in range(2 * count):
            if len(rows) < count:
                rows[tuple(self.draw.choice(each) for each in forms)] = None
        return list(rows)

    def _alone(self, node: Node) -> Iterator[_Way]:
        multiplies = node.kind in ("linear", "matmul")
        fastest = self.draw.choice((40.0, 80.0, 160.0) if multiplies else (5.0, 10.0, 20.0))
        self._fastest_us[node.name] = fastest
        tensors = tuple(dict.fromkeys(node.inputs + node.outputs))
        slower = {(t, form): self.draw.choice((0.0, 0.0, 0.3, 1.0)) for t in tensors for form in self._forms(t)}
        alike = 1 if multiplies else self.count
        for number, row in enumerate(self._combinations(tensors, alike, WAYS * self.count)):
            factor = 1 + sum(slower[pair] for pair in zip(tensors, row, strict=True))
            cost = self._cost_us(fastest * factor, fastest * (factor + 0.3))
            yield self._way(f"alone {number}", (node.name,), dict(zip(tensors, row, strict=True)), cost)

    def _cover(self, members: Sequence[Node]) -> None:
        names = tuple(node.name for node in members)
        readers = self.graph.readers
        operands = dict.fromkeys(tensor for node in members for tensor in node.inputs + node.outputs)
        inside = {t for node in members for t in node.outputs if readers[t] and set(readers[t]) <= set(names)}
        boundary = [tensor for tensor in operands if tensor not in inside]
        share = sum(self._fastest_us[name] for name in names) / len(names)
        states = set()
        for number, row in enumerate(self._combinations(boundary, self.count // 2, self.count)):
            forms = dict(zip(boundary, row, strict=True))
            way = self._way(f"{'+'.join(names)} {number}", names, forms, self._cost_us(share / 2, share * 2))
            states.add(way.state)
            for name in names:
                self.ways[name].append(way)
        parts = _parts(members, inside)
        if len(parts) > 1:
            self.tokens.append((f"token {'+'.join(names)}", parts, states))

    def _tensors(self) -> Iterator[tuple[str, dict[Row, float]]]:
        """Yield each tensor's states, with the cost of the conversions that they contain."""
        made: dict[str, dict[str, None]] = {tensor: {FIRST_FORM: None} for tensor in sorted(self.graph.given)}
        made |= {weight: dict.fromkeys(self._forms(weight)) for weight in self.graph.weights}
        read: dict[str, set[str]] = defaultdict(set)
        for node in self.graph.nodes:
            for way in self.ways[node.name]:
                for tensor in node.outputs:
                    made.setdefault(tensor, {})[way.forms.get(tensor, INSIDE + way.state)] = None
                for tensor in node.inputs:
                    if self.graph.makers.get(tensor) not in way.members:
                        read[tensor].add(way.forms[tensor])
        gradients = set(self.graph.weights.values())
        for gradient in gradients:
            read[gradient].update(self._forms(gradient))
        for tensor, sources in made.items():
            others = sorted(read[tensor] - {FIRST_FORM})
            wanted = [FIRST_FORM, *self.draw.sample(others, min(TARGETS - 1, len(others)))]
            size_us = self.draw.choice((2.0, 4.0, 8.0))
            table: dict[Row, float] = {}
            for source in sources:
                targets = [form for form in wanted if form != source and not source.startswith(INSIDE)]
                price = {form: self._cost_us(size_us, 2 * size_us) for form in targets}
                most = min(2 if self.count <= PAIRED else 1, len(targets))
                for chosen in (each for size in range(most + 1) for each in combinations(targets, size)):
                    # The caller gets what nobody reads as declared; of weights' gradients, a rule says how.
                    is_read = self.graph.readers[tensor] or tensor in gradients
                    if is_read or FIRST_FORM in (source, *chosen):
                        table[(CONVERTED.join((source, *chosen)),)] = sum(price[form] for form in chosen)
            yield tensor, table

    def _holding(self, tensor: str, table: Mapping[Row, float]) -> dict[Row, int]:
        """Return what each state of a tensor holds: the bytes of all forms in which it is kept."""
        held = {row: sum(self._held.get((tensor, form), 0) for form in row[0].split(CONVERTED)) for row in table}
        return {row: count for row, count in held.items() if count}

    def problem(self) -> Problem:
        costs = (
            Factor(f"cost of operator {name}", (f"operator {name}",), {(way.state,): way.share_us for way in ways})
            for name, ways in self.ways.items()
        )
        conversions = (
            Factor(f"cost of tensor {name}", (f"tensor {name}",), table, self._holding(name, table))
            for name, table in self.tables.items()
        )
        factors = (*costs, *conversions, *self._links(), *self._agreements(), *self._rules())
        return Problem(factors, tuple(_chain(self.graph.forward)))

    def _links(self) -> Iterator[Factor]:
        """Yield which states of an operator go with which states of each of its tensors."""
        made = {tensor: _by_form(table, first_only=True) for tensor, table in self.tables.items()}
        held = {tensor: _by_form(table, first_only=False) for tensor, table in self.tables.items()}
        for node in self.graph.nodes:
            for tensor in dict.fromkeys(node.inputs + node.outputs):
                table: dict[Row, float] = {}
                for way in self.ways[node.name]:
                    form = way.forms.get(tensor, INSIDE + way.state)
                    # A member of a cover sees what another member made, not what it was converted into.
                    makes = self.graph.makers.get(tensor) in way.members
                    for state in (made if makes else held)[tensor].get(form, ()):
                        table[way.state, state] = 0.0
                yield Factor(f"{node.name} with {tensor}", (f"operator {node.name}", f"tensor {tensor}"), table)

    def _agreements(self) -> Iterator[Factor]:
        for token, members, states in self.tokens:
            for name in members:
                table: dict[Row, float] = {
                    (way.state, way.state if way.state in states else "none"): 0.0 for way in self.ways[name]
                }
                yield Factor(f"{token} at {name}", (f"operator {name}", token), table)

    def _rules(self) -> Iterator[Factor]:
        """Yield: a gradient exists in the form in which its weight is stored; weights read by one cover lie alike."""
        for weight, gradient in self.graph.weights.items():
            yield self._alike(f"{gradient} lies as {weight}", weight, gradient, held=True)
        stacked = {
            pair
            for cover in self.graph.covers
            if all(f"{name}_weight" in self.graph.weights for name in cover)
            for pair in pairwise(f"{name}_weight" for name in cover)
        }
        for one, other in sorted(stacked):
            yield self._alike(f"{one} lies as {other}", one, other, held=False)

    def _alike(self, name: str, stored: str, other: str, *, held: bool) -> Factor:
        partners = _by_form(self.tables[other], first_only=not held)
        table: dict[Row, float] = {
            (state, partner): 0.0
            for form, states in _by_form(self.tables[stored], first_only=True).items()
            for state in states
            for partner in partners.get(form, ())
        }
        return Factor(name, (f"tensor {stored}", f"tensor {other}"), table)


def _by_form(table: Mapping[Row, float], *, first_only: bool) -> dict[str, list[str]]:
    """Return a tensor's states by the forms that they hold, or by the form that they are made in."""
    found: dict[str, list[str]] = defaultdict(list)
    for (state,) in table:
        forms = [state] if state.startswith(INSIDE) else state.split(CONVERTED)
        for form in forms[:1] if first_only else forms:
            found[form].append(state)
    return found


def _parts(members: Sequence[Node], inside: set[str]) -> list[str]:
    """Return one member of each part of a cover that tensors inside hold together."""
    parts: list[tuple[str, set[str]]] = []
    for node in members:
        joined = (node.name, inside.intersection(node.inputs + node.outputs))
        apart = [part for part in parts if not part[1] & joined[1]]
        for first, tensors in parts:
            if tensors & joined[1]:
                joined = (first, joined[1] | tensors)
        parts = [*apart, joined]
    return [name for name, _ in parts]


def _chain(forward: Iterable[Node]) -> Iterator[str]:
    """Yield the longest path through forward operators, operators and tensors in turn."""
    steps: dict[str, int] = {"x": 0}
    before: dict[str, Node] = {}
    for node in forward:
        deepest = max(steps.get(tensor, 0) for tensor in node.inputs)
        steps |= dict.fromkeys(node.outputs, deepest + 1)
        before |= dict.fromkeys(node.outputs, node)
    tensor = max(before, key=lambda name: steps[name])
    path = [f"operator {before[tensor].name}"]
    while steps[tensor] > 1:
        tensor = max(before[tensor].inputs, key=lambda name: steps.get(name, 0))
        path += [f"tensor {tensor}", f"operator {before[tensor].name}"]
    return reversed(path)
