"""A problem made ready once, to be solved for one combination of some variables' states after the other."""

from collections.abc import Sequence

from autotuner.solve.consistency import Consistent, whole
from autotuner.solve.elimination import Elimination
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

    def elimination(self, left: Consistent, limits: Limits) -> Elimination:
        """Return an elimination of what is left of `left`."""
        return Elimination(left.names, self.state_counts, left.tables.values(), limits, self.choices)
