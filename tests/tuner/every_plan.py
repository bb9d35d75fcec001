"""Every plan of a small space, by exhaustive search: the oracle of the search within a budget."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import yaml

from autotuner.errors import ConfigurationError, InfeasibleError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models.model import ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.records import Measurement
from autotuner.solve.problem import Problem, Solution, State
from autotuner.solve.problem.formulate import Formulation, formulate
from autotuner.solve.problem.ordering import CircleError
from autotuner.space import Choice, Space, build_space
from autotuner.space.fusion import Cover
from autotuner.tuner.solving import step_memory
from autotuner.tuner.steps import steps_of
from tests.made_up import CPU
from tests.solve.problem.test_formulate import costs_of

WORKSPACES = (0, 0, 0, 256, 1024)


@dataclass(frozen=True)
class Planned:
    """A plan: what it takes, and its simulated peak."""

    formulation: Formulation
    solution: Solution
    peak_bytes: int


def small_space(text: str, extents: Mapping[str, int], seed: int) -> Space:
    """Return a model's space with one choice of each cover, drawn."""
    model = ModelFile("small", parse_definition(yaml.safe_load(text), "small")).instantiate(extents=dict(extents))
    space = build_space(training_graph(model.graph()), CPU, saving=True)
    kept: dict[Cover, Choice] = {}
    for choice in random.Random(seed).sample(space.choices, len(space.choices)):
        kept.setdefault(choice.cover, choice)
    return replace(space, choices=tuple(choice for choice in space.choices if choice is kept[choice.cover]))


def made_up(space: Space, seed: int) -> dict[str, Measurement]:
    """Return times, and workspaces of some kernels, large beside the tensors."""
    draw = random.Random(seed)
    costs = costs_of(space, seed)
    return {key: Measurement("ok", median_us=us, workspace_bytes=draw.choice(WORKSPACES)) for key, us in costs.items()}


def every_plan(space: Space, known: Mapping[str, Measurement]) -> Iterator[Planned]:
    """Yield every plan that can be run; plans of slower kernels with smaller workspaces are among them."""
    unpriced = formulate(space, saving=True)
    for size in sorted({found.workspace_bytes for found in known.values()}, reverse=True):
        costs = {k: found.median_us for k, found in known.items() if found.workspace_bytes <= size}
        try:
            formulation = unpriced.priced({key: us for key, us in costs.items() if us is not None})
        except InfeasibleError:
            return
        for states in assignments(formulation.problem):
            total_us = formulation.problem.cost_us(states)
            solution = Solution(states, total_us, total_us, "every plan")
            try:
                steps = steps_of(formulation, solution, known)
                yield Planned(formulation, solution, step_memory(space, steps, known).peak_bytes)
            except (CircleError, ConfigurationError):  # covers depend on each other, or a conversion is made twice
                continue


def assignments(problem: Problem) -> Iterator[dict[str, State]]:
    """Yield every assignment that no factor forbids, variable by variable along factors."""
    order: list[str] = []
    while len(order) < len(problem.variables):

        def linked(name: str) -> int:
            return sum(name in f.variables and not set(order).isdisjoint(f.variables) for f in problem.factors)

        order.append(max((name for name in problem.variables if name not in order), key=linked))
    of = {name: [factor for factor in problem.factors if name in factor.variables] for name in order}
    states = {
        name: set[State].intersection(
            *({row[factor.variables.index(name)] for row in factor.table} for factor in of[name])
        )
        for name in order
    }

    def extended(chosen: dict[str, State]) -> Iterator[dict[str, State]]:
        if len(chosen) == len(order):
            yield dict(chosen)
            return
        name = order[len(chosen)]
        left = states[name]
        for factor in of[name]:
            known = [(place, chosen[each]) for place, each in enumerate(factor.variables) if each in chosen]
            own = factor.variables.index(name)
            left = left & {row[own] for row in factor.table if all(row[place] == state for place, state in known)}
        for state in sorted(left):
            yield from extended({**chosen, name: state})

    return extended({})
