"""A space and the costs of its calls -> a problem, and a problem's solution -> the chosen covers and forms.

Variables: one per operator ("which cover computes me, with which forms") and one per tensor ("in which form was I made,
and into which was I converted"). A choice that keeps a tensor inside gives it a state of its own, so that producer and
consumer agree on the cover; siblings that share no such tensor agree through a token.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise

from autotuner.errors import InfeasibleError
from autotuner.fusion import Cover, Reach, stack_families
from autotuner.graph import Graph
from autotuner.problem.factors import Factor, Problem, Row, Solution
from autotuner.space import Choice, Conversion, Space

ABSENT = "absent"
INSIDE = "inside "
CONVERTED = " > "


@dataclass(frozen=True)
class Formulation:
    """A problem together with what its states mean.

    `choices` maps an operator's state to the fastest measured choice with these forms; `conversions` maps
    (tensor, source, target) to the fastest measured conversion.
    """

    problem: Problem
    choices: Mapping[str, Choice]
    conversions: Mapping[tuple[str, str, str], Conversion]
    costs_us: Mapping[str, float]

    def chosen(self, solution: Solution) -> tuple[Choice, ...]:
        """Return the chosen cover of every operator, each cover once, in graph order of its first operator."""
        states = [state for name, state in solution.states.items() if name.startswith("operator ")]
        return tuple(self.choices[state] for state in dict.fromkeys(states))

    def converted(self, solution: Solution) -> tuple[Conversion, ...]:
        """Return the conversions that a solution performs."""
        return tuple(
            self.conversions[name.removeprefix("tensor "), source, target]
            for name, state in solution.states.items()
            if name.startswith("tensor ")
            for source, targets in [_available(state)]
            for target in targets
        )


def formulate(space: Space, costs_us: Mapping[str, float]) -> Formulation:
    """Build the problem of a space from the costs of its calls, in microseconds; calls without a cost are left out.

    Raises:
        InfeasibleError: some operator has no choice with a cost; the message names it.
    """
    graph = space.graph
    cells: dict[tuple[Cover, tuple[str, ...]], Choice] = {}
    for choice in space.choices:
        cost = costs_us.get(choice.call.key)
        if cost is None:
            continue
        key = (choice.cover, choice.forms)
        if key not in cells or (cost, choice.candidate) < (costs_us[cells[key].call.key], cells[key].candidate):
            cells[key] = choice
    states: dict[str, Choice] = {_state(choice): choice for choice in cells.values()}
    conversions: dict[tuple[str, str, str], Conversion] = {}
    for conversion in space.conversions:
        cost = costs_us.get(conversion.call.key)
        place = (conversion.tensor, conversion.source, conversion.target)
        if cost is not None and (place not in conversions or cost < costs_us[conversions[place].call.key]):
            conversions[place] = conversion
    by_operator: dict[str, list[tuple[str, Choice]]] = defaultdict(list)
    for state, choice in states.items():
        for operator in choice.cover.operators:
            by_operator[operator].append((state, choice))
    missing = [operator.name for operator in graph.operators if operator.name not in by_operator]
    if missing:
        raise InfeasibleError(f"no measured candidate computes operator {missing[0]!r}")
    price = {place: costs_us[conversion.call.key] for place, conversion in conversions.items()}
    tensors = _tensor_states(space, by_operator, price)
    factors = [
        *_operator_factors(graph, by_operator, costs_us),
        *(Factor(f"cost of tensor {name}", (f"tensor {name}",), table) for name, table in tensors.items() if table),
        *_links(graph, by_operator, tensors),
        *_tokens(graph, by_operator),
        *_rules(graph, tensors, space.given),
        *_acyclic(graph, by_operator),
    ]
    names = {name for factor in factors for name in factor.variables}
    return Formulation(
        Problem(tuple(factors), tuple(name for name in _chain(graph) if name in names)), states, conversions, costs_us
    )


def _state(choice: Choice) -> str:
    cover = choice.cover
    return f"{'+'.join(cover.operators)}|{','.join(cover.inputs)}->{','.join(cover.outputs)}|{','.join(choice.forms)}"


def _available(state: str) -> tuple[str, tuple[str, ...]]:
    """Return a tensor state's made form and the forms that it was converted into."""
    if state == ABSENT or state.startswith(INSIDE):
        return state, ()
    source, *targets = state.split(CONVERTED)
    return source, tuple(targets)


def _inside(graph: Graph, choice: Choice, tensor: str) -> str:
    """Return the state of a tensor that a choice makes or reads inside; it names the choice if nobody else reads it."""
    readers = {operator.name for operator in graph.consumers[tensor]}
    if readers and readers <= set(choice.cover.operators):
        return INSIDE + _state(choice)
    return ABSENT


