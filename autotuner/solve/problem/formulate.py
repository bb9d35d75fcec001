"""A space and the costs of its calls -> a problem, and a problem's solution -> the chosen covers and forms.

Variables: one per operator ("which cover computes me, with which forms") and one per tensor ("in which form was I made,
and into which was I converted"). What backward reads of forward is a tensor of its own: "in which form am I held, or am
I made again". A choice that keeps a tensor inside gives it a state of its own, so that producer and consumer agree on
the cover; siblings that share no such tensor agree through a token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from autotuner.solve.problem.factors import Factor, Problem, Solution
from autotuner.solve.problem.links import NOT_REPEATED, links, operator_costs, repeated_links
from autotuner.solve.problem.offered import Offered, Place, collected
from autotuner.solve.problem.ordering import CircleError, forward_chain, order_steps
from autotuner.solve.problem.rules import acyclic, not_together, tokens
from autotuner.solve.problem.size import check_rows
from autotuner.solve.problem.states import TensorState, made_and_read, saved
from autotuner.space import Choice, Conversion, Space

__all__ = ["Formulation", "TensorState", "formulate", "order_steps", "solve_in_order"]


@dataclass(frozen=True)
class Formulation:
    """A problem together with what its states mean.

    `choices` maps an operator's state to the fastest measured choice with these forms; `conversions` maps
    (tensor, source, target) to the fastest measured conversion. `base_bytes` is what every plan needs in memory beside
    what the problem says: what the caller is handed.
    """

    problem: Problem
    offered: Offered
    base_bytes: int

    @property
    def choices(self) -> Mapping[str, Choice]:
        return self.offered.choices

    @property
    def conversions(self) -> Mapping[Place, Conversion]:
        return self.offered.conversions

    @property
    def costs_us(self) -> Mapping[str, float]:
        return self.offered.costs_us

    def chosen(self, solution: Solution) -> tuple[Choice, ...]:
        """Return the chosen cover of every operator, each cover once, in graph order of its first operator."""
        states = [state for name, state in solution.states.items() if name.startswith("operator ")]
        return tuple(self.choices[state] for state in dict.fromkeys(states))

    def repeated(self, solution: Solution) -> Mapping[str, Choice]:
        """Return the forward operators that backward repeats, each with its choice."""
        return {
            name.removeprefix("repeated "): self.choices[state]
            for name, state in solution.states.items()
            if name.startswith("repeated ") and state != NOT_REPEATED
        }

    def lies(self, solution: Solution) -> Mapping[str, TensorState]:
        """Return how each tensor is made and what it is converted into, apart from what backward does with it."""
        return _told(solution, "tensor ")

    def held(self, solution: Solution) -> Mapping[str, TensorState]:
        """Return what backward has of each tensor of forward that it reads, and what it converts that into."""
        return _told(solution, "saved ")

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
        return Formulation(Problem((*self.problem.factors, *more), self.problem.chain), self.offered, self.base_bytes)


def _told(solution: Solution, prefix: str) -> dict[str, TensorState]:
    return {
        name.removeprefix(prefix): TensorState.parse(state)
        for name, state in solution.states.items()
        if name.startswith(prefix)
    }


def formulate(
    space: Space,
    costs_us: Mapping[str, float],
    *,
    saving: bool = False,
) -> Formulation:
    """Build the problem of a space from the costs of its calls, in microseconds; calls without a cost are left out.

    Args:
        saving: let backward repeat forward operators, to save memory.

    Raises:
        InfeasibleError: some operator has no choice with a cost; the message names it.
        ProblemError: it is too large.
    """
    graph = space.graph
    offered = collected(space, costs_us, saving=saving)
    tables = {table.variable.removeprefix("tensor "): table for table in made_and_read(offered)}
    held = dict(saved(offered, tables))
    # Tensors come before operators: so the paper's strategy, which goes in this order, lets operators follow forms.
    costs = (
        Factor(f"cost of {table.variable}", (table.variable,), table.rows, {(s,): n for s, n in needs.items()})
        for table in (*tables.values(), *held.values())
        for needs in [table.held_bytes]
        if table.costs_us
    )
    factors = []
    rows = 0
    for factor in chain(
        costs,
        operator_costs(offered),
        links(offered, tables, held),
        repeated_links(offered, tables, held),
        tokens(offered),
        acyclic(offered),
    ):
        rows += len(factor.table)
        check_rows(rows)
        factors.append(factor)
    names = {name for factor in factors for name in factor.variables}
    ahead = tuple(name for name in forward_chain(graph) if name in names)
    base_bytes = sum(offered.bytes_of(name, space.given[name][0]) for name in graph.outputs)
    return Formulation(Problem(tuple(factors), ahead), offered, base_bytes)


def solve_in_order(formulation: Formulation, solve: Callable[[Formulation], Solution]) -> tuple[Formulation, Solution]:
    """Solve, and again without the covers that were chosen, where these depend on each other in a circle."""
    while True:
        solution = solve(formulation)
        try:
            order_steps(formulation.offered.graph, formulation.chosen(solution))
        except CircleError as error:
            formulation = formulation.without(error.covers)
        else:
            return formulation, solution
