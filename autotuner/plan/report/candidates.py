"""Candidates of an operator: all that were measured, by cover and forms, with what each costs in the whole plan."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from types import MappingProxyType
from typing import Any

from autotuner.errors import ConfigurationError, InfeasibleError, NotFoundError, ProblemError
from autotuner.ir.graph import Graph
from autotuner.ir.records import Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import near
from autotuner.solve import alternatives, exact, least_through, min_marginals
from autotuner.solve.baselines import alone_as_declared_us, is_declared
from autotuner.solve.problem import State
from autotuner.solve.problem.formulate import Formulation, formulate
from autotuner.solve.problem.offered import state_of
from autotuner.space import Choice, Space

SHOWN_MAX = 4000
"""Of candidates, the fastest of each group; the others are counted."""

MARGIN_US = 1e-6
NEAR = (0.003, 0.01, 0.02, 0.05, 0.1)
"""Shares of the optimum within which all plans are looked for, one after the other while the memory suffices."""

NEAR_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class MeasuredCandidate:
    """A candidate with its time, and what the best whole plan with it takes more than the best without a condition.

    Args:
        extra_us: that difference, None where it is not known; a lower bound unless `is_exact`.
    """

    kernel: str
    params: Mapping[str, Any]
    us: float
    low_us: float
    high_us: float
    extra_us: float | None
    is_exact: bool
    chosen: bool


@dataclass(frozen=True, slots=True)
class CandidateGroup:
    """Candidates of one cover in the same forms, the fastest first.

    Args:
        operators: that each of them computes.
        forms: (tensor, form) pairs of the cover's boundary.
        declared: whether each tensor is as declared.
        more: how many slower ones are left out.
        unknown: how many were never measured.
        failed: numbers by status.
    """

    operators: tuple[str, ...]
    forms: tuple[tuple[str, str], ...]
    declared: bool
    chosen: bool
    candidates: tuple[MeasuredCandidate, ...]
    more: int
    unknown: int
    failed: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class OperatorCandidates:
    """All candidates of an operator.

    Args:
        best_us: the fastest that computes just the operators of the chosen step; None where none has a time.
        default_us: the operator alone, as declared, by its fastest kernel; None where it has no time.
        groups: those of the chosen cover first, then by the best time in the whole, then by the candidate's own.
        note: why nothing is known of the whole, "" where it is.
    """

    operator: str
    chosen_us: float
    best_us: float | None
    default_us: float | None
    groups: tuple[CandidateGroup, ...]
    note: str


@dataclass(frozen=True, slots=True)
class WholePrices:
    """Prices of choices in the whole: what the best plan with each takes more than the best plan.

    Args:
        exact_us, least_us: by state; exact ones, and lower bounds of all.
    """

    exact_us: Mapping[State, float]
    least_us: Mapping[State, float]

    def of(self, state: State) -> tuple[float | None, bool]:
        """Return the price of a state and whether it is exact; None where no plan has it."""
        if state in self.exact_us:
            return self.exact_us[state], True
        least = self.least_us.get(state, inf)
        return (least, False) if isfinite(least) else (None, False)


class WholeProblem:
    """The problem of a space at what its calls were measured to take, solved, with the price of each choice.

    The totals of all plans within a few percent of the optimum are found at once, as far as the memory suffices. What
    is dearer has a lower bound.

    Args:
        known: measurements by call key.
        time_limit_s: for the optimum, and for the plans of one operator.
    """

    def __init__(self, space: Space, known: Mapping[str, Measurement], time_limit_s: float) -> None:
        costs = {key: found.median_us for key, found in known.items() if found.median_us is not None}
        self._limit_s = time_limit_s
        self._formulation: Formulation = formulate(space).priced(costs)
        problem = self._formulation.problem
        self._solution = exact(problem, time_limit_s=time_limit_s)
        self._totals_us = least_through(problem)
        self._complete_us = self._solution.total_us if self._solution.gap == 0 else 0.0
        self._near: Mapping[str, Mapping[State, float]] = {}
        for share in NEAR if self._solution.gap == 0 else ():
            most_us = self._solution.total_us * (1 + share)
            try:
                self._near = min_marginals(problem, most_us=most_us, memory_limit_bytes=NEAR_BYTES)
            except ProblemError:
                break
            self._complete_us = most_us

    def prices(self, operator: str) -> WholePrices:
        """Return the prices of the choices for an operator: exact near the optimum, and of the best other choice."""
        variables = self._formulation.variables
        text = next(each for each, one in variables.items() if one.role == "operator" and one.name == operator)
        total = self._solution.total_us
        found = {state: max(0.0, us - total) for state, us in self._near.get(text, {}).items() if us < inf}
        found[self._solution.states[text]] = 0.0
        if self._solution.gap == 0 and len(found) == 1:
            other = alternatives(self._formulation.problem, self._solution, (text,), time_limit_s=self._limit_s).best(
                text
            )
            if other is not None and other[1].gap == 0:
                found[other[0]] = max(0.0, other[1].total_us - total)
        least = {
            state: max(0.0, max(us, self._complete_us) - total) for state, us in self._totals_us.get(text, {}).items()
        }
        return WholePrices(MappingProxyType(found), MappingProxyType(least))


def declared_us(space: Space, known: Mapping[str, Measurement], time_limit_s: float) -> float | None:
    """Return the time of the best plan with every tensor as declared, fused kernels included; None without one."""
    costs = {key: found.median_us for key, found in known.items() if found.median_us is not None}
    choices = tuple(choice for choice in space.choices if is_declared(space.graph, choice))
    try:
        problem = formulate(replace(space, choices=choices, conversions=())).priced(costs).problem
        return exact(problem, time_limit_s=time_limit_s).total_us
    except (InfeasibleError, ProblemError):
        return None


def candidates_of(
    space: Space,
    known: Mapping[str, Measurement],
    configuration: Configuration,
    operator: str,
    prices: WholePrices | None,
    note: str = "",
) -> OperatorCandidates:
    """Return all candidates of an operator.

    Args:
        space: of the configuration's graph.
        known: measurements by call key, of the configuration's environment.
        prices: None where they are not known; `note` then says why.

    Raises:
        NotFoundError: no operator has this name; the message lists near ones.
        ConfigurationError: the space is of another graph.
    """
    if space.graph.key != configuration.graph_key:
        raise ConfigurationError(
            f"the configuration is of graph {configuration.graph_key[:12]}, the search space of another, "
            f"{space.graph.key[:12]}: build the space from the configuration's own graph"
        )
    names = [each.name for each in space.graph.operators]
    if operator not in names:
        raise NotFoundError(f"no operator {operator!r} in {configuration.model.reference}: {near(operator, names)}")
    step = next(each for each in configuration.steps if not each.again and operator in each.operators)
    chosen = _Chosen(step.measured_call(space.graph).key, step.operators, dict(step.inputs + step.outputs))
    grouped: dict[State, list[Choice]] = defaultdict(list)
    for choice in space.choices:
        if operator in choice.cover.operators:
            grouped[state_of(choice)].append(choice)
    groups = [_group(space.graph, state, choices, known, prices, chosen) for state, choices in grouped.items()]

    def order(group: CandidateGroup) -> tuple[bool, bool, float, float]:
        extra = min((each.extra_us for each in group.candidates if each.extra_us is not None), default=inf)
        own = group.candidates[0].us if group.candidates else inf
        return not group.chosen, set(group.operators) != set(step.operators), extra, own

    same = [group for group in groups if set(group.operators) == set(step.operators) and group.candidates]
    costs = {key: found.median_us for key, found in known.items() if found.median_us is not None}
    return OperatorCandidates(
        operator=operator,
        chosen_us=step.predicted_us,
        best_us=min((group.candidates[0].us for group in same), default=None),
        default_us=alone_as_declared_us(space, costs).get(operator),
        groups=tuple(sorted(groups, key=order)),
        note=note,
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The chosen step: key of its call, operators, and forms by tensor."""

    call_key: str
    operators: tuple[str, ...]
    forms: Mapping[str, str]

    def has(self, choice: Choice) -> bool:
        """Say whether a choice has its operators and forms; what the step names of a stack may differ."""
        same = set(choice.cover.operators) == set(self.operators)
        return same and all(self.forms.get(name, form) == form for name, form in choice.by_tensor.items())