def _tensor_states(
    space: Space,
    by_operator: Mapping[str, list[tuple[str, Choice]]],
    price: Mapping[tuple[str, str, str], float],
) -> dict[str, dict[Row, float]]:
    """Return each tensor's states with the cost of the conversions that they contain.

    A tensor is converted into at most as many forms as it has readers, and into two at most.
    """
    graph = space.graph
    made: dict[str, dict[str, None]] = {name: {} for name in graph.tensors}
    read: dict[str, dict[str, None]] = {name: {} for name in graph.tensors}
    for operator in graph.operators:
        for _, choice in by_operator[operator.name]:
            for tensor in operator.outputs:
                made_as = choice.by_tensor.get(tensor) if tensor in choice.cover.outputs else None
                made[tensor][made_as if made_as is not None else _inside(graph, choice, tensor)] = None
            for tensor in choice.cover.inputs:
                read[tensor][choice.by_tensor[tensor]] = None
    for name, given in space.given.items():
        if name not in graph.producers:
            made[name] = dict.fromkeys(given)
        if name in graph.outputs:
            read[name].update(dict.fromkeys(given))
    tables: dict[str, dict[Row, float]] = {}
    for name in graph.tensors:
        table: dict[Row, float] = {}
        readers = len(graph.consumers[name]) + (name in graph.outputs)
        fixed = space.given[name] if name in graph.outputs else None
        for source in made[name]:
            targets = [target for target in read[name] if (name, source, target) in price]
            for count in range(min(2 if len(targets) <= 6 else 1, readers, len(targets)) + 1):
                for chosen in combinations(sorted(targets), count):
                    if fixed is not None and not {source, *chosen} & set(fixed):
                        continue
                    state = CONVERTED.join((source, *chosen))
                    table[(state,)] = sum(price[name, source, target] for target in chosen)
        tables[name] = table
    return tables


def _operator_factors(
    graph: Graph, by_operator: Mapping[str, list[tuple[str, Choice]]], costs_us: Mapping[str, float]
) -> Iterator[Factor]:
    """Yield each operator's costs; a cover's cost is shared evenly by its members."""
    for operator in graph.operators:
        yield Factor(
            f"cost of operator {operator.name}",
            (f"operator {operator.name}",),
            {
                (state,): costs_us[choice.call.key] / len(choice.cover.operators)
                for state, choice in by_operator[operator.name]
            },
        )


def _links(
    graph: Graph, by_operator: Mapping[str, list[tuple[str, Choice]]], tensors: Mapping[str, Mapping[Row, float]]
) -> Iterator[Factor]:
    """Yield which states of an operator go with which states of each of its tensors."""
    for operator in graph.operators:
        reads = dict.fromkeys(operator.inputs)
        extra = {
            tensor
            for _, choice in by_operator[operator.name]
            if choice.cover.operators[0] == operator.name
            for tensor in choice.cover.inputs
            if not any(tensor in o.inputs for o in graph.operators if o.name in choice.cover.operators)
        }
        for tensor in (*reads, *operator.outputs, *sorted(extra)):
            all_states = [row[0] for row in tensors[tensor]]
            holding: dict[str, list[str]] = defaultdict(list)
            making: dict[str, list[str]] = defaultdict(list)
            for state in all_states:
                source, targets = _available(state)
                making[source].append(state)
                for held in (source, *targets):
                    holding[held].append(state)
            table: dict[Row, float] = {}
            for state, choice in by_operator[operator.name]:
                form = choice.by_tensor.get(tensor)
                if tensor in choice.cover.outputs and form:  # made here, or by another member of the same cover
                    partners = making[form]
                elif tensor in choice.cover.inputs and form:
                    partners = holding[form]
                elif tensor not in operator.outputs and (graph.tensors[tensor].optional or tensor in extra):
                    partners = all_states
                else:
                    partners = making[_inside(graph, choice, tensor)]
                table.update(((state, partner), 0.0) for partner in partners)
            yield Factor(f"{operator.name} with {tensor}", (f"operator {operator.name}", f"tensor {tensor}"), table)


def _tokens(graph: Graph, by_operator: Mapping[str, list[tuple[str, Choice]]]) -> Iterator[Factor]:
    """Yield factors that make members of one cover agree where no tensor inside it makes them.

    One token variable per set of operators that must agree: its states are the choices that cover all of them, or none.
    """
    groups: dict[tuple[str, ...], None] = {}
    for rows in by_operator.values():
        for _, choice in rows:
            parts = _parts(graph, choice)
            if len(parts) > 1:
                groups[tuple(part[0] for part in parts)] = None
    for group in groups:
        token = f"token {'+'.join(group)}"
        shared = {
            state for state, choice in by_operator[group[0]] if set(group) <= set(choice.cover.operators)
            and tuple(part[0] for part in _parts(graph, choice)) == group
        }  # fmt: skip
        for name in group:
            table: dict[Row, float] = {
                (state, state if state in shared else "none"): 0.0 for state, _ in by_operator[name]
            }
            yield Factor(f"{token} at {name}", (f"operator {name}", token), table)


