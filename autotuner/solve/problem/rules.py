"""Rules beside costs and forms: what one kernel covers is chosen as one, and covers form no circle."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from autotuner.checkpoint import checkpoint
from autotuner.ir.formats import ABSENT
from autotuner.solve.problem.factors import Factor, Row
from autotuner.solve.problem.offered import Offered, Stated
from autotuner.solve.problem.states import Variable, inside
from autotuner.space import Choice
from autotuner.space.fusion import Cover, Reach


def tokens(offered: Offered) -> Iterator[Factor]:
    """Yield factors that make members of one cover agree where no tensor inside it makes them.

    One token variable per set of operators that must agree: its states are the choices that cover all of them, or none.
    """
    parted = {state: _parts(offered, choice) for state, choice in offered.choices.items()}
    groups: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for state, parts in parted.items():
        if len(parts) > 1:
            groups[tuple(part[0] for part in parts)].add(state)
    for group, shared in groups.items():
        checkpoint()
        token = str(Variable("token", "+".join(group)))
        for name in group:
            table: dict[Row, float] = {
                (state, state if state in shared else "none"): 0.0 for state, _ in offered.by_operator[name]
            }
            yield Factor(f"{token} at {name}", (str(Variable("operator", name)), token), table)


def _parts(offered: Offered, choice: Choice) -> list[list[str]]:
    """Return a cover's members, grouped by the tensors inside that already make them agree."""
    if len(choice.cover.operators) == 1:
        return [list(choice.cover.operators)]
    graph, own = offered.graph, {t for name in choice.cover.operators for t in offered.operators[name].outputs}
    own -= {*choice.cover.inputs, *choice.cover.outputs}
    parts: list[tuple[list[str], set[str]]] = []
    for name in choice.cover.operators:
        operator = offered.operators[name]
        touched = {*operator.inputs, *operator.outputs}
        joined, tensors = [name], {t for t in touched & own if inside(graph, choice, t) != ABSENT}
        rest = []
        for part in parts:
            if part[1] & tensors:
                joined, tensors = [*part[0], *joined], part[1] | tensors
            else:
                rest.append(part)
        parts = [*rest, (joined, tensors)]
    order = {operator.name: place for place, operator in enumerate(graph.operators)}
    return sorted((sorted(part, key=order.__getitem__) for part, _ in parts), key=lambda part: order[part[0]])


def acyclic(offered: Offered) -> Iterator[Factor]:
    """Yield factors that forbid two covers which depend on each other, each way through other operators."""
    by_operator: Mapping[str, Stated] = offered.by_operator
    reach = Reach(offered.graph)
    wide = {choice.cover for choice in offered.choices.values() if len(choice.cover.operators) > 1}
    named = offered.operators
    ordered = sorted(wide, key=lambda cover: cover.operators)
    forbidden: dict[tuple[str, str], set[tuple[Cover, Cover]]] = defaultdict(set)
    for one, other in combinations(ordered, 2):
        checkpoint()
        if set(one.operators) & set(other.operators):
            continue
        if reach.cyclic([named[n] for n in one.operators], [named[n] for n in other.operators]):
            forbidden[one.operators[0], other.operators[0]].add((one, other))
    for (first, second), pairs in sorted(forbidden.items()):
        checkpoint()
        table: dict[Row, float] = {
            (state, other): 0.0
            for state, choice in by_operator[first]
            for other, partner in by_operator[second]
            if (choice.cover, partner.cover) not in pairs
        }
        variables = (str(Variable("operator", first)), str(Variable("operator", second)))
        yield Factor(f"no cycle of {first} and {second}", variables, table)


def not_together(offered: Offered, covers: Sequence[tuple[str, ...]]) -> Iterator[Factor]:
    """Yield factors that forbid to choose all of some covers, three or more in a circle; each is given by operators."""
    flags = []
    for operators in covers:
        flag = f"chosen {'+'.join(operators)}"
        flags.append(flag)
        table: dict[Row, float] = {
            (state, "yes" if choice.cover.operators == operators else "no"): 0.0
            for state, choice in offered.by_operator[operators[0]]
        }
        variables = (str(Variable("operator", operators[0])), flag)
        yield Factor(f"{flag} in a circle of {len(covers)}", variables, table)
    rows: list[Row] = [()]
    for _ in covers:
        rows = [(*row, answer) for row in rows for answer in ("yes", "no")]
    yield Factor(f"not all: {', '.join(flags)}", tuple(flags), {row: 0.0 for row in rows if "no" in row})