def _group(
    graph: Graph,
    state: State,
    choices: Sequence[Choice],
    known: Mapping[str, Measurement],
    prices: WholePrices | None,
    chosen: _Chosen,
) -> CandidateGroup:
    by_call = {choice.call.key: choice for choice in choices}
    found = {key: known[key] for key in by_call if key in known}
    timed = sorted((one.median_us, key) for key, one in found.items() if one.median_us is not None)
    extra, is_exact = (None, False) if prices is None else prices.of(state)
    same = chosen.has(choices[0])
    candidates = []
    for us, key in timed[:SHOWN_MAX]:
        candidate, one = by_call[key].candidate, found[key]
        candidates.append(
            MeasuredCandidate(
                kernel=candidate.kernel, params=dict(candidate.params), us=us,
                low_us=us if one.low_us is None else one.low_us, high_us=us if one.high_us is None else one.high_us,
                # Whoever takes a slower one of the same forms pays the difference, and nothing else changes.
                extra_us=None if extra is None else _rounded(extra + us - timed[0][0]), is_exact=is_exact,
                chosen=same and key == chosen.call_key,
            )
        )  # fmt: skip
    return CandidateGroup(
        operators=choices[0].cover.operators,
        forms=tuple(choices[0].by_tensor.items()),
        declared=is_declared(graph, choices[0]),
        chosen=any(each.chosen for each in candidates),
        candidates=tuple(candidates),
        more=len(timed) - len(candidates),
        unknown=len(by_call) - len(found),
        failed=dict(Counter(one.status for one in found.values() if one.status != "ok")),
    )


def _rounded(us: float) -> float:
    return us if us > MARGIN_US else 0.0
