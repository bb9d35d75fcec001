"""Batches: calls of one race that travel to a GPU together."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotuner.ir.records import Call

CALLS_MAX = 16
"""About 0.4 s of measuring: long against the millisecond that a message takes, short where an actor is lost."""


@dataclass(frozen=True)
class Batch:
    """Calls that are raced on one GPU, the incumbent of their race first."""

    calls: tuple[Call, ...]


def cut(race: Sequence[Call], most: int = CALLS_MAX) -> list[Batch]:
    """Cut a race into batches of at most `most` calls; each begins with the race's first call.

    The first call is the incumbent, or what is likely fast. So every candidate is compared on the GPU that times it.
    """
    calls = list({call.key: call for call in race}.values())
    first, others = calls[:1], calls[1:]
    parts = [others[start : start + most - 1] for start in range(0, len(others), most - 1)] or [[]]
    return [Batch((*first, *part)) for part in parts if first]
