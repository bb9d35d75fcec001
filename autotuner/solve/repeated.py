"""Many equal layers in a row: each is solved for few states of its ends, a path over the ends does the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.solve.conditioned import Codes, Conditioned
from autotuner.solve.limits import MEMORY_BYTES, Limits
from autotuner.solve.problem import Factor, Problem, Row, Solution, State
from autotuner.solve.tables import encode

# The best total of a layer by the states of its ends (those before, those after), and how many of these are unproven.
Weight = tuple[float, int]


def chained(layer: Problem, joints: Mapping[str, str], count: int) -> Problem:
    """Return the problem of equal layers in a row, written out: variable `x` of layer 3 is `3:x`.

    Args:
        joints: variable -> the next layer's variable that takes the same state (of those that both have).
        count: of layers.

    Raises:
        ProblemError: a joint names no variable of the layer, two joints share one, or there is no layer.
    """
    check_joints(layer, joints, count)
    factors = [
        replace(factor, name=f"{i}:{factor.name}", variables=tuple(f"{i}:{name}" for name in factor.variables))
        for i in range(count)
        for factor in layer.factors
    ]
    network = encode(layer)
    states = dict(zip(network.names, network.states, strict=True))
    for end, start in joints.items():
        same: dict[Row, float] = {(s, s): 0.0 for s in states[end] if s in states[start]}
        factors += [Factor(f"{i}:{end} is {i + 1}:{start}", (f"{i}:{end}", f"{i + 1}:{start}"), same)
                    for i in range(count - 1)]  # fmt: skip
    return Problem(tuple(factors))


def exact_repeated(
    layer: Problem, joints: Mapping[str, str], count: int, *, memory_limit_bytes: float = MEMORY_BYTES
) -> Solution:
    """Return the assignment of least total cost for `chained(layer, joints, count)`, without writing it out.

    A layer's cost is a function of the states of its ends. Each combination is first taken to cost the layer's optimum,
    the least that any can. A cheapest path is found over the ends, the combinations on it are solved, and again, until
    a path's costs are all true: no other path can be cheaper. The number of layers makes next to no difference.

    Raises:
        InfeasibleError: no assignment satisfies every factor.
        ProblemError: as `chained`.

    Cost:
        One solution per combination of the ends that looks cheap enough, often one in all; O(count * combinations).

    Source:
        Dellin and Srinivasa, A unifying formalism for shortest path problems with expensive edge evaluations (2016).
    """
    check_joints(layer, joints, count)
    network = encode(layer)
    place = {name: v for v, name in enumerate(network.names)}
    limits = Limits(memory_limit_bytes)
    ends = list(dict.fromkeys([*joints.values(), *joints]))
    ready = Conditioned(network, [place[name] for name in ends], limits)

    def of(row: Codes, names: Sequence[str]) -> tuple[State, ...]:
        return tuple(network.states[place[name]][row[ends.index(name)]] for name in names)

    free = Conditioned(network, (), limits).best(())
    if free is None:
        raise InfeasibleError("no assignment of the layer satisfies every factor")
    weights: dict[Codes, Weight] = dict.fromkeys(ready.rows(), (free.constant, 1))
    solved: dict[Codes, dict[str, State]] = {}
    first = free.codes()
    likely = [tuple(first[place[name]] for name in ends)]
    while True:
        for row in dict.fromkeys(likely):
            plan = free if row == likely[0] and not solved else ready.best(row)
            if plan is None:
                del weights[row]
                continue
            solved[row] = network.named(plan.codes())
            weights[row] = (layer.cost_us(solved[row]), 0)
        before = {row: of(row, list(joints.values())) for row in weights}
        after = {row: of(row, list(joints)) for row in weights}
        path = _cheapest_path(weights, before, after, count)
        likely = [row for row in path if row not in solved]
        if not likely:
            break
    states = {f"{i}:{name}": state for i, row in enumerate(path) for name, state in solved[row].items()}
    total = fsum(weights[row][0] for row in path)
    return Solution(states, total, total, "exact_repeated", limits.statistics() | {"solved": len(solved)})


def _cheapest_path(
    weights: Mapping[Codes, Weight], before: Mapping[Codes, Row], after: Mapping[Codes, Row], count: int
) -> list[Codes]:
    """Return a row per layer such that what is after one is before the next; of equal totals the one proven most."""
    best: dict[Codes, Weight] = dict(sorted(weights.items()))
    came: list[dict[Codes, Codes]] = []
    for _ in range(count - 1):
        cheapest: dict[Row, tuple[Weight, Codes]] = {}
        for row, weight in best.items():
            if after[row] not in cheapest or weight < cheapest[after[row]][0]:
                cheapest[after[row]] = (weight, row)
        came.append({row: cheapest[before[row]][1] for row in weights if before[row] in cheapest})
        best = {row: _sum(best[last], weights[row]) for row, last in sorted(came[-1].items())}
    if not best:
        raise InfeasibleError(f"no {count} layers fit each other: no state of an end is possible on both of its sides")
    path = [min(best, key=lambda row: (best[row], row))]
    for step in reversed(came):
        path.append(step[path[-1]])
    return path[::-1]


def _sum(one: Weight, other: Weight) -> Weight:
    return one[0] + other[0], one[1] + other[1]


def check_joints(layer: Problem, joints: Mapping[str, str], count: int) -> None:
    """Raise ProblemError where `chained` would not know what to do."""
    unknown = sorted({*joints, *joints.values()} - set(layer.variables))
    if unknown:
        raise ProblemError(f"the layer has no variables {', '.join(map(repr, unknown))}: a joint names two of its own")
    if len(set(joints.values())) != len(joints):
        raise ProblemError(f"two joints lead to one variable: {dict(joints)}")
    if count < 1:
        raise ProblemError(f"{count} layers make no chain: give 1 or more")
