"""Cases of measuring lazily: recorded encoder layers, parts of them, and made-up problems."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autotuner.errors import InfeasibleError
from autotuner.measure.roofline import Work, work_of
from autotuner.space import Space
from autotuner.tuner.bounds import CheapestPlan
from autotuner.tuner.learned import Costs, Traits, traits_of
from autotuner.tuner.races import openers
from autotuner.tuner.relaxation import RelaxedProblem
from scripts.bench.plain_problem import PlainProblem
from scripts.bench.synthetic import synthetic_problem
from scripts.recorded import Recording

ABOVE = 1.0
"""Made-up calls take this much more than their optimistic cost, on average, as a share of it: a median of 1.7 times."""


@dataclass(frozen=True)
class Case:
    """Something to measure: what its calls cost, what they cost at best as some are measured, which come first.

    Args:
        first_of: returns the calls that are measured first, of those that there are.
    """

    title: str
    is_recorded: bool
    solve: Callable[[Costs], CheapestPlan]
    true_us: Costs
    optimistic_us: Callable[[Costs], Costs]
    traits: Mapping[str, Traits]
    first_of: Callable[[Costs], tuple[str, ...]]

    @property
    def first(self) -> tuple[str, ...]:
        return self.first_of(self.true_us)

    def without(self, share: float, seed: int) -> "Case":
        """Return the case without a share of its calls, drawn at random: one that still has a plan.

        Raises:
            InfeasibleError: none was found that has one.
        """
        draw = random.Random(seed)
        for _ in range(100):
            left = {key: us for key, us in self.true_us.items() if draw.random() >= share}
            try:
                self.solve(left)
            except InfeasibleError:
                continue
            return replace(self, true_us=left)
        raise InfeasibleError(f"{self.title}: without {share:.0%} of the calls there was no plan, in 100 draws")

    def disturbed(self, share: float, seed: int) -> "Case":
        """Return the case with each call's time off by up to a share, drawn at random, as other timings might be."""
        draw = random.Random(seed)
        return replace(self, true_us={key: us * (1 + draw.uniform(-share, share)) for key, us in self.true_us.items()})


def replayed(recording: Recording) -> Case:
    space, ceilings = recording.space(), recording.ceilings
    works = {key: work_of(call) for key, call in space.calls.items()}

    def optimistic(measured: Costs) -> Costs:
        lowered = ceilings.lowered((works[key], us) for key, us in measured.items())
        return {key: lowered.optimistic_us(work) for key, work in works.items()}

    def first(true_us: Costs) -> tuple[str, ...]:
        return tuple(race[0].key for race in openers(space, set(true_us)))

    true_us, solve = recorded_us(recording, space), RelaxedProblem(space).solve
    return Case(recording.title, True, solve, true_us, optimistic, traits_of(space.calls), first)


def recorded_us(recording: Recording, space: Space) -> Costs:
    return {key: recording.costs_us[key] for key in space.calls if key in recording.costs_us}


def made_up(operators: int, forms: int, seed: int) -> Case:
    problem, draw = PlainProblem(synthetic_problem(operators, forms, seed)), random.Random(seed)
    optimistic = {key: us / (1 + draw.expovariate(1 / ABOVE)) for key, us in problem.calls.items()}
    traits = {key: Traits(key.split(":")[0], Work(0.0, {})) for key in problem.calls}

    def first(true_us: Costs) -> tuple[str, ...]:
        found: dict[str, str] = {}
        for key in true_us:
            found.setdefault(key.split(":")[0], key)
        return tuple(found.values())

    title = f"made up, {operators} operators, {forms} forms, seed {seed}"
    return Case(title, False, problem.solve, problem.calls, lambda _: optimistic, traits, first)
