"""A space and the costs of its calls -> a problem, and a problem's solution -> the chosen covers and forms.

Variables: one per operator ("which cover computes me, with which forms") and one per tensor ("in which form was I made,
and into which was I converted"). What backward reads of forward is a tensor of its own: "in which form am I held, or am
I made again". A choice that keeps a tensor inside gives it a state of its own, so that producer and consumer agree on
the cover; siblings that share no such tensor agree through a token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from autotuner.checkpoint import checkpoint
from autotuner.errors import InfeasibleError
from autotuner.solve.problem.factors import Factor, Problem, Solution, State
from autotuner.solve.problem.links import NOT_REPEATED, check_rows, links, operator_costs, repeated_links
from autotuner.solve.problem.offered import Offered, Place, state_of
from autotuner.solve.problem.ordering import CircleError, forward_chain, order_steps
from autotuner.solve.problem.rules import acyclic, not_together, tokens
from autotuner.solve.problem.states import Role, StateTable, TensorState, Variable, made_and_read, saved
from autotuner.space import Choice, Conversion, Space

__all__ = ["Formulation", "SpaceProblem", "Structure", "formulate", "order_steps", "solve_in_order"]


class Structure:
    """All of a problem but costs: the states of what is offered, and which of them go together."""

    def __init__(self, offered: Offered) -> None:
        self.offered = offered
        made = {table.variable.name: table for table in made_and_read(offered)}
        held = {table.variable.name: table for table in saved(offered, made)}
        self.tables: Sequence[StateTable] = [table for table in (*made.values(), *held.values()) if table.lies]
        self._allowed = _limited(
            chain(
                links(offered, made, held),
                repeated_links(offered, made, held),
                tokens(offered),
                acyclic(offered),
            )
        )
        self._rows = sum(len(factor.table) for factor in self._allowed)

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """By their texts: the variables of operators and tensors; those left out only make others agree."""
        found = (
            *(Variable("operator", operator.name) for operator in self.offered.graph.operators),
            *(Variable("repeated", name) for name in self.offered.repeated),
            *(table.variable for table in self.tables),
        )
        return {str(variable): variable for variable in found}

    @cached_property
    def lies(self) -> Mapping[str, Mapping[State, TensorState]]:
        """By the text of a tensor's variable: its states."""
        return {str(table.variable): table.lies for table in self.tables}

    @cached_property
    def base_bytes(self) -> int:
        """Memory that every plan needs beside what the problem says: what the caller is handed."""
        given, graph = self.offered.space.given, self.offered.graph
        return sum(self.offered.bytes_of(name, given[name][0]) for name in graph.outputs)

    def priced(self, choices_us: Mapping[State, float], conversions_us: Mapping[Place, float]) -> Problem:
        """Return the problem at some costs; a state that needs what has none is forbidden.

        Raises:
            ProblemError: it is too large.
        """
        # Tensors come before operators: so the paper's strategy, which goes in this order, lets operators follow forms.
        costs = chain((table.cost(conversions_us) for table in self.tables), operator_costs(self.offered, choices_us))
        factors = (*_limited(costs, self._rows), *self._allowed)
        names = {name for factor in factors for name in factor.variables}
        return Problem(factors, tuple(name for name in forward_chain(self.offered.graph) if name in names))


def _limited(factors: Iterable[Factor], rows: int = 0) -> tuple[Factor, ...]:
    """Return factors; they have no more rows, beside so many, than memory takes.

    Raises:
        ProblemError: they have.
    """
    found = []
    for factor in factors:
        rows += len(factor.table)
        check_rows(rows)
        found.append(factor)
    return tuple(found)


