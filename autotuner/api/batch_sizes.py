"""Sizes of batches that are worth a try within a memory budget, one after the other.

What a step needs at least grows evenly with the samples of its batch, and so does what it needs with all regions at
their fastest. So two sizes tell about where each of the two lines meets the budget: at the largest batch that runs, and
at the largest one that runs without any region giving up time for memory. The most tokens a second lie mostly at one of
these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FIRST = 8


@dataclass(frozen=True)
class TriedSize:
    """A size that was tried.

    Args:
        size: samples of the batch.
        fits: whether it ran within the budget.
        least_bytes: the least budget under which it runs; None where that is not known.
        fastest_bytes: the least budget under which all regions run at their fastest; None where that is not known.
    """

    size: int
    fits: bool
    least_bytes: int | None = None
    fastest_bytes: int | None = None


def next_size(tried: Sequence[TriedSize], budget_bytes: int) -> int | None:
    """Return the size to try next, None where no other one is worth it."""
    if not tried:
        return FIRST
    fitting = max((each.size for each in tried if each.fits), default=0)
    if not fitting:
        return min(each.size for each in tried) // 2 or None
    too_large = min((each.size for each in tried if each.size > fitting), default=None)
    largest = _size_at(tried, "least_bytes", budget_bytes)
    guess = _larger(fitting, too_large, largest)
    if guess is not None:
        return guess
    fastest = _size_at(tried, "fastest_bytes", budget_bytes)
    guess = 0 if fastest is None else min(_rounded_down(fastest), fitting)
    return guess if guess > 0 and guess not in {each.size for each in tried} else None


def _larger(fitting: int, too_large: int | None, largest: float | None) -> int | None:
    """Return a size above one that fits, by where the budget is expected to be met, None where there is none."""
    if too_large is None:
        guess = 2 * fitting if largest is None else min(4 * fitting, _rounded_down(largest))
    else:
        guess = _rounded_down((fitting + too_large) / 2 if largest is None else largest)
        if guess >= too_large:
            guess = _rounded_down((fitting + too_large) / 2)
    return guess if guess > fitting else None


def _size_at(
    tried: Sequence[TriedSize], which: Literal["least_bytes", "fastest_bytes"], budget_bytes: int
) -> float | None:
    """Return where a line through the two known sizes nearest to the budget meets it, None where two are not known."""
    known: list[tuple[int, int]] = [(each.size, found) for each in tried if (found := getattr(each, which)) is not None]
    nearest = sorted(known, key=lambda each: abs(each[1] - budget_bytes))[:2]
    if len(nearest) < 2:
        return None
    (size, own), (other_size, other) = sorted(nearest)
    if own >= other:
        return None
    return size + (budget_bytes - own) * (other_size - size) / (other - own)


def _rounded_down(size: float) -> int:
    """Return the largest size up to this one that devices like: a multiple of 8, of 2 below 16, or any below 4."""
    step = 8 if size >= 16 else 2 if size >= 4 else 1
    return int(size) // step * step
