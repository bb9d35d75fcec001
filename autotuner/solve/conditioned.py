"""A problem made ready once, to be solved for one combination of some variables' states after the other."""

from collections.abc import Iterator, Sequence

from autotuner.errors import InfeasibleError
from autotuner.solve.consistency import Consistent, whole
from autotuner.solve.elimination import Elimination
from autotuner.solve.exact import cheapest
from autotuner.solve.limits import Limits
from autotuner.solve.reduction import merged, undominated
from autotuner.solve.splitting import split
from autotuner.solve.tables import Network

Codes = tuple[int, ...]


class Conditioned:
    """What is left of a problem without what is never needed, whatever states the kept variables have.

    Args:
        network: the problem.
        kept: variables that get their states later.
        limits: of each time that it is solved.

    Raises:
        InfeasibleError: no assignment satisfies every factor.
    """

    def __init__(self, network: Network, kept: Sequence[int], limits: Limits) -> None:
        self.kept = tuple(kept)
        self.limits = limits
        parts = split(whole(network), network.state_counts)
        self.state_counts = parts.state_counts
        self.left, self.choices = merged(undominated(parts.left, parts.state_counts, kept), parts.state_counts, kept)

    def rows(self) -> Iterator[Codes]:
        """Yield the combinations of states that arc consistency allows, in order."""
        yield from (row for row, _ in self._narrowed((), self.left))

    def totals(self) -> Iterator[tuple[Codes, float]]:
        """Yield each possible combination with its best total."""
        for row, left in self._narrowed((), self.left):
            try:
                yield row, cheapest(self.elimination(left, self.limits)).plan.constant
            except InfeasibleError:
                continue

    def best(self, row: Codes) -> Elimination | None:
        """Return the complete elimination of the least total with these states, None where there is none."""
        try:
            left = self.left
            for variable, state in zip(self.kept, row, strict=True):
                left = left.assigned(variable, state)
            return cheapest(self.elimination(left, self.limits)).plan
        except InfeasibleError:
            return None

    def elimination(self, left: Consistent, limits: Limits) -> Elimination:
        """Return an elimination of what is left of `left`."""
        return Elimination(left.names, self.state_counts, left.tables.values(), limits, self.choices)

    def _narrowed(self, row: Codes, left: Consistent) -> Iterator[tuple[Codes, Consistent]]:
        if len(row) == len(self.kept):
            yield row, left
            return
        variable = self.kept[len(row)]
        for state in map(int, left.states(variable)):
            try:
                narrowed = left.assigned(variable, state)
            except InfeasibleError:
                continue
            yield from self._narrowed((*row, state), narrowed)
