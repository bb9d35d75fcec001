"""Whether a CUDA device ran at its full clock, and alone. Decisions only: readings are fed in."""

from collections.abc import Collection

LOW_SHARE = 0.75


class SmClock:
    """The clock of the multiprocessors, as it was seen while samples were taken."""

    def __init__(self) -> None:
        self.most_mhz = 0

    def is_low(self, mhz: int | None) -> bool:
        """Say whether a reading is below 75 % of the highest so far. No reading says nothing."""
        if mhz is None:
            return False
        self.most_mhz = max(self.most_mhz, mhz)
        return mhz < LOW_SHARE * self.most_mhz


def foreign(processes: Collection[int] | None, own: Collection[int], computing: int = 1) -> int:
    """Return how many processes on a device are not one's own.

    Args:
        processes: numbers of all that compute there; None where that is not known.
        own: this process and its parent. In a container the driver may number processes as the host does: where fewer
            of these are in the list than compute, that many entries are taken for them.
        computing: how many of one's own compute there.
    """
    if not processes:
        return 0
    known = sum(number in own for number in processes)
    return max(0, len(processes) - max(known, computing))
