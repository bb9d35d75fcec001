"""Counts of the calls of a training step that were padded, and of those that were not, by reason."""

from collections import Counter
from dataclasses import dataclass, field

from autotuner.plan.phrases import counted

LINES = 4
"""So many reasons are told."""


@dataclass(frozen=True)
class PaddingReport:
    """Padded calls of a training step; `str` gives a sentence, or nothing where all calls had one shape.

    Args:
        calls: all of them.
        padded: those that were padded.
        tokens: places for tokens in the batches of these.
        places: the same with the padding.
        shapes: that ran.
        reasons: why calls of further shapes were not padded, with their counts.
    """

    calls: int = 0
    padded: int = 0
    tokens: int = 0
    places: int = 0
    shapes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def added_share(self) -> float:
        """Tokens that were added to padded calls, as a share of those that were there; 0 where none was padded."""
        return self.places / self.tokens - 1 if self.tokens else 0.0

    def __str__(self) -> str:
        told = []
        if self.padded:
            told.append(
                f"{self.padded:,} of {self.calls:,} calls were padded, by {self.added_share:.0%} of their tokens on "
                f"average, and {counted(self.shapes, 'shape')} ran"
            )
        rows = self.reasons.most_common()
        told += [f"{count:,} of {self.calls:,} calls were not padded: {reason}" for reason, count in rows[:LINES]]
        if len(rows) > LINES:
            told.append(f"{sum(count for _, count in rows[LINES:]):,} more were not padded, for other reasons")
        return "; ".join(told)
