"""The size of a space while it is enumerated, and how large it may become."""

from collections.abc import Iterable
from typing import TypeVar

from autotuner.checkpoint import checkpoint
from autotuner.errors import SpaceError

COVERS_MAX = 10_000
"""24 encoder layers written out have 2,700; which two exclude each other is asked of every pair."""

LOOKED_MAX = 1_000_000
"""Combinations of forms that are looked at, admitted or not: 24 encoder layers have 180,000 on a CUDA device."""

KEPT_MAX = 250_000
"""Choices and conversions together, of 3 kB each: 24 encoder layers have 130,000 on a CUDA device."""

T = TypeVar("T")


class Size:
    """Counts what is found of a graph's space, and refuses more than can be kept or looked at.

    Args:
        name: of the graph, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._looked = self._kept = 0

    def look(self) -> None:
        """Count one combination of forms.

        Raises:
            SpaceError: there are too many.
        """
        checkpoint()
        self._looked += 1
        if self._looked > LOOKED_MAX:
            raise self._too_large(LOOKED_MAX, "combinations of forms to look at")

    def kept(self, found: Iterable[T]) -> list[T]:
        """Return choices or conversions as a list.

        Raises:
            SpaceError: with those before, there are too many.
        """
        kept = []
        for each in found:
            checkpoint()
            self._kept += 1
            if self._kept > KEPT_MAX:
                raise self._too_large(KEPT_MAX, "choices and conversions")
            kept.append(each)
        return kept

    def covers(self, found: Iterable[T]) -> tuple[T, ...]:
        """Return covers as a tuple.

        Raises:
            SpaceError: there are too many.
        """
        covers = tuple(found)
        if len(covers) > COVERS_MAX:
            raise self._too_large(COVERS_MAX, "sets of operators that one kernel could compute")
        return covers

    def _too_large(self, most: int, what: str) -> SpaceError:
        return SpaceError(
            f"the space of {self._name!r} is too large: it has more than {most:,} {what}; tune one of the layers that "
            "repeat, give tensors fewer axes, or a search space with fewer kernels or `layouts: declared`"
        )
