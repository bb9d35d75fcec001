"""Limits of memory and time for a solver, and a count of what it used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from autotuner.checkpoint import checkpoint
from autotuner.errors import ProblemError

MEMORY_BYTES = 512 << 20


class TooLargeError(ProblemError):
    """A table that would need more memory than there may be; raised before it is made."""


@dataclass
class SolverLimits:
    """Limits of one call of a solver, and a count of what it has used so far.

    Args:
        memory_bytes: the most that one table may need, with what is needed to make it.
        ends_at: by the clock of `time.monotonic`; None for no limit.
        held_bytes: what tables that stay need of it.
        rows: of the largest table so far.
        used_bytes: of the table that needed most so far.
        estimated_bytes: of the largest table that a solution without bounds would make, at most.
        cases: parts into which the assignments were split so far.
    """

    memory_bytes: float = MEMORY_BYTES
    ends_at: float | None = None
    held_bytes: int = 0
    rows: int = 0
    used_bytes: int = 0
    estimated_bytes: float = 0.0
    cases: int = 0

    @property
    def over(self) -> bool:
        """True once the time is over."""
        checkpoint()
        return self.ends_at is not None and monotonic() >= self.ends_at

    def admit(self, rows: int, state_counts: Sequence[int], doing: Callable[[], str]) -> None:
        """Note a table that is about to be made.

        Args:
            rows: how many it will have.
            state_counts: of its variables.
            doing: says what makes it, for the message.

        Raises:
            TooLargeError: it would need too much memory.
        """
        needed = needed_bytes(rows, len(state_counts))
        if needed + self.held_bytes > self.memory_bytes:
            states = ", ".join(map(str, state_counts))
            held = f", beside {self.held_bytes / 2**20:,.1f} MiB that are held" if self.held_bytes else ""
            raise TooLargeError(
                f"{doing()} makes {rows:,} rows over {len(state_counts)} variables of {states} states,"
                f" {needed / 2**20:,.1f} MiB{held}; at most {self.memory_bytes / 2**20:,.1f} MiB may be used:"
                " give fewer states per variable, fewer variables per factor, or more memory"
            )
        self.rows = max(self.rows, rows)
        self.used_bytes = max(self.used_bytes, int(needed))

    def statistics(self) -> dict[str, float]:
        """Return what was used, by name."""
        return {
            "largest_rows": self.rows,
            "largest_bytes": self.used_bytes,
            "estimated_bytes": self.estimated_bytes,
            "cases": self.cases,
        }

    def hold(self, table_bytes: int) -> None:
        """Note a table that stays: later ones must fit beside it."""
        self.held_bytes += table_bytes


def needed_bytes(rows: float, variables: int) -> float:
    """Return what a table needs while it is made: per row a code per variable, a cost, and three indices."""
    return rows * (4 * variables + 8 + 24)
