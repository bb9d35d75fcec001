"""Calls in hand: which job of a cluster is timing which call, so that jobs at once do not time the same ones."""

from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import Protocol

LEASE_S = 15.0
"""A job that says nothing for so long has ended; its calls are free."""


class InHand:
    """The calls that jobs have in hand. A call is one job's until that has stored its result, or gives it back."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._holders: dict[str, str] = {}
        self._seen: dict[str, float] = {}

    def claim(self, job: str, keys: Sequence[str]) -> tuple[list[str], bool]:
        """Take calls into a job's hand; return those that another one has, and whether there are other jobs at all."""
        now = self._clock()
        self._seen[job] = now
        ended = {other for other, at in self._seen.items() if now - at > LEASE_S}
        for other in ended:
            self.leave(other)
        elsewhere = [key for key in keys if self._holders.setdefault(key, job) != job]
        return elsewhere, len(self._seen) > 1

    def release(self, job: str, keys: Collection[str]) -> None:
        """Give calls back whose results are stored, or that are not to be timed."""
        for key in keys:
            if self._holders.get(key) == job:
                del self._holders[key]

    def leave(self, job: str) -> None:
        """Forget a job, and free its calls."""
        self._seen.pop(job, None)
        self._holders = {key: holder for key, holder in self._holders.items() if holder != job}


class Claims(Protocol):
    """The calls in hand, as one job sees them."""

    @property
    def has_others(self) -> bool:
        """True if other jobs time calls of the same cluster, as of the latest claim."""

    def claim(self, keys: Sequence[str]) -> Collection[str]:
        """Take calls into one's hand, and return those that another job has."""

    def release(self, keys: Collection[str]) -> None:
        """Give calls back."""

    def leave(self) -> None:
        """Give all calls back."""


class Alone:
    """The calls in hand of a job that has a cluster to itself."""

    has_others = False

    def claim(self, keys: Sequence[str]) -> Collection[str]:  # noqa: ARG002
        return ()

    def release(self, keys: Collection[str]) -> None:
        """Keep no account."""

    def leave(self) -> None:
        """Keep no account."""
