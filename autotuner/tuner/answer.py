"""A space with its measurements -> the answer: solved, in running order, with its certificate."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata

from autotuner.analysis import fused_bytes
from autotuner.configuration import Certificate, Configuration, Fusion, Memory, Step, tensor_of
from autotuner.errors import InfeasibleError
from autotuner.graph import Graph
from autotuner.models import Model
from autotuner.placement import make_plan, memory
from autotuner.problem import Solution
from autotuner.problem.formulate import Formulation, formulate
from autotuner.problem.ordering import CircleError, order_steps
from autotuner.records import Environment, Measurement
from autotuner.solvers import SOLVERS
from autotuner.space import Choice, Space
from autotuner.tuner.steps import steps_of


def build_configuration(
    model: Model,
    space: Space,
    known: Mapping[str, Measurement],
    environment: Environment,
    counts: Mapping[str, int],
    *,
    solver: str = "exact",
    noise_floor: float | None = None,
) -> Configuration:
    """Solve a space with its measurements, and write the answer down.

    Raises:
        InfeasibleError: some operator has no candidate that works; the message says what became of them.
    """
    problem, solution = solved(space, known, solver)
    costs = problem.costs_us
    steps = steps_of(problem, solution, known)
    bound = bound_us(space, known)
    total = sum(step.predicted_us for step in steps)
    unfused = fused_bytes(space.graph, [(o.inputs, o.outputs) for o in space.graph.operators])
    chosen = fused_bytes(space.graph, [(_tensors(step.inputs), _tensors(step.outputs)) for step in steps])
    found = Configuration(
        model=model,
        graph_key=space.graph.key,
        environment=environment.to_json(),
        environment_key=environment.key,
        steps=steps,
        certificate=Certificate(
            solver=solver,
            predicted_us=total,
            lower_bound_us=bound,
            proven_gap=max(0.0, total / bound - 1) if bound > 0 else None,
            low_us=sum(step.low_us for step in steps),
            high_us=sum(step.high_us for step in steps),
            baseline_us=_baseline_us(problem),
            default_us=default_us(space, costs),
            noise_floor=noise_floor,
        ),
        fusions=tuple(_fusions(space, costs, steps)),
        counts=dict(counts),
        bytes_moved={"unfused": unfused, "chosen": chosen},
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"autotuner": metadata.version("autotuner")},
    )
    return replace(found, memory=_memory(found, known))


def _memory(configuration: Configuration, known: Mapping[str, Measurement]) -> Memory:
    """Return what a step of a configuration needs, with the kernels' workspaces as they were measured."""
    needs = memory(make_plan(configuration), {key: found.workspace_bytes for key, found in known.items()})
    return Memory(None, needs.held_bytes, needs.peak_bytes)


def solved(space: Space, known: Mapping[str, Measurement], solver: str) -> tuple[Formulation, Solution]:
    """Return a space's problem with its measurements, and a solution.

    Raises:
        InfeasibleError: some operator has no candidate that works; the message says what became of them.
    """
    _must_be_computable(space, known)
    problem = formulate(space, {key: m.median_us for key, m in known.items() if m.median_us is not None})
    while True:
        solution = SOLVERS[solver](problem.problem)
        try:
            order_steps(space.graph, problem.chosen(solution))
        except CircleError as error:
            problem = problem.without(error.covers)
        else:
            return problem, solution


def _tensors(operands: Iterable[tuple[str, str]]) -> list[str]:
    return [tensor_of(name) for name, _ in operands]


def _must_be_computable(space: Space, known: Mapping[str, Measurement]) -> None:
    """Raise with what became of an operator's candidates where none of them works."""
    statuses: dict[str, Counter[str]] = {operator.name: Counter() for operator in space.graph.operators}
    for choice in space.choices:
        status = known[choice.call.key].status if choice.call.key in known else "not measured"
        for name in choice.cover.operators:
            statuses[name][status] += 1
    for name, counts in statuses.items():
        if not counts["ok"]:
            found = ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none exists"
            raise InfeasibleError(
                f"operator {name!r} has no candidate that works ({found}): `autotuner tune` measures what is missing, "
                "`autotuner tune --retry` what has failed"
            )


def _best_by_cover(space: Space, costs_us: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    best: dict[tuple[str, ...], float] = {}
    for choice in space.choices:
        cost = costs_us.get(choice.call.key)
        if cost is not None:
            names = choice.cover.operators
            best[names] = min(cost, best.get(names, cost))
    return best


def bound_us(space: Space, known: Mapping[str, Measurement]) -> float:
    """Return the sum of each operator's best share of any cover, conversions free: no plan costs less.

    What is not measured yet may turn out to cost nothing.
    """
    costs_us = dict.fromkeys(space.calls.keys() - known.keys(), 0.0)
    costs_us |= {key: m.median_us for key, m in known.items() if m.median_us is not None}
    shares: dict[str, float] = {}
    for names, cost in _best_by_cover(space, costs_us).items():
        for name in names:
            share = cost / len(names)
            shares[name] = min(share, shares.get(name, share))
    return sum(shares.values())


def _fusions(space: Space, costs_us: Mapping[str, float], steps: Sequence[Step]) -> Iterator[Fusion]:
    """Yield every cover of several operators with what its best candidate costs and what was chosen instead."""
    shares = {name: step.predicted_us / len(step.operators) for step in steps for name in step.operators}
    chosen = {frozenset(step.operators) for step in steps}
    best: dict[tuple[str, ...], tuple[float, str]] = {}
    for choice in space.choices:
        names = choice.cover.operators
        if len(names) > 1:
            found = (costs_us.get(choice.call.key, float("inf")), choice.candidate.kernel)
            best[names] = min(found, best.get(names, found))
    for names, (cost, kernel) in best.items():
        works = cost < float("inf")
        instead = sum(shares[name] for name in names)
        yield Fusion(names, kernel if works else "", cost if works else None, instead, frozenset(names) in chosen)


def _baseline_us(problem: Formulation) -> float | None:
    """Return what the paper's strategy reaches on the same costs, or None where it finds no plan."""
    try:
        return SOLVERS["shortest_path"](problem.problem).total_us
    except InfeasibleError:
        return None


def default_us(space: Space, costs_us: Mapping[str, float]) -> float | None:
    """Return the least cost with every operator alone and every tensor as declared, or None where that is not known."""
    alone = alone_as_declared_us(space, costs_us)
    names = [operator.name for operator in space.graph.operators]
    return sum(alone[name] for name in names) if alone.keys() >= set(names) else None


def alone_as_declared_us(space: Space, costs_us: Mapping[str, float]) -> dict[str, float]:
    """Return the least cost of each operator alone with its tensors as declared; those without a time are left out."""
    found: dict[str, float] = {}
    for choice in space.choices:
        cost = costs_us.get(choice.call.key)
        if cost is not None and len(choice.cover.operators) == 1 and is_declared(space.graph, choice):
            (name,) = choice.cover.operators
            found[name] = min(cost, found.get(name, cost))
    return found


def is_declared(graph: Graph, choice: Choice) -> bool:
    """Say whether every tensor of a choice lies as the graph declares it."""
    return all(text.split(":")[0] == graph.tensors[name].axes for name, text in choice.by_tensor.items())


def kernels_by_cover(configuration: Configuration) -> Iterable[tuple[str, Step]]:
    """Yield (label, step) for people: the operators' names joined, or the conversion's tensor and forms."""
    for step in configuration.steps:
        if step.is_conversion:
            (name, source), (_, target) = step.inputs[0], step.outputs[0]
            yield f"convert {name} {source} > {target}", step
        else:
            yield " + ".join(step.operators), step
