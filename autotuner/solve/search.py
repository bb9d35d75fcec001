"""Depth-first assignment with arc consistency after every step: a good whole assignment, quickly; not the best."""

from collections.abc import Mapping, Sequence

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.consistency import Consistent


def first_assignment(
    left: Consistent, order: Sequence[int], preferred: Mapping[int, int], most_backtracks: int
) -> Consistent | None:
    """Return what is left when each variable of `order` has one state, or None after too many backtracks.

    Each variable takes its preferred state, or else the one whose cheapest rows cost least in sum; where that leaves
    nothing of some table, the next one; where no state is left, the variable before takes its next one.

    Args:
        left: arc consistent tables; every variable of theirs is in `order`.
        order: which variable is assigned first, second ...
        preferred: states to try first.
        most_backtracks: states that may turn out wrong before the search ends without an answer.

    Raises:
        InfeasibleError: every way was tried.
    """
    assigned = 0
    reason = ""
    before: list[tuple[Consistent, list[int]]] = []
    untried = _ranked(left, order[0], preferred) if order else []
    backtracks = 0
    while assigned < len(order):
        variable = order[assigned]
        if not untried:
            if not before:
                raise InfeasibleError(f"every assignment breaks some factor; of the last one tried, {reason}")
            left, untried = before.pop()
            assigned -= 1
            continue
        state = untried.pop()
        try:
            narrowed = left if len(left.states(variable)) == 1 else left.assigned(variable, state)
        except InfeasibleError as error:
            reason = str(error)
            backtracks += 1
            if backtracks > most_backtracks:
                return None
            continue
        assigned += 1
        before.append((left, untried))
        left = narrowed
        if assigned < len(order):
            untried = _ranked(left, order[assigned], preferred)
    return left


def _ranked(left: Consistent, variable: int, preferred: Mapping[int, int]) -> list[int]:
    """Return the variable's states, the one to try first at the end."""
    states = left.states(variable)
    if len(states) == 1:
        return [int(states[0])]
    costs = left.cheapest(variable)[states]
    ranked = [int(states[place]) for place in np.argsort(costs, kind="stable")[::-1]]
    if (first := preferred.get(variable)) in ranked:
        ranked.remove(first)
        ranked.append(first)
    return ranked