@dataclass(frozen=True)
class Formulation:
    """A problem together with what its states mean.

    Args:
        choices: an operator's state -> the fastest measured choice with these forms.
        conversions: (tensor, source, target) -> the fastest measured conversion.
        costs_us: of calls, by key.
    """

    problem: Problem
    structure: Structure
    choices: Mapping[State, Choice]
    conversions: Mapping[Place, Conversion]
    costs_us: Mapping[str, float]

    @property
    def offered(self) -> Offered:
        return self.structure.offered

    @property
    def base_bytes(self) -> int:
        return self.structure.base_bytes

    @property
    def variables(self) -> Mapping[str, Variable]:
        return self.structure.variables

    def chosen(self, solution: Solution) -> tuple[Choice, ...]:
        """Return the chosen cover of every operator, each cover once, in graph order of its first operator."""
        return tuple(self.choices[state] for state in dict.fromkeys(self._states(solution, "operator").values()))

    def in_order(self, solution: Solution) -> tuple[Choice, ...]:
        """Return the chosen covers in an order in which they can run.

        Raises:
            CircleError: as `order_steps`.
        """
        return order_steps(self.offered.graph, self.chosen(solution), self.repeated(solution))

    def repeated(self, solution: Solution) -> Mapping[str, Choice]:
        """Return the forward operators that backward repeats, each with its choice."""
        states = self._states(solution, "repeated")
        return {name: self.choices[state] for name, state in states.items() if state != NOT_REPEATED}

    def lies(self, solution: Solution) -> Mapping[str, TensorState]:
        """Return how each tensor is made and what it is converted into, apart from what backward does with it."""
        return self._told(solution, "tensor")

    def held(self, solution: Solution) -> Mapping[str, TensorState]:
        """Return what backward has of each tensor of forward that it reads, and what it converts that into."""
        return self._told(solution, "saved")

    def _told(self, solution: Solution, role: Role) -> dict[str, TensorState]:
        states = self._states(solution, role)
        return {name: self.structure.lies[str(Variable(role, name))][state] for name, state in states.items()}

    def _states(self, solution: Solution, role: Role) -> dict[str, State]:
        """Return the states of the variables of a role, by the name of the operator or tensor."""
        named = ((self.variables.get(text), state) for text, state in solution.states.items())
        return {variable.name: state for variable, state in named if variable is not None and variable.role == role}

    def converted(self, solution: Solution) -> tuple[Conversion, ...]:
        """Return the conversions that a solution performs, those of backward last."""
        return tuple(
            self.conversions[name, lies.form, target]
            for told in (self.lies(solution), self.held(solution))
            for name, lies in told.items()
            for target in lies.targets
        )

    def calls(self, solution: Solution) -> tuple[str, ...]:
        """Return the keys of the calls that a solution executes."""
        choices = (*self.chosen(solution), *self.repeated(solution).values())
        return (*(c.call.key for c in choices), *(c.call.key for c in self.converted(solution)))

    def without(self, covers: Sequence[tuple[str, ...]]) -> "Formulation":
        """Return the same without plans that choose all of these covers, each given by its operators."""
        known = {factor.name for factor in self.problem.factors}
        more = [factor for factor in not_together(self.offered, covers) if factor.name not in known]
        return replace(self, problem=Problem((*self.problem.factors, *more), self.problem.chain))


class SpaceProblem:
    """The problem of a space before its calls have costs. Costs of the same calls share one structure.

    Args:
        saving: whether backward may repeat forward operators, to save memory.

    Attributes:
        solved: the problem that was solved last, and its proven solution, for who solves it again; None before.
    """

    def __init__(self, space: Space, *, saving: bool) -> None:
        self.space = space
        self.solved: tuple[Formulation, Solution] | None = None
        self._saving = saving
        self._stated = [(state_of(choice), choice) for choice in space.choices]
        self._built: Structure | None = None

    def priced(self, costs_us: Mapping[str, float]) -> Formulation:
        """Return the problem at costs of calls, in microseconds; calls without a cost are left out.

        Raises:
            InfeasibleError: some operator has no choice with a cost; the message names it.
            ProblemError: it is too large.
        """
        choices: dict[State, Choice] = {}
        for state, choice in self._stated:
            checkpoint()
            cost, best = costs_us.get(choice.call.key), choices.get(state)
            if cost is not None and (
                best is None or (cost, choice.candidate) < (costs_us[best.call.key], best.candidate)
            ):
                choices[state] = choice
        conversions: dict[Place, Conversion] = {}
        for conversion in self.space.conversions:
            checkpoint()
            cost = costs_us.get(conversion.call.key)
            place = (conversion.tensor, conversion.source, conversion.target)
            if cost is not None and (place not in conversions or cost < costs_us[conversions[place].call.key]):
                conversions[place] = conversion
        structure = self._structure(Offered(self.space, choices, conversions, self._saving))
        problem = structure.priced(
            {state: costs_us[choice.call.key] for state, choice in choices.items()},
            {place: costs_us[conversion.call.key] for place, conversion in conversions.items()},
        )
        return Formulation(problem, structure, choices, conversions, costs_us)

    def least_of(self, by_key: Mapping[str, int]) -> dict[State, int]:
        """Return for each state of operators the least of its choices' numbers, which are given by call key."""
        found: dict[State, int] = {}
        for state, choice in self._stated:
            number = by_key.get(choice.call.key)
            if number is not None:
                found[state] = min(number, found.get(state, number))
        return found

    def _structure(self, offered: Offered) -> Structure:
        """Return the structure of what is offered: the one that was built last, where only the fastest calls differ."""
        if self._built is None or not self._built.offered.is_alike(offered):
            missing = [name for name, stated in offered.by_operator.items() if not stated]
            if missing:
                raise InfeasibleError(f"no measured candidate computes operator {missing[0]!r}")
            self._built = Structure(offered)
        return self._built


def formulate(space: Space, *, saving: bool = False) -> SpaceProblem:
    """Return the problem of a space, to be priced with the costs of its calls.

    Args:
        saving: let backward repeat forward operators, to save memory.
    """
    return SpaceProblem(space, saving=saving)


def solve_in_order(formulation: Formulation, solve: Callable[[Formulation], Solution]) -> tuple[Formulation, Solution]:
    """Solve, and again without the covers that were chosen, where these depend on each other in a circle."""
    while True:
        try:
            solution = solve(formulation)
            formulation.in_order(solution)
        except CircleError as error:
            formulation = formulation.without(error.covers)
        else:
            return formulation, solution