def _parts(graph: Graph, choice: Choice) -> list[list[str]]:
    """Return a cover's members, grouped by the tensors inside that already make them agree."""
    parts: list[list[str]] = []
    for name in choice.cover.operators:
        operator = next(o for o in graph.operators if o.name == name)
        mine = {t for t in operator.inputs + operator.outputs if _inside(graph, choice, t) != ABSENT
                and t not in choice.cover.inputs + choice.cover.outputs}  # fmt: skip
        joined = [name]
        rest = []
        for part in parts:
            theirs = {t for member in part for o in graph.operators if o.name == member for t in o.inputs + o.outputs}
            if mine & theirs:
                joined = [*part, *joined]
            else:
                rest.append(part)
        parts = [*rest, joined]
    order = {operator.name: i for i, operator in enumerate(graph.operators)}
    return sorted((sorted(part, key=order.__getitem__) for part in parts), key=lambda part: order[part[0]])


def _rules(
    graph: Graph, tensors: Mapping[str, Mapping[Row, float]], given: Mapping[str, tuple[str, ...]]
) -> Iterator[Factor]:
    """Yield: a gradient exists in the form in which its parameter is stored; stacked parameters are stored alike."""
    for name in graph.outputs:
        parameter = name.removeprefix("grad_")
        if name == parameter or graph.tensors[parameter].role != "parameter" or len(given[parameter]) < 2:
            continue
        ours = [row[0] for row in tensors[parameter]]
        theirs = [row[0] for row in tensors[name]]
        index = {form: _place(form, given[parameter]) for form in given[parameter]}
        table: dict[Row, float] = {}
        for state in ours:
            form = given[name][index[_available(state)[0]]]
            for other in theirs:
                source, targets = _available(other)
                if form in (source, *targets):
                    table[state, other] = 0.0
        yield Factor(f"{name} lies as {parameter}", (f"tensor {parameter}", f"tensor {name}"), table)
    for family in stack_families(graph):
        if any(graph.tensors[name].role != "parameter" for name in family):
            continue
        for first, second in pairwise(family):
            if len(given[first]) < 2:
                continue
            pairs: dict[Row, float] = {
                (row[0], other[0]): 0.0
                for row in tensors[first]
                for other in tensors[second]
                if _place(_available(row[0])[0], given[first]) == _place(_available(other[0])[0], given[second])
            }
            yield Factor(f"{first} lies as {second} of {len(family)}", (f"tensor {first}", f"tensor {second}"), pairs)


def _place(form: str, forms: tuple[str, ...]) -> int:
    return forms.index(form)


def _acyclic(graph: Graph, by_operator: Mapping[str, list[tuple[str, Choice]]]) -> Iterator[Factor]:
    """Yield factors that forbid two covers which depend on each other, each way through other operators."""
    reach = Reach(graph)
    wide = {choice.cover for rows in by_operator.values() for _, choice in rows if len(choice.cover.operators) > 1}
    named = {operator.name: operator for operator in graph.operators}
    ordered = sorted(wide, key=lambda cover: cover.operators)
    forbidden: dict[tuple[str, str], set[tuple[Cover, Cover]]] = defaultdict(set)
    for one, other in combinations(ordered, 2):
        if set(one.operators) & set(other.operators):
            continue
        if reach.cyclic([named[n] for n in one.operators], [named[n] for n in other.operators]):
            forbidden[one.operators[0], other.operators[0]].add((one, other))
    for (first, second), pairs in sorted(forbidden.items()):
        table: dict[Row, float] = {
            (state, other): 0.0
            for state, choice in by_operator[first]
            for other, partner in by_operator[second]
            if (choice.cover, partner.cover) not in pairs
        }
        yield Factor(f"no cycle of {first} and {second}", (f"operator {first}", f"operator {second}"), table)


def _chain(graph: Graph) -> Iterator[str]:
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
        path.append(f"operator {name}")
        through = longest[name][1]
        if through is None:
            break
        path.append(f"tensor {through}")
        name = graph.producers[through].name
    yield from reversed(path)


def order_steps(graph: Graph, chosen: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return chosen covers in an order in which they can run, forward ones first.

    Raises:
        InfeasibleError: the covers depend on each other in a circle.
    """
    left = sorted(chosen, key=lambda choice: [o.name for o in graph.operators].index(choice.cover.operators[0]))
    made = {name for name in graph.tensors if name not in graph.producers}
    ordered: list[Choice] = []
    while left:
        ready = next((c for c in left if all(t in made or t not in graph.producers for t in c.cover.inputs)), None)
        if ready is None:
            raise InfeasibleError(f"these covers depend on each other: {[c.cover.operators for c in left]}")
        left.remove(ready)
        ordered.append(ready)
        made |= set(ready.cover.outputs)
    return tuple(ordered)
